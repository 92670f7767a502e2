"""Trees of plain data and arrays are restored as they were, and anything else is rejected."""

import random
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from isthmus.errors import InputError, RecordInvalid
from isthmus.format.records import tree
from isthmus.torch import model as torch_model


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
        {1, 2, "three"},
        frozenset({(1, 2), 2**70}),
        {"seen": {1}, frozenset({1}): set()},
        [1, True, None, 0.5],
        (1, 2**63 - 1, -(2**63)),
        [1, 2**63],
        (-(2**63) - 1, 0.5),
        [1, "text", (2, [3])],
        {"file": "shard-\udcff.tar", "\udcff": ["\udcfe"]},
    ],
)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    found = trip(value)
    assert found == value
    assert type(found) is type(value)
    if isinstance(value, list | tuple):
        assert [type(item) for item in found] == [type(item) for item in value], "True does not become 1"


@pytest.mark.parametrize("wrap", [lambda x: [x, "a"], lambda x: (x,), lambda x: {"a": x}, lambda x: frozenset({x})])
def test_what_may_be_nested_may_be_read(wrap: Any) -> None:
    value: Any = "inmost"
    for _ in range(tree.DEPTH_MAX):
        value = wrap(value)
    assert trip(value) == value
    with pytest.raises(InputError, match="nested more than 64 deep"):
        trip(wrap(value))


def test_a_copy_is_not_reached_by_a_change() -> None:
    inner, tensor = [1, 2], torch.ones(3)
    value = {"order": inner, "pair": (inner, {1}), "tensor": tensor}
    found = tree.copied(value)
    inner.append(3)
    tensor.zero_()
    assert found["order"] == [1, 2]
    assert found["pair"] == ([1, 2], {1})
    assert found["tensor"].sum() == 3


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


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 1, 1), (2, 1, 4, 5), (1, 3, 4, 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_lie_in_memory_as_they_lay(shape: tuple[int, ...], dtype: str) -> None:
    plain = torch.randn(shape).to(getattr(torch, dtype))
    for value in (
        plain.to(memory_format=torch.channels_last),
        plain.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        torch_model.copy_of(plain.to(memory_format=torch.channels_last)),
    ):
        found = trip([value])[0]
        assert torch.equal(found, value)
        assert found.is_contiguous() == value.is_contiguous()
        assert found.is_contiguous(memory_format=torch.channels_last) == value.is_contiguous(
            memory_format=torch.channels_last
        )
        assert value.is_contiguous() or found.stride() == value.stride()


def test_what_has_gaps_or_overlaps_comes_back_in_order() -> None:
    for value in (torch.randn(4, 6)[:, ::2], torch.randn(4, 1).expand(4, 3)):
        found = trip([value])[0]
        assert torch.equal(found, value)
        assert found.is_contiguous()
    assert torch_model.copy_of(torch.randn(4, 1).expand(4, 3)).is_contiguous()


def test_arrays_come_back_bit_by_bit() -> None:
    value = np.arange(12, dtype=np.int16).reshape(3, 4).T
    assert np.array_equal(trip((value,))[0], value)
    assert trip([np.float32(2.5)]) == [2.5]


def test_what_is_no_plain_data_is_named_with_its_place() -> None:
    with pytest.raises(InputError, match=r"state\['a'\]\[1\] is a builtins.complex"):
        trip({"a": [1, 2j]})
    with pytest.raises(InputError, match=r"state\['a'\] item is a builtins.complex"):
        trip({"a": {2j}})
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
        ("e", (("l", ()),)),
        ("s", b"\xff"),
        ("s", "text"),
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


@pytest.mark.parametrize("kind", ["l", "t", "e", "f", "d"])
def test_what_is_nested_too_deep_is_turned_away(kind: str) -> None:
    def nested(levels: int) -> object:
        plain: object = None
        for _ in range(levels - 1):
            plain = ("f", (plain,))
        return ("d", (("k", plain),)) if kind == "d" else (kind, (plain,))

    tree.rebuild(nested(tree.DEPTH_MAX), [], torch_model.make_tensor)
    with pytest.raises(RecordInvalid, match="nested too deep"):
        tree.rebuild(nested(tree.DEPTH_MAX + 1), [], torch_model.make_tensor)


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
    for stride in ((1,), (1, 1), (3, 3), (0, 1), (1, 4), (6, 1)):
        odd = tree.LeafSpec(maker="torch", dtype="float32", shape=(2, 3), size=24, stride=stride)
        with pytest.raises(RecordInvalid, match="order"):
            tree.rebuild(("a", 0), [tree.Leaf(odd, np.zeros(24, np.uint8))], torch_model.make_tensor)
    pickled = tree.LeafSpec(maker="torch", dtype="load", shape=(8,), size=8)
    with pytest.raises(RecordInvalid):
        tree.rebuild(("a", 0), [tree.Leaf(pickled, np.zeros(8, np.uint8))], torch_model.make_tensor)
