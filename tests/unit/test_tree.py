"""Trees of plain data and arrays: what goes in comes out, and nothing else ever comes out."""

import random
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from isthmus.errors import InputError, RecordInvalid
from isthmus.pytorch import model as torch_model
from isthmus.records import tree


def trip(value: object) -> Any:
    leaves: list[tree.Leaf] = []
    plain = msgpack.packb(tree.flatten(value, "state", torch_model.take_tensor, leaves))
    read = msgpack.unpackb(plain, use_list=False, strict_map_key=True)
    payload = bytearray(tree.place(leaves)[1])
    for leaf, start in zip(leaves, tree.place(leaves)[0], strict=True):
        payload[start : start + leaf.spec.size] = leaf.data.tobytes()
    cut = tree.cut([leaf.spec for leaf in leaves], memoryview(payload))
    return tree.rebuild(read, cut, torch_model.make_tensor)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        2**127 + 1,
        1.5,
        "text",
        b"bytes",
        [],
        (),
        {},
        [1, (2, [3])],
        {"a": {0: None, 1: (1, 2)}, 7: [], ("k", 1): "tuple key", "a b": -(2**80)},
    ],
)
def test_plain_data_comes_back_as_it_was(value: object) -> None:
    found = trip(value)
    assert found == value
    assert type(found) is type(value)


def test_states_of_real_generators_come_back() -> None:
    rng = np.random.default_rng(7)
    assert trip(rng.bit_generator.state) == rng.bit_generator.state
    state = random.Random(7).getstate()
    random.Random().setstate(trip(state))
    assert trip(state) == state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5)])
def test_tensors_come_back_bit_by_bit(dtype: str, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape).to(getattr(torch, dtype))
    found = trip({"t": [value]})["t"][0]
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert torch.equal(found, value)


def test_arrays_come_back_bit_by_bit() -> None:
    value = np.arange(12, dtype=np.int16).reshape(3, 4).T
    assert np.array_equal(trip((value,))[0], value)
    assert trip([np.float32(2.5)]) == [2.5]


def test_what_is_no_plain_data_is_named_with_its_place() -> None:
    with pytest.raises(InputError, match=r"state\['a'\]\[1\] is a builtins.set"):
        trip({"a": [1, {2}]})
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InputError, match="nested more than"):
        trip(deep)


@pytest.mark.parametrize(
    "plain",
    [
        ("x", 1),
        ("a", 5),
        ("a", -1),
        ("i", "1e9"),
        ("d", ((1, 2, 3),)),
        ("d", ((("l", ()), 1),)),
        ("l",),
        (1, 2),
        {"a": 1},
    ],
)
def test_what_flatten_never_wrote_is_turned_away(plain: object) -> None:
    with pytest.raises(RecordInvalid):
        tree.rebuild(plain, [], torch_model.make_tensor)


def test_arrays_that_lie_about_themselves_are_turned_away() -> None:
    spec = tree.LeafSpec(maker="numpy", dtype="<f4", shape=(3,), size=8)
    with pytest.raises(RecordInvalid, match="not of its dtype and shape"):
        tree.rebuild(("a", 0), [tree.Leaf(spec, np.zeros(8, np.uint8))], torch_model.make_tensor)
    with pytest.raises(RecordInvalid, match="shorter"):
        tree.cut([spec], memoryview(b"1234"))
    for dtype in ("O", "<U4", "V8"):
        odd = tree.LeafSpec(maker="numpy", dtype=dtype, shape=(1,), size=8)
        with pytest.raises(RecordInvalid):
            tree.rebuild(("a", 0), [tree.Leaf(odd, np.zeros(8, np.uint8))], torch_model.make_tensor)
    pickled = tree.LeafSpec(maker="torch", dtype="load", shape=(8,), size=8)
    with pytest.raises(RecordInvalid):
        tree.rebuild(("a", 0), [tree.Leaf(pickled, np.zeros(8, np.uint8))], torch_model.make_tensor)
