"""Check the rights of this user on the folders of a run, each fragment's and each learner's: one alone may be wrong."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from isthmus.doctor.findings import FAILURE, OK, Finding, Role
from isthmus.format.permissions import FRAGMENT, LIST, READ, RUN, Grant, Operation, grants
from isthmus.log.run import Run
from isthmus.runtime.clock import Runtime
from isthmus.runtime.file_rights import why_denied
from isthmus.wording import an

EVERYTHING = "*"
"""The pattern of all keys, which an operator reads and writes."""


async def examine_folder_rights(run: Run, role: Role, root: Path, runtime: Runtime) -> Finding:
    """Return the finding about whether this user may use every folder of a run that its role needs.

    `root`: the run's folder. Nothing is written: owner and mode are looked at.
    """
    folders = await runtime.offload(_needed, run, role, root)
    lacking = [
        why for path, needs in folders.items() if (why := why_denied([str(path)], needs, writing=False, place=root))
    ]
    check = "store: rights"
    if not lacking:
        return Finding(check, OK, f"owner and mode of {len(folders)} folders and files let {an(role.kind)} use them")
    more = f" (and {len(lacking) - 1} more are like that)" if len(lacking) > 1 else ""
    mend = "run that command, and the doctor again until this is ok; the processes then go on by themselves"
    return Finding(check, FAILURE, f"{lacking[0]}{more}", mend)


def _needed(run: Run, role: Role, root: Path) -> dict[Path, int]:
    """Return the rights that a role needs on the existing folders, and on the newest file of each that it reads."""
    found: dict[Path, int] = {}
    for grant in _grants(role):
        reads = grant.operation in (READ, LIST)
        needs = os.X_OK if grant.operation == READ else os.R_OK if grant.operation == LIST else os.W_OK
        for folder, below in _folders(grant, run, root):
            # `Path.exists` raises in a folder that may not be entered; `os.path.exists` then says no.
            place = next(path for path in (folder, *folder.parents) if os.path.exists(path))
            if place != folder and (reads or place == root):
                # Nothing to read is there, or it is in a folder that may not be entered; or the whole tree is still to
                # be made, which other checks try.
                if reads:
                    found[place] = found.get(place, 0) | os.X_OK
                continue
            for path, files in _walk(place) if below and place == folder else [(place, [])]:
                found[path] = found.get(path, 0) | needs
                if grant.operation == READ and files:
                    found[path / max(files)] = os.R_OK
    return found


def _grants(role: Role) -> Sequence[Grant]:
    if role.participant is None:
        return [Grant(operation, (EVERYTHING,), "") for operation in Operation]
    return grants(role.participant, role.name, checkpoints=False)


def _folders(grant: Grant, run: Run, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of a grant's patterns, each with whether folders below it are meant, too."""
    for pattern in grant.patterns:
        for fragment in run.layout.fragments if FRAGMENT in pattern else run.layout.fragments[:1]:
            key = pattern.replace(FRAGMENT, f"{fragment.index:05d}").replace(RUN, run.digest[:8].hex())
            before, star, _ = key.partition("*")
            yield root / before.rpartition("/")[0], bool(star)


def _walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder and those below it, each with the names of its files. Hidden ones are not the run's."""
    closed: list[OSError] = []
    for path, folders, files in os.walk(folder, onerror=closed.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield Path(path), [name for name in files if not name.startswith(".")]
    for error in closed:
        yield Path(error.filename), []  # it may not be listed
