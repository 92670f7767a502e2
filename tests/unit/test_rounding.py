"""Sums are rounded in a fixed order, what a codec drops is not lost, and packed tensors keep their places."""

import numpy as np
import pytest

from isthmus.codecs import CODECS, codec, kernels, pack, packed_size, unpack
from isthmus.codecs.base import PIECE
from isthmus.codecs.kernels import F32
from isthmus.format.layout import Fragment, Spec, TensorClass, partition
from isthmus.format.rules import Rules
from isthmus.log import merge

ODD = partition([Spec(f"t{n}", (n,), "float32", TensorClass.DENSE) for n in (7, 129, 128, 1, 65, 256)], 1).fragments[0]
"""Tensors most of which are packed into a number of bytes that is not a multiple of four."""


def draw(fragment: Fragment, seed: int, scale: float = 0.01) -> F32:
    return np.random.default_rng(seed).normal(scale=scale, size=fragment.size).astype(np.float32)


def round_of(given: list[tuple[F32, float]], rules: Rules, fragment: Fragment = ODD) -> merge.Accumulator:
    accumulator = merge.Accumulator(fragment, merge.outers(rules))
    for x, weight in given:
        accumulator.add(x, weight)
    return accumulator


# --- the merge --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("down", list(CODECS))
def test_the_published_value_stays_one_steps_rounding_from_the_master(down: str) -> None:
    """What the codec drops from a version is part of the next difference. If it were lost, the error would add up."""
    now, distances = merge.initial(draw(ODD, 1, 1.0)), []
    for version in range(40):
        given = [(draw(ODD, 10 * version + i), 1.0) for i in range(4)]
        now = merge.advance(now, round_of(given, Rules()), codec(down), bytes(32)).state
        distances.append(np.abs(now.master - now.published).max())
    assert max(distances) <= 3.0 * distances[0]


@pytest.mark.parametrize("pairs", [1, 8, 50])
@pytest.mark.parametrize("weight", [1.0, 1e9])
def test_directions_cancel_by_what_is_left_of_all_their_weight(pairs: int, weight: float) -> None:
    """A hundred updates that nearly cancel leave a longer sum than two do, but still count as cancelled."""
    x = draw(ODD, 0)
    other = -x + np.float32(5e-4) * np.roll(x, 1)
    given = [(x, weight), (other, weight)] * pairs
    _, cancelled = round_of(given, Rules()).deltas()
    # A quarter of a thousandth of the weight is left; of the tensor of one element, only rounding.
    assert cancelled == len(ODD.tensors)


def test_a_mean_direction_is_used_down_to_a_thousandth_of_its_weight() -> None:
    x = np.zeros(ODD.size, np.float32)
    for t in ODD.tensors:
        x[t.start] = 1.0
    for left, expected in ((0.0011, 0), (0.0009, len(ODD.tensors))):
        given = [(x, 1.0 + 2 * left), (-x, 1.0)]
        _, cancelled = round_of(given, Rules()).deltas()
        assert cancelled == expected


def test_a_heavy_update_weighs_no_more_than_its_share_however_heavy() -> None:
    """Weights are squares of token counts, which can exceed float32's range. The sums of relative weights must not."""
    given = [(draw(ODD, i), 10.0**e) for i, e in enumerate((300, 299, 298))]
    plain = [(x, w / 1e300) for x, w in given]
    for rule in ("rda", "avg"):
        found, wanted = (
            merge.advance(merge.initial(draw(ODD, 9)), round_of(these, Rules(merge=rule)), codec("f32"), bytes(32))
            for these in (given, plain)
        )
        assert found.finite
        assert np.allclose(found.state.master, wanted.state.master, rtol=1e-6, atol=1e-9)


def test_a_state_is_named_by_all_it_holds() -> None:
    x = draw(ODD, 1)
    one = merge.State(3, x, x + np.float32(1), x + np.float32(2))
    others = [
        merge.State(4, one.published, one.master, one.momentum),
        merge.State(3, one.master, one.master, one.momentum),
        merge.State(3, one.published, one.published, one.momentum),
        merge.State(3, one.published, one.master, one.master),
    ]
    assert len({state.digest for state in (one, *others)}) == 5


def test_starting_again_forgets_the_momentum_and_publishes_the_value_itself() -> None:
    value = draw(ODD, 3)
    found = merge.healed(8, value, ODD, bytes(32))
    assert (found.state.version, found.finite, found.cancelled) == (8, True, 0)
    assert np.array_equal(found.state.master, value)
    assert not found.state.momentum.any()
    assert found.published_digest == merge.array_digest(value)
    assert found.state_digest == found.state.digest


def test_a_value_whose_published_part_overflows_is_not_finite() -> None:
    """The master may be in range while the value that learners would hold is not: a codec rounds its scales, too."""
    largest = np.finfo(np.float32).max
    state = merge.State(0, *(np.full(ODD.size, v, np.float32) for v in (largest, -largest, 0.0)))
    x = np.zeros(ODD.size, np.float32)
    assert not merge.advance(state, round_of([(x, 1.0)], Rules()), codec("f32"), bytes(32)).finite


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4", "q4", "q1.5"])
def test_a_master_that_is_not_finite_is_seen_whatever_its_codec_makes_of_it(name: str) -> None:
    """A codec with a rate encodes a number that is not finite as a finite one, so learners would not notice."""
    large = partition([Spec("large", (9 * PIECE,), "float32", TensorClass.DENSE)], 1).fragments[0]
    x = draw(large, 1)
    start = merge.initial(draw(large, 9))
    master, momentum = start.master.copy(), start.momentum.copy()
    master[5], momentum[5], x[5] = 3.4e38, -3.4e38, -3.4e38
    given = round_of([(x, 1.0)], Rules(merge="avg", outer_lr=1.0), large)
    found = merge.advance(merge.State(0, start.published, master, momentum), given, codec(name), bytes(32))
    assert np.isinf(found.state.master[5])
    assert not found.finite
    if name.startswith("q"):
        assert np.isfinite(found.state.published).all(), "the published value does not show it"


# --- kernels ----------------------------------------------------------------------------------------------------------


def test_a_norm_is_summed_in_eight_lanes_folded_pairwise() -> None:
    x = np.array([1e4] + [1e-4] * 7, np.float32)
    s = [np.float64(v) * np.float64(v) for v in x]
    total = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
    assert float(kernels.norm(x)).hex() == float(np.sqrt(total)).hex()


def test_a_norm_is_summed_block_by_block() -> None:
    x = np.full(4096 + 4096 + 9, 1e-4, np.float32)
    x[0] = 1e4
    lanes = np.zeros(8)
    parts = []
    for start in (0, 4096, 8192):
        lanes[:] = 0.0
        block = x[start : start + 4096].astype(np.float64)
        whole = block.size // 8 * 8
        for i in range(0, whole, 8):
            lanes += block[i : i + 8] ** 2
        for v in block[whole:]:
            lanes[0] += v**2
        parts.append(((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7])))
    total = 0.0
    for part in parts:
        total += part
    assert float(kernels.norm(x)).hex() == float(np.sqrt(total)).hex()


def test_a_product_is_rounded_once_with_its_sum() -> None:
    total, x = np.array([1.0 + 2**-23], np.float32), np.ones(1, np.float32)
    kernels.accumulate(total, x, 2.0**-24 * (1.0 - 2.0**-26))
    assert total[0] == np.float32(1.0 + 2**-23), "rounded by itself the product would be half a unit and tip the sum"


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_blocks_too_small_for_a_scale_are_zero(name: str) -> None:
    x = np.zeros(128, np.float32)
    x[1] = np.float32(1e-38)
    out, back = np.zeros(codec(name).size(128), np.uint8), np.empty(128, np.float32)
    codec(name).encode(x, out)
    codec(name).decode(out, back)
    assert not back.any()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_blocks_scale_is_that_of_its_longest_number_whatever_its_sign(name: str) -> None:
    x = np.linspace(-1.0, 0.25, 128, dtype=np.float32)
    out, back = np.zeros(codec(name).size(128), np.uint8), np.empty(128, np.float32)
    codec(name).encode(x, out)
    codec(name).decode(out, back)
    assert np.abs(back - x).max() <= 0.51 / (127 if name == "int8" else 7)


def test_bfloat16_rounds_half_to_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0xBF818000], np.uint32)
    half = np.zeros(bits.size, np.uint16)
    kernels.encode_bf16(bits.view(np.float32), half)
    assert [hex(h) for h in half] == ["0x3f80", "0x3f82", "0x3f80", "0x3f81", "0xbf82"]


# --- codecs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("f32", {1: 4, 128: 512, 129: 516}),
        ("bf16", {1: 2, 128: 256, 129: 258}),
        ("int8", {1: 3, 127: 129, 128: 130, 129: 133, 256: 260}),
        ("int4", {1: 66, 127: 66, 128: 66, 129: 132, 256: 132}),
    ],
)
def test_a_codec_takes_what_it_says(name: str, sizes: dict[int, int]) -> None:
    assert {n: codec(name).size(n) for n in sizes} == sizes


@pytest.mark.parametrize("name", list(CODECS))
def test_tensors_of_odd_sizes_keep_their_places(name: str) -> None:
    x, back = draw(ODD, 5), np.empty(ODD.size, np.float32)
    out = pack(codec(name), ODD, x)
    assert out.size == packed_size(codec(name), ODD)
    assert out.size % 4 == 0
    unpack(codec(name), ODD, out, back)
    for t in ODD.tensors:
        piece = x[t.start : t.stop]
        alone = np.zeros(codec(name).size(t.size), np.uint8)
        codec(name).encode(piece, alone)
        wanted = np.empty_like(piece)
        codec(name).decode(alone, wanted)
        assert np.array_equal(back[t.start : t.stop], wanted), t.spec.name


@pytest.mark.parametrize("by", [-4, 4])
def test_a_packed_fragment_has_one_size(by: int) -> None:
    code = codec("int8")
    with pytest.raises(ValueError, match="where int8 packs this fragment into"):
        unpack(code, ODD, np.zeros(packed_size(code, ODD) + by, np.uint8), np.empty(ODD.size, np.float32))
