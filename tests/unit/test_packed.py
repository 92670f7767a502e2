"""Measuring and summing a packed fragment piece by piece gives the same bits as unpacking it whole."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from isthmus.codecs import CODECS, codec, cut, kernels, pack
from isthmus.codecs.base import PIECE
from isthmus.codecs.kernels import F32, U8
from isthmus.codecs.packed import Packed, add, keep_dropped, packed, plain
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.runtime.clock import ALONE, ComputePool

FRAGMENT = partition(
    [
        Spec("several", (9 * PIECE + 4097,), "float32", TensorClass.DENSE),
        Spec("exact", (PIECE,), "float32", TensorClass.DENSE),
        Spec("odd", (131,), "float32", TensorClass.DENSE),
    ],
    1,
).fragments[0]


def values(seed: int = 0) -> F32:
    # Magnitudes differ from block to block, so that sums in another order have other bits.
    draw = np.random.default_rng(seed)
    spread = np.repeat(np.float32(10.0) ** draw.uniform(-6, 3, size=-(-FRAGMENT.size // 1000)), 1000)[: FRAGMENT.size]
    return (draw.normal(size=FRAGMENT.size) * spread).astype(np.float32)


def packed_by(name: str, x: F32, compute: ComputePool = ALONE) -> tuple[Packed, U8]:
    data = pack(codec(name), FRAGMENT, x)
    return packed(FRAGMENT, codec(name), data, compute), data


@pytest.mark.parametrize("name", [*CODECS, "q4", "q1.5", "q0.5"])
@pytest.mark.parametrize("threads", [1, 3])
def test_lengths_and_sums_are_those_of_the_whole(name: str, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        compute = ALONE if threads == 1 else ComputePool(pool, threads)
        found, data = packed_by(name, values(), compute)
        whole = found.decode()
        for i, t in enumerate(FRAGMENT.tensors):
            piece = whole[t.start : t.stop]
            assert found.norms[i] == kernels.norm(piece)
            total = values(1)[t.start : t.stop].copy()
            wanted = total.copy()
            kernels.accumulate(wanted, piece, 0.37)
            before = total.copy()
            found.add(i, 0.37, total, compute)
            assert total.tobytes() == wanted.tobytes()
            # If the sum is written to another array, the earlier content of that array does not count.
            other = np.full_like(total, 7.0)
            add(found.code, cut(found.code, FRAGMENT, data)[i], 0.37, before, other, compute)
            assert other.tobytes() == wanted.tobytes()
    assert found.norm == pytest.approx(np.linalg.norm(whole.astype(np.float64)), rel=1e-12)


@pytest.mark.parametrize("name", [*CODECS, "q4", "q1.5"])
@pytest.mark.parametrize("whole", [False, True])
def test_threads_change_no_byte_and_what_is_dropped_is_what_is_missing(name: str, whole: bool) -> None:
    code, x = codec(name), values(3)
    data = pack(code, FRAGMENT, x, whole=whole)
    wanted = x - packed(FRAGMENT, code, data).decode()
    with ThreadPoolExecutor(3) as pool:
        compute = ComputePool(pool, 3)
        assert pack(code, FRAGMENT, x, compute, whole=whole).tobytes() == data.tobytes()
        for by in (ALONE, compute):
            left = x.copy()
            keep_dropped(FRAGMENT, code, data, left, by)
            assert left.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("coefficient", [1.0, -1.0])
def test_adding_with_a_sign_is_float32s_own_sum(coefficient: float) -> None:
    """Rounding through float64 changes no bit, over all exponents, denormals and ties in the last place."""
    draw = np.random.default_rng(0)
    a, b = (draw.integers(0, 1 << 32, 1 << 20, np.uint32).view(np.float32) for _ in range(2))
    with np.errstate(all="ignore"):
        b[::2] = a[::2] * np.float32(2.0) ** draw.integers(-30, 30, b[::2].size).astype(np.float32)
    known = np.isfinite(a) & np.isfinite(b)
    a, b = a[known], b[known]
    out = a.copy()
    kernels.accumulate(out, b, coefficient)
    with np.errstate(all="ignore"):
        assert out.tobytes() == (a + b if coefficient > 0 else a - b).tobytes()


def test_what_was_never_packed_is_itself() -> None:
    x = values(2)
    assert plain(FRAGMENT, x).decode().tobytes() == x.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 9 * PIECE + 4096, FRAGMENT.size - 1])
def test_the_length_says_whether_a_number_is_none(bad: float, at: int) -> None:
    x = values(3)
    x[at] = bad
    assert not np.isfinite(plain(FRAGMENT, x).norm)
    assert np.isfinite(plain(FRAGMENT, np.full(FRAGMENT.size, np.finfo(np.float32).max, np.float32)).norm)


def test_another_number_of_bytes_is_no_packed_fragment() -> None:
    _, data = packed_by("int4", values())
    with pytest.raises(ValueError, match="int4 packs this fragment into"):
        packed(FRAGMENT, codec("int4"), data[:-1])
