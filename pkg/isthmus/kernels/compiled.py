"""How a hot loop is compiled, and what arrays it takes."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]

F = TypeVar("F", bound=Callable[..., Any])


def kernel(fn: F) -> F:
    """Compile on first use, without the GIL, and keep the machine code on disk between processes.

    The cache knows the file of a function alone: what it calls and the constants it reads are in that file, too.
    """
    return cast(F, numba.njit(nogil=True, cache=True, fastmath=False, error_model="numpy")(fn))
