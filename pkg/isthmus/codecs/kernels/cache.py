"""numba's cache of machine code on disk. An unusable cache costs a warning and the time to compile.

numba itself ends a process, at each start, if its cache was cut short by a full disk or a loss of power. It also runs
machine code whose bytes have changed. Here each file has a digest. A file that does not fit its digest, or cannot be
read or written, counts as missing, and the kernel is compiled.
"""

import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile

from isthmus.errors import told

logger = logging.getLogger(__name__)

_DIGEST = 32
_said: set[str] = set()


def keep(made: Any, fn: Callable[..., Any]) -> None:
    """Make numba keep a compiled kernel on disk, or log a warning if no folder can be written."""
    try:
        made._cache = _Cache(fn)
    except Exception as error:  # No folder can be written, or this version of numba keeps its cache in another way.
        _warn("there is no place for", error)


def _warn(what: str, error: Exception) -> None:
    if what not in _said:
        _said.add(what)
        logger.warning(
            "%s the compiled kernels on disk, so they are compiled anew, which takes some ten seconds: %s; "
            "set NUMBA_CACHE_DIR to another folder", what, told(error),
        )  # fmt: skip


class _Damaged(Exception):
    """The bytes are not those that were written."""


class _File(IndexDataCacheFile):
    """The index and data files of a cache, each followed by a digest, which numba does not read."""

    def _load_data(self, name: str) -> Any:
        _check(self._data_path(name))  # type: ignore[no-untyped-call]
        return super()._load_data(name)  # type: ignore[no-untyped-call]

    def _load_index(self) -> Any:
        if os.path.exists(self._index_path):
            _check(self._index_path)
        return super()._load_index()  # type: ignore[no-untyped-call]

    @contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[io.BytesIO]:
        body = io.BytesIO()
        yield body
        with super()._open_for_write(filepath) as file:
            file.write(body.getvalue() + _digest(body.getvalue()))


def _check(path: str) -> None:
    with open(path, "rb") as file:
        data = file.read()
    if _digest(data[:-_DIGEST]) != data[-_DIGEST:]:
        raise _Damaged(f"the bytes of {path} are not what was written")


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST).digest()


class _Cache(FunctionCache):
    def __init__(self, py_func: Callable[..., Any]) -> None:
        super().__init__(py_func)  # type: ignore[no-untyped-call]
        self._cache_file = _File(  # type: ignore[no-untyped-call]
            cache_path=self._cache_path,
            filename_base=f"{self._impl.filename_base}.checked",
            source_stamp=self._impl.locator.get_source_stamp(),
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the kernel from the disk; None if there is none, or if its file cannot be used."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception as error:  # Damaged bytes can raise any exception.
            _warn("cannot use", error)
            try:
                self._cache_file.flush()  # type: ignore[no-untyped-call]
            except OSError:
                logger.debug("a damaged index stays", exc_info=True)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write a compiled kernel to the disk; log a warning if that fails."""
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except Exception as error:  # The disk is full, the folder is read-only, or the index cannot be read.
            _warn("cannot keep", error)
