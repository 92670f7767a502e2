"""Each codec gives its input back within the error of its format, and takes the bytes that it states."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.codecs import CODECS, codec, kernels, pack, unpack
from isthmus.codecs.kernels import F32
from isthmus.errors import InputError
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import CodecName

LARGE = 1 << 16


def round_trip(name: str, x: F32) -> F32:
    out = np.zeros(codec(name).size(x.size), np.uint8)
    codec(name).encode(x, out)
    back = np.full_like(x, np.nan)
    codec(name).decode(out, back)
    return back


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_takes_the_bits_it_states(name: str) -> None:
    assert codec(name).size(LARGE) * 8 / LARGE == codec(name).bits


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("n", [1, 5, 63, 64, 65, 127, 128, 129, 1000])
def test_every_length_survives(name: str, n: int) -> None:
    x = np.random.default_rng(n).normal(size=n).astype(np.float32)
    back = round_trip(name, x)
    assert np.isfinite(back).all()
    assert (
        np.abs(back - x).max() <= np.abs(x).max() * {"f32": 0, "bf16": 2**-8, "int8": 0.6 / 127, "int4": 0.6 / 7}[name]
    )


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_zeros(name: str) -> None:
    assert not round_trip(name, np.zeros(300, np.float32)).any()


def test_bfloat16_rounds_as_torch_does() -> None:
    x = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.ascontiguousarray(x[np.isfinite(x) & (np.abs(x) < 3.38e38)])
    ours = round_trip("bf16", x)
    theirs = torch.from_numpy(x).to(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_the_largest_numbers_do_not_become_infinite(name: str) -> None:
    x = np.full(128, np.finfo(np.float32).max, np.float32)
    assert np.isfinite(round_trip(name, x)).all()


@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("int4", 7)])
def test_quantisation_is_nearest_against_a_plain_reference(name: str, levels: int) -> None:
    x = np.random.default_rng(1).normal(size=128 * 40).astype(np.float32)
    expected = []
    for block in x.reshape(-1, 128):
        scale = torch.tensor(np.abs(block).max() / np.float32(levels)).to(torch.bfloat16).to(torch.float32).numpy()
        q = np.clip(np.rint(block * (np.float32(1) / scale)), -levels, levels)
        expected.append(q.astype(np.float32) * scale)
    assert np.array_equal(round_trip(name, x), np.concatenate(expected))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(CODECS)),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=300),
)
def test_any_finite_input_gives_finite_output(name: str, values: list[float]) -> None:
    assert np.isfinite(round_trip(name, np.array(values, np.float32))).all()


def test_tensors_are_packed_apart() -> None:
    specs = [Spec(name, (size,), "float32", TensorClass.DENSE) for name, size in (("big", 200), ("small", 7))]
    fragment = partition(specs, 1).fragments[0]
    x = np.ones(207, np.float32)
    x[200:] = 1e-6  # with the scale of the large tensor this would become 0
    out = pack(codec("int4"), fragment, x)
    back = np.empty_like(x)
    unpack(codec("int4"), fragment, out, back)
    assert np.allclose(back[200:], 1e-6, rtol=0.01)


def test_error_feedback_makes_up_for_what_int4_drops() -> None:
    draw = np.random.default_rng(2)
    wanted, sent, residual = np.zeros(512, np.float32), np.zeros(512, np.float32), np.zeros(512, np.float32)
    for _ in range(50):
        step = draw.normal(size=512).astype(np.float32)
        wanted += step
        out = round_trip("int4", step + residual)
        residual = step + residual - out
        sent += out
    assert np.abs(wanted - sent).max() == pytest.approx(np.abs(residual).max(), rel=1e-3)


def test_an_unknown_codec_names_those_there_are() -> None:
    with pytest.raises(InputError, match="choose one of f32, bf16, int8, int4"):
        codec("int3")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_numbers_are_seen(bad: float) -> None:
    x = np.ones(1000, np.float32)
    assert kernels.all_finite(x)
    x[777] = bad
    assert not kernels.all_finite(x)


def test_every_codec_has_the_name_that_rules_may_give() -> None:
    assert [*CODECS] == [*CodecName]
