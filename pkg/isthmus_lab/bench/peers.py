"""Comparison with peers: torchft's DiLoCo, hivemind's averaging, pypiquant's and hivemind's codecs, tsugi-mend's merge.

The peers are installed in an environment of their own (`make bench-env`), from which this benchmark is run.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from isthmus.codecs import codec, kernels, pack, unpack
from isthmus.codecs.packed import keep_dropped, packed
from isthmus.errors import InputError
from isthmus.format.layout import TensorClass
from isthmus.format.records.objects import Outer
from isthmus.format.rules import MergeRule
from isthmus.log import merge
from isthmus_lab.bench import pair
from isthmus_lab.bench.averaging import averaging
from isthmus_lab.bench.kernels import flat
from isthmus_lab.bench.measure import Case, Row, Say, counted, in_turns, parted, rates, row

PARAMS = 16 << 20
MERGED = 4


def rows(repeats: int, say: Say) -> Iterator[Row]:
    """Yield figures of codecs, merges, averaging and training, each measured in turns with a peer."""
    kernels.warm()
    arithmetic, means, training = parted(say, 3)
    yield from _arithmetic(repeats, arithmetic)
    yield from averaging(repeats, means, peer)
    peer("torchft")
    yield from pair.training(repeats, training)


def peer(name: str) -> Any:
    """Return a module of another project. Raises `InputError` where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"bench peers needs an environment of its own: make bench-env ({error})") from None


# --- codecs and merges ------------------------------------------------------------------------------------------------


def _arithmetic(repeats: int, say: Say) -> Iterator[Row]:
    """Yield the speed of one thread, with this library beside each peer.

    docs/benchmarks.md says how much of the values each of them keeps.
    """
    import torch

    piquant, reducer = peer("piquant"), peer("tsugi_mend.reducer")
    hivemind = peer("hivemind.compression")
    torch.set_num_threads(1)
    one = piquant.Context(1)
    quantize = peer("piquant.torch")
    fragment = flat(PARAMS)
    x = (0.02 * np.random.default_rng(0).standard_normal(PARAMS)).astype(np.float32)
    t, out = torch.from_numpy(x), np.empty_like(x)
    four, eight = codec("int4"), codec("int8")
    blobs = {code.name: pack(code, fragment, x) for code in (four, eight)}

    def theirs(dtype: Any) -> Any:
        scale, zero = quantize.compute_quant_params(t, dtype=dtype, ctx=one)
        return quantize.quantize(t, scale=scale, zero_point=zero, dtype=dtype, ctx=one), scale, zero

    coded = {dtype: theirs(dtype) for dtype in (torch.quint4x2, torch.quint8)}

    def restored(dtype: Any) -> Any:
        values, scale, zero = coded[dtype]
        return quantize.dequantize(values, scale=scale, zero_point=zero, dtype=torch.float32, ctx=one)

    uniform = peer("hivemind.proto.runtime_pb2").CompressionType.UNIFORM_8BIT
    theirs_given = [reducer.LearnerFragment(str(i), 1, [t], 1) for i in range(MERGED)]
    outer = {c: Outer(merge=MergeRule.AVG, learning_rate=1.0, momentum=0.0, block=0) for c in map(str, TensorClass)}
    plain = codec("f32")
    whole = pack(plain, fragment, x)

    def merged(code: Any, blob: Any) -> object:
        into = merge.Accumulator(fragment, outer)
        for _ in range(MERGED):
            into.add(packed(fragment, code, blob), 1.0)
        return into

    def code_four() -> None:
        keep_dropped(fragment, four, pack(four, fragment, x), out)

    pairs: Sequence[tuple[str, Callable[[], object], Callable[[], object]]] = (
        ("int4 coded, what it drops kept; pypiquant", code_four, lambda: theirs(torch.quint4x2)),
        (
            "int4 decoded; pypiquant",
            lambda: unpack(four, fragment, blobs["int4"], out),
            lambda: restored(torch.quint4x2),
        ),
        ("int8 coded; pypiquant", lambda: pack(eight, fragment, x), lambda: theirs(torch.quint8)),
        ("int8 coded; hivemind", lambda: pack(eight, fragment, x), lambda: hivemind.serialize_torch_tensor(t, uniform)),
        (
            f"{MERGED} updates of float32 averaged; tsugi-mend",
            lambda: merged(plain, whole),
            lambda: reducer.token_weighted_merge(theirs_given),
        ),
        (
            f"{MERGED} updates of int4 averaged; tsugi-mend, float32",
            lambda: merged(four, blobs["int4"]),
            lambda: reducer.token_weighted_merge(theirs_given),
        ),
    )
    cases = [Case(f"{i} {n}", work) for i, pair in enumerate(pairs) for n, work in enumerate(pair[1:])]
    took = in_turns(cases, repeats, say)
    for i, (what, *_) in enumerate(pairs):
        amount = 4e-9 * PARAMS * (MERGED if "averaged" in what else 1)
        ours, limits = (rates(amount, took[f"{i} {n}"]) for n in (0, 1))
        yield row("peers", what, counted(PARAMS), ours, "GB/s of float32", limits=limits)
