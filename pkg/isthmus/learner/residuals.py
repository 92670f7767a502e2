"""A learner's residuals, which its codec dropped from its updates and which wait to be sent.

If all of a fragment's parameters have two bytes, its residuals are kept in two bytes too (bfloat16). In the lab this
costs no measurable loss (docs/experiments.md), and a learner keeps several residuals.
"""

from typing import cast

import numpy as np

from isthmus.codecs import kernels
from isthmus.codecs.kernels import F32, U16
from isthmus.format import memory
from isthmus.format.layout import Fragment

Residual = F32 | U16
"""[n]: float32, or uint16 with the bits of bfloat16."""


def are_halves(fragment: Fragment) -> bool:
    """Return whether a fragment's residuals are kept in two bytes per parameter."""
    return all(t.spec.dtype != "float32" for t in fragment.tensors)


def kept(fragment: Fragment, x: F32) -> Residual:
    """Return x [n] in the form in which it is kept: x itself, or its bfloat16 bits, rounded to nearest even."""
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
