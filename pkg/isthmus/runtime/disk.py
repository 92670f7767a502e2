"""How much room a folder's file system has left, in bytes and in files: a run is thousands of small files."""

import os
from pathlib import Path
from typing import NamedTuple

from isthmus.wording import counted

FEW = 100_000
"""Fewer files than this are said beside the bytes."""


class Room(NamedTuple):
    """What a file system can still hold."""

    bytes: int
    files: int | None
    """None: it has no limit of its own."""

    def __str__(self) -> str:
        size = f"{self.bytes / 1e9:.1f} GB" if self.bytes >= 1e9 else f"{self.bytes / 1e6:.0f} MB"
        if self.files is None or self.files >= FEW:
            return size
        return f"{size} and room for {counted(self.files, 'more file')} (inodes: df -i)"


def room_in(folder: Path) -> Room:
    """Return the room that is left for this process. Raises `OSError`."""
    found = os.statvfs(folder)
    return Room(found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)
