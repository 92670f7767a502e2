"""A folder store deletes scratch files that a SIGKILL left behind, and keeps those that are still being written."""

import os
import threading
from pathlib import Path

import pytest

from isthmus.errors import Unavailable
from isthmus.runtime.clock import single_threaded, threaded
from isthmus.store import files
from isthmus.store.files import ABANDONED_S, FileStore


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The folder of scratch files, with an old one, a recent one and one of this moment."""
    folder = tmp_path / ".scratch"
    folder.mkdir()
    for name, age_s in (("old", ABANDONED_S + 60), ("recent", ABANDONED_S - 60), ("fresh", 0)):
        path = folder / name
        path.write_bytes(b"half an obj")
        now = path.stat().st_mtime
        os.utime(path, (now, now - age_s))
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("write", ["put", "create"])
async def test_the_first_write_sweeps_what_was_cut_off_and_nothing_else(
    write: str, scratch: Path, tmp_path: Path
) -> None:
    store = FileStore(tmp_path, single_threaded(0))
    await getattr(store, write)("a/b", b"x")
    assert names(scratch) == {"recent", "fresh"}
    assert (tmp_path / "a" / "b").read_bytes() == b"x"


async def test_reading_sweeps_nothing(scratch: Path, tmp_path: Path) -> None:
    """Commands that only read, such as `isthmus replay` on a copied folder, change nothing in it."""
    (tmp_path / "a").write_bytes(b"x")
    store = FileStore(tmp_path, single_threaded(0))
    await store.get("a")
    assert [entry.key for entry in await store.list("")] == ["a"], "scratch files are not listed"
    assert names(scratch) == {"old", "recent", "fresh"}


async def test_a_store_sweeps_once(scratch: Path, tmp_path: Path) -> None:
    store = FileStore(tmp_path, single_threaded(0))
    await store.put("a", b"x")
    (scratch / "old").write_bytes(b"")
    os.utime(scratch / "old", (0, 0))
    await store.put("b", b"y")
    assert "old" in names(scratch), "listing the folder at each write would be wasted work"


async def test_sweeping_leaves_the_event_loop(scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = []
    swept = files._sweep

    def sweep(folder: Path, before: float) -> None:
        where.append(threading.current_thread())
        swept(folder, before)

    monkeypatch.setattr(files, "_sweep", sweep)
    with threaded(1) as runtime:
        await FileStore(tmp_path, runtime).put("a", b"x")
    assert where
    assert where[0] is not threading.main_thread()


@pytest.mark.parametrize("write", ["put", "create"])
async def test_a_writer_whose_file_was_swept_is_to_try_again(
    write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer was stopped for an hour in the middle of a write (SIGSTOP, a laptop's lid)."""
    made = files._make_folder

    def stopped(path: Path, root: Path) -> None:
        for file in (tmp_path / ".scratch").iterdir():
            file.unlink()
        made(path, root)

    store = FileStore(tmp_path, single_threaded(0))
    monkeypatch.setattr(files, "_make_folder", stopped)
    with pytest.raises(Unavailable, match="went away"):
        await getattr(store, write)("a/b", b"x")
    monkeypatch.undo()
    await getattr(store, write)("a/b", b"x")
    assert (tmp_path / "a" / "b").read_bytes() == b"x"
