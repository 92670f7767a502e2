"""The mark of a demo's folder: a demo deletes and replaces only files of demos, and only in a folder with it.

Demos of releases before the mark left none. Their folders are treated like any other without the mark.
"""

import json
import re
import shutil
from pathlib import Path

from isthmus.bus import EMBEDDED_FILE
from isthmus.errors import InputError
from isthmus.format.records.keys import RUN_KEY
from isthmus.version import __version__

MARK = ".isthmus-demo"
MADE_BY = "isthmus demo"

RUN, LOGS, SERVERS, KEYS, CONSORTIUM = "run", "logs", "servers", "keys", "consortium"
FILES = ("report.json", "loss.png")

_OURS = {
    RUN: re.compile(
        rf"{RUN_KEY}|{re.escape(EMBEDDED_FILE)}(-wal|-shm|-journal)?|\.scratch|\.board|"
        "commits|segments|values|snapshots|updates|learners|scratch"
    ),
    LOGS: re.compile(r"(syncer|board|learner-\d+)\.log"),
    SERVERS: re.compile(r"seaweedfs|(seaweedfs|redis)\.log|dump\.rdb"),
    KEYS: re.compile(r"(owner|syncer|learner-\d+)(\.pub)?"),
    CONSORTIUM: re.compile(
        r"run|keys|logs|buckets|cuts-(north|south)-eval|(charter|manifest)\.toml|charter\.json|evaluate\.py|"
        r"audit\.(html|json)(\.sig)?|allowed_signers"
    ),
}
"""Names of the files and folders that a demo writes in each of its folders."""


def claim(out: Path, folders: tuple[str, ...]) -> None:
    """Delete what an earlier demo left in `folders` of `out`, then make `out` and mark it.

    Raises `InputError`, before anything is deleted, if something is in the way that no demo made. Raises `InputError`
    also if a folder cannot be read or written.
    """
    try:
        _look(out, folders)
        for name in folders:
            shutil.rmtree(out / name, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / MARK).write_text(json.dumps({"made_by": MADE_BY, "version": __version__}) + "\n")
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}: {error.filename}") from None


def _look(out: Path, folders: tuple[str, ...]) -> None:
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file: name a folder")
    there = [name for name in (*folders, *FILES) if (out / name).exists() or (out / name).is_symlink()]
    if there and not _marked(out):
        raise InputError(
            f"--out {out}: {out / there[0]} exists, but no mark of a demo ({MARK}): "
            "nothing was deleted; choose another folder, or delete it yourself (demos of earlier "
            "releases left no mark)"
        )
    for name in folders:
        folder = out / name
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise InputError(f"--out {out}: {folder} was not created by a demo: move it, or choose another --out")
        for inside in sorted(folder.iterdir()) if folder.is_dir() else ():
            if inside.is_symlink() or not _OURS[name].fullmatch(inside.name):
                raise InputError(
                    f"--out {out}: {inside} was not written by a demo: nothing was deleted; move it, or "
                    "choose another --out"
                )


def _marked(out: Path) -> bool:
    try:
        found = json.loads((out / MARK).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("made_by") == MADE_BY
