"""A store in a folder: atomic by rename, create-only by hard link, durable by fsync, safe for several processes."""

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from isthmus.errors import Denied, ObjectMissing, StoreFull, StoreReadOnly, Unavailable
from isthmus.format.records.frame import Blob, Body, Data, Gathered, blank
from isthmus.format.records.keys import RUN_KEY
from isthmus.runtime.clock import Runtime
from isthmus.runtime.descriptors import explained
from isthmus.runtime.disk import room_in
from isthmus.runtime.file_rights import why_denied, why_read_only
from isthmus.store.base import Entry, Store

T = TypeVar("T")

_SCRATCH = ".scratch"  # folder for files that are being written; never listed

ABANDONED_S = 3600.0
"""A scratch file without a write for this long was left behind by a SIGKILL or a loss of power."""


class FileStore(Store):
    """Objects as files below `root`. Keys are paths; a key can never leave the root."""

    def __init__(self, root: Path, runtime: Runtime) -> None:
        self.root = root
        self.url = str(root)
        self._runtime = runtime
        self._swept = False
        self._identity: tuple[int, int] | None = None
        """Device and inode of the root, once it has been seen."""
        self._run_object: bytes | None = None
        """Digest of the run object below the root, once there is one."""

    @override
    async def get(self, key: str) -> Body:
        return await self._run(key, self._read, 0, None)

    @override
    async def get_range(self, key: str, start: int, stop: int) -> Body:
        return await self._run(key, self._read, start, stop)

    @override
    async def put(self, key: str, data: Data) -> None:
        await self._run(key, self._write, data, os.replace)

    @override
    async def create(self, key: str, data: Blob) -> bool:
        return await self._run(key, self._write, data, os.link)

    @override
    async def list(self, prefix: str) -> Sequence[Entry]:
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"a prefix ends with '/': {prefix!r}")
        return await self._run(prefix, self._list)

    @override
    async def delete(self, key: str) -> None:
        await self._run(key, lambda path: path.unlink(missing_ok=True))

    async def _run(self, key: str, fn: Callable[..., T], *args: object) -> T:
        path = self._path(key)
        try:
            return await self._runtime.offload(self._there, fn, path, *args)
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissing(key) from None
        except IsADirectoryError:
            # The path is a folder with objects in it, and no object has this key.
            if fn == self._read:
                raise ObjectMissing(key) from None
            raise Denied(f"{path} is a folder, and an object has to be written there") from None
        except PermissionError as error:
            raise Denied(f"{self.root}: {self._why(error, writing=fn not in (self._read, self._list))}") from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                if error.errno == errno.ENOSPC and room_in(self.root).files == 0:
                    raise StoreFull(str(self.root), self.url, "it can hold no more files: df -i", "inodes") from None
                raise StoreFull(str(self.root), self.url, str(error.strerror)) from None
            if error.errno == errno.EROFS:
                raise StoreReadOnly(why_read_only(path)) from None
            raise Unavailable(f"{self.root}: {explained(str(error))}") from None

    def _why(self, error: PermissionError, *, writing: bool) -> str:
        """Return which right is missing, and the command that gives it."""
        paths = [str(path) for path in (error.filename, error.filename2) if path]
        return why_denied(paths, os.R_OK, writing=writing, place=self.root) or (
            f"{error.strerror}: {error.filename}, though owner and mode allow it: see `lsattr -d` of it and of its "
            "folder, the options of the mount, and SELinux or AppArmor"
        )

    def _there(self, fn: Callable[..., T], path: Path, *args: object) -> T:
        """Run `fn` on a file of this folder, if it is still the same folder. On a thread.

        The folder is checked before and after: a file written into an empty mount point did not reach the run, and a
        file not found there may still exist.
        """
        self._require_same()
        self._require_no_link(path)
        try:
            return fn(path, *args)
        finally:
            self._require_same()

    def _require_same(self) -> None:
        """Raise `Unavailable` if the root is gone, or is another folder without this run, as after a lost mount."""
        try:
            found = os.stat(self.root)
        except (FileNotFoundError, NotADirectoryError):
            if self._identity is None:
                return
            raise Unavailable(f"{self.root} is gone: was a mount lost?") from None
        here = found.st_dev, found.st_ino
        if here == self._identity and self._run_object is not None:
            return
        run = self._digest_of_run()
        if here != self._identity and self._run_object is not None and run != self._run_object:
            raise Unavailable(f"{self.root} is another folder than before, without this run: was a mount lost?")
        self._identity, self._run_object = here, run

    def _digest_of_run(self) -> bytes | None:
        try:
            return hashlib.blake2b((self.root / RUN_KEY).read_bytes()).digest()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def _require_no_link(self, path: Path) -> None:
        """Raise `Denied` if the path has a symbolic link: we could write or delete foreign files through it."""
        at = str(self.root)
        for name in path.relative_to(self.root).parts:
            at = f"{at}/{name}"
            if os.path.islink(at):
                raise Denied(f"{at} is a link: no folder or file of a run may be one")

    def _path(self, key: str) -> Path:
        if any(part in ("", ".", "..") or part.startswith(".") for part in key.removesuffix("/").split("/") if key):
            raise ValueError(f"not a key: {key!r}")
        return self.root / key

    def _read(self, path: Path, start: int, stop: int | None) -> Body:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            data, at = blank(max(0, min(size, size if stop is None else stop) - start)), 0
            file.seek(start)
            while at < len(data):
                read = file.readinto(data[at:])
                if not read:
                    raise OSError(f"{path} shrank while it was read")
                at += read
        return data

    def _write(self, path: Path, data: Data, settle: Callable[[Path, Path], None]) -> bool:
        scratch = self.root / _SCRATCH / self._runtime.new_id()
        self._require_no_link(scratch.parent)
        try:
            scratch.parent.mkdir(parents=self._identity is None, exist_ok=True)
        except (FileNotFoundError, NotADirectoryError) as error:  # to a caller these would mean a missing object
            raise Denied(f"{self.root} is not writable ({error.strerror}): choose another folder") from None
        try:
            with open(scratch, "xb", buffering=0) as file:
                if not self._swept:
                    self._swept = True
                    # Ages are measured against the time of the new file: the file system may be on another machine,
                    # with another clock.
                    _sweep(scratch.parent, os.fstat(file.fileno()).st_mtime - ABANDONED_S)
                for view in data.views() if isinstance(data, Gathered) else (memoryview(data),):
                    at = 0
                    while at < len(view):
                        at += file.write(view[at:])
                os.fsync(file.fileno())
            _make_folder(path.parent, self.root)
            try:
                settle(scratch, path)
            except FileExistsError:
                return False
            except FileNotFoundError:
                # This process stood still for so long that another one deleted the file. The write can be retried.
                raise Unavailable(f"{self.root}: {scratch} went away while it was written") from None
            _sync_folder(path.parent)
            return True
        finally:
            with contextlib.suppress(FileNotFoundError):
                scratch.unlink()

    def _list(self, path: Path) -> Sequence[Entry]:
        return sorted(Entry(str(p.relative_to(self.root)), s.st_size, s.st_mtime) for p, s in _walk(path))


def _sweep(folder: Path, before: float) -> None:
    """Delete the files in a folder whose last write was before a time [seconds since 1970]."""
    for entry in os.scandir(folder):
        # Another process may be sweeping too, or the file may belong to another user.
        with contextlib.suppress(OSError):
            if entry.stat(follow_symlinks=False).st_mtime < before:
                os.unlink(entry.path)


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.is_symlink():
            continue
        if entry.is_dir():
            yield from _walk(Path(entry.path))
        else:
            # The file may have been deleted since the listing.
            with contextlib.suppress(FileNotFoundError):
                yield Path(entry.path), entry.stat()


def _make_folder(path: Path, root: Path) -> None:
    """Create a folder and its parents below a root durably: a power cut must not undo the folder of an object in a
    commit. Raises `Unavailable` if the root is gone: made again, it would stand in the way of the one that comes back.
    """
    if path.is_dir():
        return
    if path == root:
        raise Unavailable(f"{root} is gone: was a mount lost?")
    _make_folder(path.parent, root)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
