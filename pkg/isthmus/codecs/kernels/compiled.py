"""How a hot loop is compiled, and what arrays it takes."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from isthmus.codecs.kernels import levels
from isthmus.runtime.clock import uncollected

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]

F = TypeVar("F", bound=Callable[..., Any])

PREPARE = "_prepare"
"""What a module of kernels may define, to be called before any of them is compiled."""

_WAITING: dict[str, "list[_Kernel]"] = {}
"""Of each module the kernels that nobody has called yet."""


class _Kernel:
    """A hot loop that is compiled, or loaded from the cache on disk, when it is called first.

    numba takes a quarter of a second to import, which is more than all that a command does that computes nothing.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._made: Callable[..., Any] | None = None
        functools.update_wrapper(self, fn)
        _WAITING.setdefault(fn.__module__, []).append(self)

    def __call__(self, *arguments: Any) -> Any:
        """Run it."""
        if self._made is not None:
            return self._made(*arguments)
        with uncollected():  # the first call brings in most of the compiler
            return self._make()(*arguments)

    def compile_for(self, *arguments: Any) -> None:
        """Compile it for arguments of these types and keep it, without running it: also for another processor."""
        made: Any = self._made or self._make()
        import numba

        made.compile(tuple(map(numba.typeof, arguments)))

    def _make(self) -> Callable[..., Any]:
        levels.choose()
        import numba
        from numba.core.compiler_lock import global_compiler_lock

        from isthmus.codecs.kernels.cache import keep

        with global_compiler_lock:  # whoever comes second finds all of it made
            module = self._fn.__globals__
            if self._made is None and PREPARE in module:
                module[PREPARE]()
            # What it calls is in its module, by these names, and has to be one of numba's by then.
            for kernel in _WAITING.pop(self._fn.__module__, []):
                kernel._made = numba.njit(nogil=True, fastmath=False, error_model="numpy")(kernel._fn)
                keep(kernel._made, kernel._fn)
                module[kernel._fn.__name__] = kernel._made
        assert self._made is not None, "a kernel waits in its own module"
        return self._made


def kernel(fn: F) -> F:
    """Compile on first use, without the GIL, and keep the machine code on disk between processes.

    The cache knows the file of a function alone: what it calls and the constants it reads are in that file, too.
    """
    return cast(F, _Kernel(fn))
