"""Choosing the fragments, snapshots and checkpoints to work on, by number and by listing."""

import re
from collections.abc import Callable, Sequence

from isthmus.errors import InputError, LogCorrupt
from isthmus.format.records.fields import NAME
from isthmus.format.records.keys import learner_in, version_in
from isthmus.log.commits import Log
from isthmus.store import Entry

ShareDone = Callable[[float], None]
"""Called from time to time with the share of the work that is done, from 0 to 1."""

_BELOW = rf"learners/{NAME}/[0-9]{{6,16}}/checkpoints/"
_PART = re.compile(_BELOW + r"parts/[0-9]{12}-[0-9]{5}-[0-9a-f]{16}")
_CHECKPOINT = re.compile(_BELOW + r"[0-9]{12}-[0-9a-f]{16}")


def all_or(log: Log, fragments: Sequence[int] | None) -> list[int]:
    """Return the chosen fragments in order; None: all. Raises `InputError` for one that does not exist."""
    count = len(log.run.layout.fragments)
    for p in fragments or ():
        if not 0 <= p < count:
            raise InputError(f"there is no fragment {p}: this run has {count}, counted from 0")
    return list(range(count)) if fragments is None else sorted(set(fragments))


async def earliest(log: Log, fragment: int) -> int:
    """Return the version of the oldest snapshot from which the log can be folded. Lists. Raises `LogCorrupt` if there
    is none."""
    versions = sorted(version for version, _ in await log.snapshots(fragment))
    for version in versions:
        following = await log.commit(fragment, version + 1)
        # The objects that a packed commit names have been deleted, or may be at any time.
        if following is None or not following.in_segment:
            return version
    raise LogCorrupt(f"snapshots/{fragment:05d}/", "no snapshot is left to begin with")


def checkpoints_in(entries: Sequence[Entry]) -> list[Entry]:
    """Return the checkpoints in a listing, newest first: by incarnation, then by step."""
    found = [e for e in entries if _CHECKPOINT.fullmatch(e.key)]
    return sorted(found, key=lambda e: (int(e.key.split("/")[2]), version_in(e.key)), reverse=True)


def by_learner(checkpoints: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return checkpoints by the learner's name in their keys, in the given order within each name.

    Others may have stored invalid objects under these keys: open them one after the other until one is valid.
    """
    found: dict[str, list[Entry]] = {}
    for entry in checkpoints:
        found.setdefault(learner_in(entry.key), []).append(entry)
    return found


def parts_in(entries: Sequence[Entry]) -> list[Entry]:
    """Return the parts of checkpoints in a listing."""
    return [e for e in entries if _PART.fullmatch(e.key)]


async def heads_of(log: Log) -> list[int]:
    """Return the newest version of each fragment. Raises what the store raises."""
    newest = [await log.newest(fragment.index) for fragment in log.run.layout.fragments]
    return [found.version if found else 0 for found in newest]
