"""What a codec drops of a learner's updates, while it waits to be sent: as precise as the parameters are.

Where all of a fragment's parameters have two bytes, so have its residuals (bfloat16): in the lab that costs no loss
that can be told (docs/experiments.md), and a learner keeps several of them.
"""

from typing import cast

import numpy as np

from isthmus.codecs import kernels
from isthmus.codecs.kernels import F32, U16
from isthmus.format import memory
from isthmus.format.layout import Fragment

Residual = F32 | U16
"""[n], float32, or the bits of bfloat16."""


def are_halves(fragment: Fragment) -> bool:
    """Return whether residuals of a fragment are kept in two bytes a parameter."""
    return all(t.spec.dtype != "float32" for t in fragment.tensors)


def kept(fragment: Fragment, x: F32) -> Residual:
    """Return x [n] as it is kept: x itself, or its bfloat16, rounded to nearest even."""
    if not are_halves(fragment):
        return x
    out = memory.room(2 * x.size).view(np.uint16)
    kernels.encode_bf16(x, out)
    return out


def whole(residual: Residual) -> F32:
    """Return a residual as float32."""
    if residual.dtype == np.float32:
        return cast(F32, residual)
    out = memory.empty(residual.size)
    kernels.decode_bf16(cast(U16, residual), out)
    return out
