"""The table of permissions: what each participant of a run may do to its objects and streams.

`isthmus access` turns the table into policies for Redis and object stores, `isthmus doctor` tries it,
docs/permissions.md is printed from it, and tests check every line of it on real servers. Anything that is not granted
here is denied.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Participant(StrEnum):
    """A kind of participant in a run. Each has credentials of its own."""

    OWNER = "owner"
    """Creates the run, and decides who is a member."""
    SYNCER = "syncer"
    COLLECTOR = "collector"
    """Runs `isthmus gc`."""
    LEARNER = "learner"
    FOLLOWER = "follower"
    """Follows the global model, and writes a series of its measurements."""
    READER = "reader"
    """Reads everything: status, replay, explain, dashboards."""


class Operation(StrEnum):
    """An operation on an object, or on a prefix."""

    READ = "read"
    LIST = "list"
    CREATE = "create"
    """Write a key that does not exist yet; never overwrite an object."""
    REPLACE = "replace"
    """Write a key, whether it exists or not."""
    DELETE = "delete"


READ, LIST, CREATE, REPLACE, DELETE = Operation

FRAGMENT = "<p>"
"""Stands for the five digits of a fragment. A * would also match slashes, as in updates/0/OTHER/NAME/…"""

RUN = "<run>"
"""Stands for the first 16 digits of a run's digest, in keys of a bus in the store."""

OWN = "NAME"
"""Stands for the learner's own name, and for a follower's series."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission for an operation on keys below the run.

    In a pattern * matches any characters, slashes included. A grant to list names a prefix that ends with a slash.
    """

    operation: Operation
    patterns: tuple[str, ...]
    why: str
    large: bool = False
    """Whether an object may be too large for one request, so that it is sent in parts."""


def _grant(operation: Operation, patterns: str, why: str, *, large: bool = False) -> Grant:
    return Grant(operation, tuple(patterns.split()), why, large)


_PUBLISHED = _grant(READ, "run members/* commits/* segments/* values/* snapshots/*", "what a model is folded from")
_STARTS = _grant(LIST, "snapshots/<p>/ members/", "where to start from; who is in the run")
_TRIED = (
    _grant(READ, "scratch/*", "whether create-only writes are honoured is tried at every start"),
    _grant(LIST, "scratch/", "the doctor dates an object of its own"),
    _grant(REPLACE, "scratch/*", "as above"),
    _grant(DELETE, "scratch/*", "as above"),
)
_BUS = f"bus/{RUN}"
_SAID = "messages, if the bus is in the store"
_HEARS = "which processes have messages there"
_SPEAKS = "its own messages there: a process writes one object again and again"
_CHECKPOINTS = f"learners/{OWN}/*/checkpoints/*"

GRANTS: Mapping[Participant, tuple[Grant, ...]] = {
    Participant.OWNER: (
        _PUBLISHED,
        _STARTS,
        *_TRIED,
        _grant(CREATE, "run members/*", "a run, and who is in it, are said once"),
        _grant(READ, "proposals/*", "changes that wait for other owners' approvals"),
        _grant(LIST, "proposals/*", "as above"),
        _grant(CREATE, "proposals/*", "each owner's approval is an object of its own"),
        _grant(READ, "learners/*/checkpoints/*", "it vouches for the newest when it rotates a learner's key"),
        _grant(LIST, "learners/", "as above"),
        _grant(REPLACE, "snapshots/<p>/000000000000-*", "version 0, before the run object that names it"),
    ),
    Participant.SYNCER: (
        _PUBLISHED,
        _STARTS,
        *_TRIED,
        _grant(READ, "updates/* manifests/*", "what it merges, and what learners state about it"),
        _grant(LIST, "manifests/*", "whether a manifest is lost"),
        _grant(LIST, "commits/<p>/", "whether one is missing"),
        _grant(CREATE, "commits/*", "the log: creating a commit decides"),
        _grant(REPLACE, "values/* snapshots/*", "keys end in a digest, two may publish one round, a PUT is sent again"),
        _grant(READ, f"{_BUS}/*", _SAID),
        _grant(LIST, f"{_BUS}/*", _HEARS),
        _grant(REPLACE, f"{_BUS}/syncer/*", _SPEAKS),
        _grant(DELETE, f"{_BUS}/syncer/*", "messages of processes that ended"),
    ),
    Participant.COLLECTOR: (
        _PUBLISHED,
        _STARTS,
        *_TRIED,
        _grant(LIST, "values/<p>/ updates/<p>/ learners/", "what there is to collect"),
        _grant(READ, "learners/*/checkpoints/*", "which of a signed run's checkpoints are their learners' own"),
        _grant(READ, "promotions/* evaluations/*", "what the newest promoted version is folded from is kept"),
        _grant(REPLACE, "segments/* commits/*", "packs commits, and leaves a pointer under each one's key"),
        _grant(DELETE, "values/* snapshots/* updates/* learners/*/checkpoints/*", "what no kept commit needs"),
        _grant(LIST, "bus/", "messages of processes that ended, if the bus is in the store"),
        _grant(DELETE, "bus/*", "as above"),
    ),
    Participant.LEARNER: (
        _PUBLISHED,
        _STARTS,
        _grant(READ, f"updates/<p>/{OWN}/* learners/{OWN}/*", "its own earlier incarnations"),
        _grant(LIST, f"updates/<p>/{OWN}/ learners/{OWN}/*", "as above"),
        _grant(CREATE, f"updates/<p>/{OWN}/*", "what a commit may have merged is needed again", large=True),
        _grant(CREATE, f"learners/{OWN}/*/claim", "an incarnation of a name is taken once"),
        _grant(READ, f"manifests/{OWN}/*", "whether it has stored the same manifest before"),
        _grant(LIST, f"manifests/{OWN}/", "as above"),
        _grant(CREATE, f"manifests/{OWN}/*", "what a commit names is needed again"),
        _grant(REPLACE, _CHECKPOINTS, "who may delete may replace; nobody's log depends on a checkpoint"),
        _grant(DELETE, _CHECKPOINTS, "its own old ones; never an update or a claim"),
        _grant(READ, f"{_BUS}/syncer/* {_BUS}/learner/{OWN}/*", _SAID),
        _grant(LIST, f"{_BUS}/syncer/ {_BUS}/learner/{OWN}/", _HEARS),
        _grant(REPLACE, f"{_BUS}/learner/{OWN}/*", _SPEAKS),
        _grant(DELETE, f"{_BUS}/learner/{OWN}/*", "messages of its earlier processes"),
    ),
    Participant.FOLLOWER: (
        _PUBLISHED,
        _STARTS,
        _grant(READ, "promotions/* evaluations/*", "which versions are promoted, and by which numbers"),
        _grant(LIST, "promotions/ evaluations/*", "as above"),
        _grant(CREATE, f"evaluations/{OWN}/*", "its own series; promotions rest on these numbers"),
        _grant(CREATE, "promotions/*", "each promotion names the one before; readers judge each of them"),
    ),
    Participant.READER: (
        _PUBLISHED,
        _STARTS,
        _grant(READ, "updates/* learners/* evaluations/*", "replay folds updates, status reads checkpoints' heads"),
        _grant(READ, "proposals/*", "changes of the charter that wait for approvals"),
        _grant(LIST, "proposals/*", "as above"),
        _grant(READ, "promotions/*", "which versions are promoted"),
        _grant(LIST, "promotions/", "as above"),
        _grant(READ, "manifests/*", "what learners state about their updates: explain, replay"),
        _grant(LIST, "manifests/*", "as above"),
        _grant(
            LIST, "values/<p>/ updates/* learners/* evaluations/*", "explain looks for updates, status for learners"
        ),
        _grant(LIST, "commits/<p>/", "whether one is missing"),
        _grant(READ, f"{_BUS}/*", _SAID),
        _grant(LIST, f"{_BUS}/*", _HEARS),
    ),
}
"""The grants of each participant. To list is to read names. Without it some stores answer 403, not 404, for a key that
does not exist."""

OPTIONAL: Mapping[Participant, tuple[Grant, ...]] = {
    Participant.LEARNER: (
        _grant(READ, "learners/*/checkpoints/*", "a newcomer takes the moments of a learner that is doing well"),
        _grant(LIST, "learners/", "which learners have checkpoints"),
    ),
    Participant.FOLLOWER: (
        _grant(READ, "learners/*/checkpoints/*", "running statistics and other buffers of the model are in them"),
        _grant(LIST, "learners/", "which learners have checkpoints"),
    ),
}
"""Further grants, which strict policies leave out. Without them a new learner warms up with fresh optimizer moments,
and a followed model keeps its initial buffers."""

ALL_STREAMS = "*"

STREAMS: Mapping[Participant, tuple[tuple[str, ...], tuple[str, ...]]] = {
    Participant.OWNER: ((), ()),
    Participant.COLLECTOR: ((), ()),
    Participant.SYNCER: ((ALL_STREAMS,), ("syncer",)),
    Participant.LEARNER: (("syncer", f"learner/{OWN}"), (f"learner/{OWN}",)),
    Participant.FOLLOWER: ((), ()),
    Participant.READER: ((ALL_STREAMS,), ()),
}
"""The streams of the bus that each participant reads, and those it writes. Participants with none get no bus user."""


def grants(participant: Participant, name: str = "", *, checkpoints: bool = True) -> Sequence[Grant]:
    """Return the grants of a participant, with its own name in the patterns.

    With `checkpoints` it may read other learners' checkpoints, too: `OPTIONAL` is included.
    """
    given = GRANTS[participant] + (OPTIONAL.get(participant, ()) if checkpoints else ())
    return [replace(g, patterns=tuple(p.replace(OWN, name) for p in g.patterns)) for g in given]


def streams(participant: Participant, name: str = "") -> tuple[Sequence[str], Sequence[str]]:
    """Return the streams that a participant reads, and those it writes."""
    read, written = STREAMS[participant]
    return [s.replace(OWN, name) for s in read], [s.replace(OWN, name) for s in written]


def fits(pattern: str, key: str) -> bool:
    """Return whether a key fits a pattern of the table."""
    parts = re.split(f"({re.escape(FRAGMENT)}|{re.escape(RUN)}|\\*)", pattern)
    meant = {FRAGMENT: "[0-9]{5}", RUN: "[0-9a-f]{16}", "*": ".*"}
    expression = "".join(meant.get(part, re.escape(part)) for part in parts)
    return re.fullmatch(expression, key, re.DOTALL) is not None


def may(participant: Participant, operation: Operation, key: str, name: str = "", *, checkpoints: bool = True) -> bool:
    """Return whether a participant may do this to a key, or for `LIST` to a prefix. `REPLACE` includes `CREATE`."""
    enough = {operation, REPLACE} if operation == CREATE else {operation}
    return any(
        fits(pattern, key)
        for grant in grants(participant, name, checkpoints=checkpoints)
        if grant.operation in enough
        for pattern in grant.patterns
    )
