"""Text that every machine has, Python's standard library: its files are split into shards and a held-out part."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isthmus.errors import InputError

HELD_OUT_MIN = 64 << 10
HELD_OUT_MAX = 128 << 10
"""Size of the held-out text, in bytes: the least that is accepted, and the most that is used."""

_TEXT = {
    ".py",
    ".pyi",
    ".txt",
    ".md",
    ".rst",
    ".c",
    ".h",
    ".rs",
    ".go",
    ".js",
    ".ts",
    ".java",
    ".html",
    ".css",
    ".toml",
}
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
_HELD_OUT_ONE_IN = 16
_FILE_MAX = 4 << 20
_SHARD_MIN = 4096


_PIECE = 16 << 10  # size in bytes of the pieces that a single file is cut into


@dataclass(frozen=True)
class Piece:
    """Part of a file: bytes [start, stop)."""

    path: Path
    start: int
    stop: int

    def read(self) -> bytes:
        """Return the bytes of the piece."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            return file.read(self.stop - self.start)


@dataclass(frozen=True)
class Corpus:
    """Pieces of text, read on demand. Each piece is either held out or in exactly one shard."""

    train: tuple[Piece, ...]
    kept_back: tuple[Piece, ...]
    source: str

    @property
    def held_out(self) -> bytes:
        """The text on which models are compared: at most `HELD_OUT_MAX` bytes."""
        text = b""
        for piece in self.kept_back:
            text += piece.read() + b"\n"
            if len(text) >= HELD_OUT_MAX:
                break
        return text[:HELD_OUT_MAX]

    def shard(self, index: int, count: int) -> bytes:
        """Return shard `index` of `count`: every `count`-th piece. Raises `InputError` if it has too little text."""
        if not 0 <= index < count:
            raise InputError(f"shard {index} of {count}: shards count from 0 to {count - 1}")
        pieces = self.train[index::count]
        size = sum(p.stop - p.start for p in pieces)
        if size < _SHARD_MIN:
            raise InputError(f"{self.source}: too little text for {count} shards ({size} bytes in shard {index})")
        return b"\n".join(piece.read() for piece in pieces)


def corpus(path: str | None = None) -> Corpus:
    """Return the text at `path`, a file or a folder; without `path`, the source of the standard library.

    Raises `InputError` if the path does not exist or has too little text.
    """
    root = Path(path).expanduser() if path else Path(sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise InputError(f"--data {root}: there is no such file or folder")
    if root.is_file():
        train, kept_back = _from_file(root)
    else:
        train, kept_back = [], []
        for name, piece in _files(root, any_text=path is not None):
            # The hash of the name decides, so every machine holds out the same files, whatever other files it has.
            chosen = hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT_ONE_IN == 0
            (kept_back if chosen else train).append(piece)
    held_out = sum(p.stop - p.start for p in kept_back)
    if held_out < HELD_OUT_MIN:
        raise InputError(
            f"{root}: {held_out} bytes of held-out text, {HELD_OUT_MIN} are needed: give a file or folder of at least "
            f"{_HELD_OUT_ONE_IN * HELD_OUT_MIN >> 20} MiB of text"
        )
    return Corpus(tuple(train), tuple(kept_back), str(root))


def _from_file(path: Path) -> tuple[list[Piece], list[Piece]]:
    size = path.stat().st_size
    cut = size - min(max(size // 10, HELD_OUT_MIN), HELD_OUT_MAX)
    if cut <= 0:
        return [], []
    return [Piece(path, i, min(i + _PIECE, cut)) for i in range(0, cut, _PIECE)], [Piece(path, cut, size)]


def _files(root: Path, *, any_text: bool) -> Iterator[tuple[str, Piece]]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(n for n in subfolders if not n.startswith(".") and (any_text or n not in _SKIPPED))
        for name in sorted(names):
            file = Path(folder, name)
            if file.suffix not in (_TEXT if any_text else {".py"}) or file.is_symlink() or not file.is_file():
                continue
            size = file.stat().st_size
            if 0 < size <= _FILE_MAX:
                yield file.relative_to(root).as_posix(), Piece(file, 0, size)
