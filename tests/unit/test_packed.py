"""A packed fragment measured and added up piece by piece has the bits of one that is unpacked whole."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from isthmus import kernels
from isthmus.codecs import CODECS, codec, pack
from isthmus.codecs.base import PIECE
from isthmus.codecs.packed import Packed, packed, plain
from isthmus.kernels import F32, U8
from isthmus.layout import Spec, TensorClass, partition
from isthmus.runtime import ALONE, Crew

FRAGMENT = partition(
    [
        Spec("several", (9 * PIECE + 4097,), "float32", TensorClass.DENSE),
        Spec("exact", (PIECE,), "float32", TensorClass.DENSE),
        Spec("odd", (131,), "float32", TensorClass.DENSE),
    ],
    1,
).fragments[0]


def values(seed: int = 0) -> F32:
    # From block to block of other sizes: sums in another order have other bits.
    draw = np.random.default_rng(seed)
    spread = np.repeat(np.float32(10.0) ** draw.uniform(-6, 3, size=-(-FRAGMENT.size // 1000)), 1000)[: FRAGMENT.size]
    return (draw.normal(size=FRAGMENT.size) * spread).astype(np.float32)


def packed_by(name: str, x: F32, crew: Crew = ALONE) -> tuple[Packed, U8]:
    data = pack(codec(name), FRAGMENT, x)
    return packed(FRAGMENT, codec(name), data, crew), data


@pytest.mark.parametrize("name", [*CODECS, "q4", "q1.5", "q0.5"])
@pytest.mark.parametrize("threads", [1, 3])
def test_lengths_and_sums_are_those_of_the_whole(name: str, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        crew = ALONE if threads == 1 else Crew(pool, threads)
        found, _ = packed_by(name, values(), crew)
        whole = found.decode()
        for i, t in enumerate(FRAGMENT.tensors):
            piece = whole[t.start : t.stop]
            assert found.norms[i] == kernels.norm(piece)
            total = values(1)[t.start : t.stop].copy()
            wanted = total.copy()
            kernels.accumulate(wanted, piece, 0.37)
            found.add(i, 0.37, total, crew)
            assert total.tobytes() == wanted.tobytes()
    assert found.norm == pytest.approx(np.linalg.norm(whole.astype(np.float64)), rel=1e-12)


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
