"""Fused multiply-add without a hardware instruction gives the bits of the C library's `fmaf`."""

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.codecs.kernels import matrices

FMAF = ctypes.CDLL(None).fmaf
FMAF.restype, FMAF.argtypes = ctypes.c_float, [ctypes.c_float] * 3

add_row: Any = matrices._add_row

ANY = st.floats(width=32, allow_nan=False, allow_infinity=False)
POWERS = (-140, -126, -100, -63, -24, 0, 1, 40, 127)


def is_right(a: Any, b: Any, c: Any) -> bool:
    """Return whether the kernel gives the bits of the C library for three float32."""
    a, b, c = map(np.float32, (a, b, c))
    return bool(np.float32(matrices.fma_alone(a, b, c)).tobytes() == np.float32(FMAF(a, b, c)).tobytes())


def half_way() -> list[tuple[float, float, float]]:
    """Return factors whose product lies half-way between two float32, and a decisive addend too small for float64."""
    found = []
    for power, sign, lift in itertools.product(POWERS, (1.0, -1.0), (0, 30, 60, 90)):
        one = np.float32(1 + 2.0**-12)
        other = np.ldexp(one, power).astype(np.float32)
        for addend in (sign * 2.0 ** (power - 24 - lift), -sign * 2.0 ** (power - 24 - lift), 0.0):
            found.append((float(one), float(np.float32(sign) * other), float(np.float32(addend))))
    return found


@pytest.mark.parametrize(("a", "b", "c"), half_way())
def test_half_way_between_two_the_addend_decides(a: float, b: float, c: float) -> None:
    assert is_right(a, b, c)


def test_some_of_these_are_wrong_when_rounded_twice() -> None:
    """Otherwise these cases could not tell a right rounding from a wrong one."""
    twice = [(np.float32(np.float64(a) * b + c), FMAF(a, b, c)) for a, b, c in half_way()]
    assert sum(x != np.float32(y) for x, y in twice) > 20


@settings(max_examples=500, deadline=None)
@given(ANY, ANY, ANY)
def test_any_three_numbers(a: float, b: float, c: float) -> None:
    assert is_right(a, b, c)


@settings(max_examples=500, deadline=None)
@given(ANY, ANY, st.integers(-2, 2), st.integers(-40, 0))
def test_what_cancels_to_almost_nothing(a: float, b: float, ulps: int, power: int) -> None:
    with np.errstate(over="ignore", under="ignore"):
        smaller = np.ldexp(np.float32(b), power).astype(np.float32)
        c = -np.float32(np.float64(a) * np.float64(smaller))
    for _ in range(abs(ulps)):
        c = np.nextafter(c, np.float32(np.inf * ulps))
    assert not np.isfinite(c) or is_right(a, smaller, c)


@pytest.mark.parametrize("scale", [1.0, 2.0**-70, 2.0**60, 2.0**-63])
def test_a_row_is_what_its_elements_are(scale: float) -> None:
    draw = np.random.default_rng(0)
    factor = np.float32((1 + 2.0**-12) * scale)
    width = matrices._WIDTH
    row = (draw.normal(size=width) * scale).astype(np.float32)
    into = (draw.normal(size=width) * scale * scale).astype(np.float32)
    row[3], into[3] = np.float32((1 + 2.0**-12) * scale), np.float32(2.0**-60 * scale * scale)
    row[5] = into[5] = row[7] = np.float32(0.0)
    expected = [FMAF(factor, r, x) for r, x in zip(row, into, strict=True)]
    add_row(factor, row, into, np.empty(width, np.float32))
    assert into.tobytes() == np.array(expected, np.float32).tobytes()


# 641 · 6700417 = 2³² + 1: the product lies half-way between two denormals, plus a bit that float64 loses beside 2⁻¹²⁷.
DENORMAL = (641 * 2.0**-91, 6700417 * 2.0**-91, 2.0**-127)
NORMAL = (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60)


@pytest.mark.parametrize("doubtful", [NORMAL, DENORMAL])
@pytest.mark.parametrize("at", [0, 100, 255])
def test_one_element_that_is_doubtful_is_seen_wherever_it_is(at: int, doubtful: tuple[float, float, float]) -> None:
    factor, row_at, into_at = map(np.float32, doubtful)
    twice = np.float32(np.float64(factor) * np.float64(row_at) + np.float64(into_at))
    assert twice != np.float32(FMAF(factor, row_at, into_at)), "the element must be one that two roundings get wrong"
    row, into = np.ones(256, np.float32), np.ones(256, np.float32)
    row[at], into[at] = row_at, into_at
    expected = [FMAF(factor, r, x) for r, x in zip(row, into, strict=True)]
    add_row(factor, row, into, np.empty(256, np.float32))
    assert into.tobytes() == np.array(expected, np.float32).tobytes()
