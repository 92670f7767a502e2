"""Text that every machine has: the source of Python's standard library, cut into shards and a held-out part by file."""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isthmus.errors import InputError

HELD_OUT_MIN = 64 << 10
HELD_OUT_MAX = 128 << 10
"""Bytes of text on which models are compared."""

_TEXT = {".py", ".pyi", ".txt", ".md", ".rst", ".c", ".h", ".rs", ".go", ".js", ".ts", ".java", ".html", ".css", ".toml"}
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
_HELD_OUT_ONE_IN = 16
_FILE_MAX = 4 << 20


@dataclass(frozen=True)
class Corpus:
    """Files of text; each one is either held out or in exactly one shard."""

    train: tuple[bytes, ...]
    held_out: bytes
    source: str

    def shard(self, index: int, count: int) -> bytes:
        """Return shard `index` of `count`: every count-th file. Raises `InputError` where there is not enough text."""
        if not 0 <= index < count:
            raise InputError(f"shard {index} of {count}: shards count from 0 to {count - 1}")
        text = b"\n".join(self.train[index::count])
        if len(text) < 4096:
            raise InputError(f"{self.source}: too little text for {count} shards ({len(text)} bytes in shard {index})")
        return text


def corpus(path: str | None = None) -> Corpus:
    """Read the standard library's source, or any text file or folder. Raises `InputError` for a path without text."""
    root = Path(path).expanduser() if path else Path(sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise InputError(f"--data {root}: there is no such file or folder")
    if root.is_file():
        return _from_file(root)
    held_out, train = [], []
    for name, text in _files(root, any_text=path is not None):
        # By the name's hash, so that the same file is held out everywhere, whatever else lies beside it.
        chosen = hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT_ONE_IN == 0
        (held_out if chosen else train).append(text)
    return _checked(train, b"\n".join(held_out), str(root))


def _from_file(path: Path) -> Corpus:
    text = path.read_bytes()
    cut = min(max(len(text) // 10, HELD_OUT_MIN), HELD_OUT_MAX)
    body = text[: max(len(text) - cut, 0)]
    # One file has no parts of its own: pieces that are dealt out to the shards in turn.
    pieces = [body[i : i + (16 << 10)] for i in range(0, len(body), 16 << 10)]
    return _checked(pieces, text[len(body) :], str(path))


def _files(root: Path, *, any_text: bool) -> Iterator[tuple[str, bytes]]:
    for file in sorted(root.rglob("*")):
        inner = file.relative_to(root)
        wanted = file.suffix in _TEXT if any_text else file.suffix == ".py" and not _SKIPPED & set(inner.parts)
        if wanted and file.is_file() and not file.is_symlink() and 0 < file.stat().st_size <= _FILE_MAX:
            yield inner.as_posix(), file.read_bytes()


def _checked(train: list[bytes], held_out: bytes, source: str) -> Corpus:
    if len(held_out) < HELD_OUT_MIN:
        raise InputError(
            f"{source}: {len(held_out)} bytes of held-out text, {HELD_OUT_MIN} are needed: give a file or folder of "
            f"at least {16 * HELD_OUT_MIN >> 20} MiB of text"
        )
    return Corpus(tuple(train), held_out[:HELD_OUT_MAX], source)
