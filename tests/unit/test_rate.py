"""Codecs with a rate keep to the bits asked for, with a bounded error, and reject bytes that no encoder wrote."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from isthmus.codecs import BadCode, codec, pack, packed_bounds, packed_size, unpack
from isthmus.codecs.base import PIECE
from isthmus.codecs.kernels import F32, U8, rate
from isthmus.codecs.rate import SMALL
from isthmus.errors import InputError
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import Rules
from isthmus.runtime.clock import ALONE, ComputePool

LARGE = 3 * PIECE + 777

SHAPES: dict[str, Callable[[np.random.Generator, int], F32]] = {
    "normal": lambda draw, n: draw.normal(size=n).astype(np.float32),
    "laplace": lambda draw, n: draw.laplace(size=n).astype(np.float32),
    "heavy": lambda draw, n: draw.standard_t(3, size=n).astype(np.float32),
    "sparse": lambda draw, n: (draw.normal(size=n) * (draw.random(n) < 0.01)).astype(np.float32),
    "of many scales": lambda draw, n: (
        draw.normal(size=n) * np.repeat(10.0 ** draw.uniform(-4, 2, -(-n // 300)), 300)[:n]
    ).astype(np.float32),
}


def drawn(shape: str, n: int, seed: int = 0) -> F32:
    return SHAPES[shape](np.random.default_rng(seed), n)


def encoded(name: str, x: F32, compute: ComputePool = ALONE) -> U8:
    out = np.zeros(codec(name).bounds(x.size)[1], np.uint8)
    used = codec(name).encode(x, out, compute)
    assert not out[used:].any()
    return out[:used]


def decoded(name: str, data: U8, n: int) -> F32:
    out = np.full(n, np.nan, np.float32)
    assert codec(name).measure(data, n) == data.size
    codec(name).decode(data, out)
    return out


def energy(x: F32) -> float:
    return float(np.square(x.astype(np.float64)).sum())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("n", [8192, LARGE])
def test_no_more_bits_than_were_asked_for_and_few_less(shape: str, bits: float, n: int) -> None:
    data = encoded(f"q{bits:g}", drawn(shape, n))
    # The rate is not exact: the step is chosen on a sample, and frequencies are multiples of 1/4096.
    assert 8.0 * data.size / n <= bits * 1.01 + 0.01
    if shape in {"normal", "laplace"}:
        assert 8.0 * data.size / n >= 0.9 * bits


@pytest.mark.parametrize(
    ("bits", "most"), [(0.5, 0.66), (0.75, 0.49), (1.0, 0.37), (1.5, 0.19), (2.0, 0.095), (3.0, 0.025), (4.0, 0.007)]
)
def test_what_is_lost_of_a_normal_difference(bits: float, most: float) -> None:
    x = drawn("normal", LARGE)
    back = decoded(f"q{bits:g}", encoded(f"q{bits:g}", x), LARGE)
    lost = energy(back - x) / energy(x)
    assert 2.0 ** (-2.0 * bits) < lost < most, "no code beats Shannon's bound"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["q0.5", "q1.5", "q4"])
def test_a_level_stands_for_the_mean_of_what_became_it(shape: str, name: str) -> None:
    x = drawn(shape, LARGE)
    back = decoded(name, encoded(name, x), LARGE)
    levels = np.unique(np.abs(back))
    assert levels.size <= rate.LEVELS + 1
    for level in levels[levels > 0]:
        assert np.abs(x[np.abs(back) == level]).mean(dtype=np.float64) == pytest.approx(level, rel=1e-6)
    assert not (back * x < 0).any(), "a value keeps its sign or becomes zero"


@pytest.mark.parametrize("n", [1, 127, SMALL - 1, SMALL, SMALL + 1, PIECE - 1, PIECE, PIECE + 1])
@pytest.mark.parametrize("name", ["q0.5", "q1.5", "q4"])
def test_every_length_survives(name: str, n: int) -> None:
    x = drawn("normal", n)
    data = encoded(name, x)
    back = decoded(name, data, n)
    assert np.isfinite(back).all()
    assert energy(back - x) < energy(x)
    least, most = codec(name).bounds(n)
    assert least <= data.size <= most


@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-38, 1.0, -3e38, 3.4028234e38])
def test_the_ends_of_the_range_survive(value: float) -> None:
    for x in (np.full(5000, value, np.float32), np.eye(100, dtype=np.float32).reshape(-1) * np.float32(value)):
        back = decoded("q1.5", encoded("q1.5", x), x.size)
        assert np.isfinite(back).all()
        assert np.abs(back - x).max() <= max(1e-36, 0.01 * abs(value))


@settings(max_examples=60, deadline=None)
@given(
    arrays(
        np.float32, st.integers(SMALL, SMALL + 999), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    ),
    st.sampled_from(["q0.5", "q1", "q2.25", "q4"]),
)
def test_any_finite_input_gives_finite_output(x: F32, name: str) -> None:
    assert np.isfinite(decoded(name, encoded(name, x), x.size)).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 255), st.integers(1, 3000), st.integers(0, 2**32 - 1), st.floats(0.0, 8.0))
def test_symbols_come_back_whatever_their_frequencies(size: int, n: int, seed: int, slope: float) -> None:
    draw = np.random.default_rng(seed)
    weights = np.exp(-slope * np.arange(size) / max(1, size // 8))
    symbols = draw.choice(size, n, p=weights / weights.sum()).astype(np.uint8)
    counts = np.bincount(symbols, minlength=255).astype(np.int64)
    levels = max(1, (int(symbols.max()) + 1) // 2)
    table = np.empty(2 * levels + 1, np.int64)
    rate.frequencies(counts[: table.size], table)
    assert table.sum() == rate.TOTAL
    assert (table[counts[: table.size] > 0] > 0).all()
    room = np.empty(3 * n // 4 + 2 * rate.LANES + 1, np.uint16)
    stream = room[rate.encode(symbols, table, room) :].view(np.uint8)
    head = 8 + 4 * levels + (2 * table.size + 3) // 4 * 4
    data = np.zeros(-(-(head + 4 + stream.size) // 4) * 4, np.uint8)
    data[:4], data[4] = np.frombuffer(np.uint32(data.size).tobytes(), np.uint8), levels
    data[8 : 8 + 4 * levels] = np.arange(1, levels + 1, dtype="<f4").view(np.uint8)
    data[8 + 4 * levels :][: 2 * table.size] = table.astype("<u2").view(np.uint8)
    data[head : head + 4] = np.frombuffer(np.uint32(stream.size).tobytes(), np.uint8)
    data[head + 4 : head + 4 + stream.size] = stream
    out = np.empty(n, np.float32)
    assert rate.check(data, n, PIECE) == (rate.OK, data.size)
    assert rate.decode(data, n, PIECE, 0, out) == rate.OK
    s = symbols.astype(np.int64)
    assert np.array_equal(out, np.where(s % 2 == 1, (s + 1) // 2, -(s // 2)).astype(np.float32))


def test_the_entropy_stage_comes_close_to_the_entropy() -> None:
    x = drawn("normal", 1 << 20)
    data = encoded("q1.5", x)
    back = decoded("q1.5", data, x.size)
    share = np.unique(back, return_counts=True)[1] / x.size
    entropy = -(share * np.log2(share)).sum()
    assert entropy < 8.0 * data.size / x.size < 1.01 * entropy


def test_threads_change_no_bit() -> None:
    x = drawn("of many scales", 40 * PIECE + 5)
    with ThreadPoolExecutor(3) as pool:
        assert encoded("q1.5", x, ComputePool(pool, 3)).tobytes() == encoded("q1.5", x).tobytes()


def test_parts_are_what_the_whole_is() -> None:
    x = drawn("laplace", LARGE)
    data = encoded("q2", x)
    whole = decoded("q2", data, LARGE)
    for start in range(0, LARGE, PIECE):
        out = np.empty(min(PIECE, LARGE - start), np.float32)
        codec("q2").decode_part(data, LARGE, start, out)
        assert np.array_equal(out, whole[start : start + PIECE])


@pytest.mark.parametrize("name", ["q2", "q1", "q0.5"])
def test_what_is_dropped_and_fed_back_adds_up_to_the_truth(name: str) -> None:
    n = 8192
    draw = np.random.default_rng(2)
    wanted, sent, residual = np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)
    lengths = []
    for _ in range(100):
        step = draw.normal(size=n).astype(np.float32)
        wanted += step
        out = decoded(name, encoded(name, step + residual), n)
        residual = step + residual - out
        sent += out
        lengths.append(math.sqrt(energy(residual)))
    assert np.abs(wanted - sent - residual).max() < 1e-4
    assert max(lengths[50:]) < 1.1 * max(lengths[20:50]), "the residual does not grow"


def packed_fragment() -> tuple[U8, F32]:
    specs = [Spec("m", (300, 70), "float32", TensorClass.DENSE), Spec("v", (70,), "float32", TensorClass.DENSE)]
    fragment = partition(specs, 1).fragments[0]
    x = drawn("normal", fragment.size)
    data = pack(codec("q1.5"), fragment, x)
    back = np.empty_like(x)
    unpack(codec("q1.5"), fragment, data, back)
    assert energy(back - x) < 0.2 * energy(x)
    least, most = packed_bounds(codec("q1.5"), fragment)
    assert least < data.size < most
    assert data.size == pytest.approx(packed_size(codec("q1.5"), fragment), rel=0.05)
    for wrong in (data[:-4], np.append(data, np.zeros(4, np.uint8)), data[:0]):
        with pytest.raises(BadCode):
            unpack(codec("q1.5"), fragment, wrong, back)
    return data, back


def test_a_fragment_is_packed_tensor_by_tensor_and_ends_where_it_says() -> None:
    packed_fragment()


def damage(at: int, value: int, size: int = 1) -> Callable[[U8], U8]:
    def change(data: U8) -> U8:
        data = data.copy()
        data[at : at + size] = np.frombuffer(value.to_bytes(size, "little"), np.uint8)
        return data

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:7], "fewer bytes"),
        (lambda data: data[:-4], "fewer bytes"),
        (damage(0, 11, 4), "no header"),
        (damage(0, 12, 4), "fewer bytes"),
        (damage(4, 128, 2), "no header"),
        (damage(4, 0, 2), "other lengths"),
        (damage(6, 1, 2), "no header"),
        (damage(8, 0x7F800000, 4), "no table"),
        (damage(8, 0x7FC00000, 4), "no table"),
        (damage(8, 0xBF800000, 4), "no table"),
        (damage(8 + 4 * 3, 0, 2), "no table"),
    ],
    ids=[f"{at}" for at in range(11)],
)
def test_a_table_that_no_encoder_wrote_is_refused(change: Callable[[U8], U8], said: str) -> None:
    data = encoded("q1.5", drawn("normal", LARGE))
    assert int.from_bytes(data[4:6].tobytes(), "little") == 3
    with pytest.raises(BadCode, match=said):
        decoded("q1.5", change(data), LARGE)


@pytest.mark.parametrize("piece", range(4))
@pytest.mark.parametrize("by", [-2, 2, 1])
def test_a_stream_of_another_length_is_refused(piece: int, by: int) -> None:
    data = encoded("q1.5", drawn("normal", LARGE))
    at = rate.header_size(3, 4) - 16 + 4 * piece
    length = int.from_bytes(data[at : at + 4].tobytes(), "little")
    with pytest.raises(BadCode):
        decoded("q1.5", damage(at, length + by, 4)(data), LARGE)


def padded() -> tuple[U8, int]:
    """Return an encoded tensor with padding after its only stream, and the place of the stream's length."""
    found = (encoded("q1.5", drawn("normal", 5000, seed)) for seed in range(50))
    at = rate.header_size(3, 1) - 4
    return next((d, at) for d in found if int.from_bytes(d[at : at + 4].tobytes(), "little") % 4 == 2 and d[4] == 3)


def test_a_stream_that_takes_the_padding_too_is_refused() -> None:
    data, at = padded()
    length = int.from_bytes(data[at : at + 4].tobytes(), "little")
    with pytest.raises(BadCode, match="a stream"):
        decoded("q1.5", damage(at, length + 2, 4)(data), 5000)


def test_padding_is_zero() -> None:
    data, _ = padded()
    with pytest.raises(BadCode, match="other lengths"):
        decoded("q1.5", damage(data.size - 1, 1)(data), 5000)


def test_no_value_is_off_by_more_than_a_step_however_few_are_large() -> None:
    x = drawn("normal", 8192)
    x[[17, 4711]] = 1e4, -2e4
    back = decoded("q4", encoded("q4", x), x.size)
    assert np.abs(back - x).max() <= 2e4 / rate.LEVELS


def test_a_stream_for_fewer_parameters_is_refused() -> None:
    data = encoded("q1.5", drawn("normal", 6000))
    for n in (5999, 6001, 5000, 9000):
        with pytest.raises(BadCode, match="a stream"):
            decoded("q1.5", data, n)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_damaged_bytes_are_refused_or_decode_to_numbers(seed: int, count: int) -> None:
    draw = np.random.default_rng(seed)
    data = encoded("q2", drawn("normal", 5000)).copy()
    for at in draw.integers(0, data.size, count):
        data[at] = draw.integers(0, 256)
    try:
        back = decoded("q2", data, 5000)
    except (BadCode, AssertionError):
        return
    assert np.isfinite(back).all()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=900))
def test_any_bytes_at_all_are_refused_or_decode_to_numbers(data: bytes) -> None:
    try:
        back = decoded("q1", np.frombuffer(data, np.uint8), 4096)
    except (BadCode, AssertionError):
        return
    assert np.isfinite(back).all()


def test_a_damaged_word_of_a_stream_is_noticed() -> None:
    x = drawn("normal", 5000)
    data = encoded("q2", x)
    start = rate.header_size(int(data[4]), 1) + 4 * rate.LANES
    refused = 0
    for at in range(start, start + 200):
        try:
            decoded("q2", damage(at, int(data[at]) ^ 0x10)(data), 5000)
        except BadCode:
            refused += 1
    assert refused > 190, "decoding notices that the states do not return to their initial values"


@pytest.mark.parametrize(
    "name", ["q", "q0.4", "q4.1", "q5", "q1.50", "q01", "q1.", "q1.555", "q-1", "qq", "Q1.5", "q12"]
)
def test_a_rate_that_there_is_not_is_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=r"q1\.5"):
        codec(name)
    with pytest.raises(InputError, match=r"q1\.5"):
        Rules(codec_up=name).check()


def test_rates_are_rules() -> None:
    assert Rules(codec_up="q1.5", codec_down="q0.75").check().codec_down == "q0.75"
    assert codec("q1.5").bits == 1.5
    assert codec("q1.5").name == "q1.5"
    assert codec("q1.5") is codec("q1.5")


def test_candidate_steps_are_powers_of_two() -> None:
    for k in range(-200, 201):
        assert rate._power(k) == pytest.approx(2.0 ** (k / rate._STEPS), rel=1e-12)


def test_logarithms_are_right_to_nine_digits() -> None:
    for v in (1.0, 1.5, 2.0, 3.0, 1000.0, 65535.0, 1e9):
        assert rate._log2(v) == pytest.approx(math.log2(v), abs=2e-9)
