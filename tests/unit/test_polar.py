"""The polar factor agrees with an SVD in float64, and its bits depend on neither threads nor processors."""

import ctypes
import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from isthmus.codecs import kernels
from isthmus.codecs.kernels import F32
from isthmus.format.isotropic import STEPS, flop
from isthmus.log.polar import QUINTICS, isotropic, polar_factor
from isthmus.runtime.clock import ComputePool

SHAPES = [(2, 2), (3, 5), (64, 33), (33, 64), (257, 130), (300, 301)]

BITS = "f97261ca"
"""The start of the digest below. Any other value means that the arithmetic has changed."""


def matrix(m: int, n: int, rank: int | None = None, seed: int = 0) -> F32:
    bits = np.random.PCG64(seed)  # raw bits: the distributions may change with NumPy

    def draw(rows: int, columns: int) -> F32:
        raw = (bits.random_raw(rows * columns) >> np.uint64(40)).astype(np.float32)
        return ((raw - 2**23) * np.float32(2**-23)).reshape(rows, columns)

    if rank is None:
        return draw(m, n)
    return (draw(m, rank).astype(np.float64) @ draw(rank, n).astype(np.float64)).astype(np.float32)


def polar(d: F32, *more: object) -> F32:
    return polar_factor(d, kernels.norm(d.reshape(-1)), *more)  # type: ignore[arg-type]


def digest() -> str:
    h = hashlib.sha256()
    for m, n in SHAPES:
        h.update(polar(matrix(m, n)).tobytes())
    return h.hexdigest()[:8]


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e15])
def test_its_singular_values_are_one_and_its_directions_those_of_the_matrix(m: int, n: int, scale: float) -> None:
    d = matrix(m, n)
    u, values, v = np.linalg.svd(d.astype(np.float64), full_matrices=False)
    found = polar((d * np.float32(scale)).astype(np.float32)).astype(np.float64)
    large = values > 0.004 * np.linalg.norm(values)
    assert np.abs(np.diag(u.T @ found @ v.T)[large] - 1.0).max() < 0.006
    assert np.linalg.svd(found, compute_uv=False).max() < 1.006


def test_directions_that_are_not_there_are_not_made_up() -> None:
    d = matrix(80, 60, rank=5)
    values = np.linalg.svd(polar(d).astype(np.float64), compute_uv=False)
    assert np.abs(values[:5] - 1.0).max() < 0.006
    assert values[5:].max() < 1e-3


def test_a_wide_matrix_is_its_transposes_transpose() -> None:
    d = matrix(40, 90)
    assert np.array_equal(polar(d), polar(np.ascontiguousarray(d.T)).T)


def test_of_blocks_each_is_isotropic_by_itself() -> None:
    d = matrix(70, 50)
    d[:35, :25] = 0.0
    found = isotropic(d, 40)
    assert not found[:35, :25].any(), "a block of zeros has no direction"
    for rows in (slice(0, 35), slice(35, 70)):
        for columns in (slice(0, 25), slice(25, 50)):
            if d[rows, columns].any():
                assert np.array_equal(found[rows, columns], polar(np.ascontiguousarray(d[rows, columns])))
    assert np.array_equal(isotropic(d, 70), isotropic(d))


def test_cutting_makes_it_cheaper() -> None:
    assert len(QUINTICS) == STEPS, "`flop` counts the steps that are done"
    assert flop(1024, 1024) == 5 * 4 * 1024**3
    assert flop(1024, 4096, 512) == pytest.approx(flop(1024, 4096) * 20 / 32.5, rel=0.2)
    assert flop(100, 100, 100) == flop(100, 100)


# --- the bits ---------------------------------------------------------------------------------------------------------


def test_each_element_of_a_product_is_summed_in_order_by_fused_multiply_and_add() -> None:
    fma = ctypes.CDLL(None).fmaf
    fma.restype, fma.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    a, b, out = matrix(5, 515), matrix(515, 261, seed=1), np.empty((5, 261), np.float32)
    kernels.matmul(a, b, out, 0, 5, False)
    for i, j in [(0, 0), (4, 260), (3, 255), (2, 256), (1, 100)]:
        total = 0.0
        for q in range(515):
            total = fma(a[i, q], b[q, j], total)
        assert out[i, j] == np.float32(total)


@pytest.mark.parametrize("m", [1, 3, 255, 256, 300])
def test_half_of_a_symmetric_product_is_all_of_it(m: int) -> None:
    x = matrix(m, 70)
    whole, half = np.empty((m, m), np.float32), np.full((m, m), np.nan, np.float32)
    kernels.matmul(x, np.ascontiguousarray(x.T), whole, 0, m, False)
    kernels.matmul(x, np.ascontiguousarray(x.T), half, 0, m, True)
    kernels.mirror(half)
    assert np.array_equal(whole, half)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_change_no_bit(threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for m, n in SHAPES:
            assert np.array_equal(polar(matrix(m, n)), polar(matrix(m, n), ComputePool(pool, threads)))


def test_a_compute_does_all_of_it_in_parts_that_are_worth_it() -> None:
    done: list[tuple[int, int]] = []
    with ThreadPoolExecutor(3) as pool:
        for count in (0, 1, 127, 128, 1000, 100_000):
            done.clear()
            ComputePool(pool, 3).share(lambda start, stop: done.append((start, stop)), count)
            done.sort()
            assert [start for start, _ in done] == [0, *(stop for _, stop in done[:-1])]
            assert done[-1][1] == count
            assert len(done) == max(1, min(12, count // 64))
        with pytest.raises(ZeroDivisionError):
            ComputePool(pool, 3).share(lambda start, stop: 1 // start, 1000)


def test_the_bits_are_those_of_every_processor() -> None:
    assert digest() == BITS
    # A generic processor: no vectors of more than four elements, and no instruction that multiplies and adds.
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    told = "from unit.test_polar import digest; print(digest())"
    done = subprocess.run(
        [sys.executable, "-c", told],
        capture_output=True,
        text=True,
        check=True,
        cwd=os.path.dirname(os.path.dirname(__file__)),
        env=environment,
    )
    assert done.stdout.strip() == BITS
