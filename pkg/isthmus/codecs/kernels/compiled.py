"""Compiles a hot loop at its first call, and names the types of its arrays."""

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
"""Name of a function that a module of kernels may define. It is called before any of them is compiled."""

_WAITING: dict[str, "list[_Kernel]"] = {}
"""For each module, the kernels that are not compiled yet."""


class _Kernel:
    """A hot loop that is compiled, or loaded from the cache on disk, at its first call.

    Importing numba takes a quarter of a second, longer than a command that computes nothing takes altogether.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._made: Callable[..., Any] | None = None
        functools.update_wrapper(self, fn)
        _WAITING.setdefault(fn.__module__, []).append(self)

    def __call__(self, *arguments: Any) -> Any:
        """Run the loop."""
        if self._made is not None:
            return self._made(*arguments)
        with uncollected():  # The first call imports most of the compiler.
            return self._make()(*arguments)

    def compile_for(self, *arguments: Any) -> None:
        """Compile for arguments of these types and keep the code, without running it; another processor is possible."""
        made: Any = self._made or self._make()
        import numba

        made.compile(tuple(map(numba.typeof, arguments)))

    def _make(self) -> Callable[..., Any]:
        levels.choose()
        import numba
        from numba.core.compiler_lock import global_compiler_lock

        from isthmus.codecs.kernels.cache import keep

        with global_compiler_lock:  # A thread that comes second finds the kernels already made.
            module = self._fn.__globals__
            if self._made is None and PREPARE in module:
                module[PREPARE]()
            # numba looks up the kernels that a kernel calls by name in its module, and must find its own objects there.
            for kernel in _WAITING.pop(self._fn.__module__, []):
                kernel._made = numba.njit(nogil=True, fastmath=False, error_model="numpy")(kernel._fn)
                keep(kernel._made, kernel._fn)
                module[kernel._fn.__name__] = kernel._made
        assert self._made is not None, "a kernel waits in its own module"
        return self._made


def kernel(fn: F) -> F:
    """Return a function that is compiled at its first call, runs without the GIL, and is kept on disk as machine code.

    The cache notices changes of the function's own file alone. What the function calls and the constants that it reads
    must therefore be in that file.
    """
    return cast(F, _Kernel(fn))
