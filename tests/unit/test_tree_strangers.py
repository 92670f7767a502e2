"""A hostile tree raises only `RecordInvalid`, whatever error its bytes cause in NumPy or torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.errors import InputError, RecordInvalid
from isthmus.format.records import tree
from isthmus.torch import model as torch_model


def rebuilt(
    maker: str, dtype: str, shape: tuple[int, ...] = (2,), size: int = 8, plain: tuple[str, int] = ("a", 0)
) -> Any:
    spec = tree.LeafSpec(maker=maker, dtype=dtype, shape=shape, size=size)
    return tree.rebuild(plain, [tree.Leaf(spec, np.zeros(size, np.uint8))], torch_model.make_tensor)


# For these, `numpy.dtype` raises a SyntaxError, a ValueError or a TypeError, or returns a dtype that is not of numbers.
HOSTILE = ["(", "f4,(", "()f4", "(1,)(", "{", "[('a'", "i4,(1,f4", "U999999999999", "S-1", ",", "(2,3", "f4\x00", "f4:",
           " ", "", "lambda", "datetime64[", "(99999999999,)f4", "(4294967296,4294967296)f4", "O", "O8", "V8", "M8[s]",
           "<f3", "<u99", "<f4 ", "<f٤"]  # fmt: skip


@pytest.mark.parametrize("dtype", HOSTILE)
def test_a_dtype_that_is_none_of_numbers_is_turned_away(dtype: str) -> None:
    with pytest.raises(RecordInvalid):
        rebuilt("numpy", dtype)


@pytest.mark.parametrize("dtype", [*HOSTILE, "nn", "Tensor", "float32.real", "__class__"])
def test_nor_is_it_one_of_torch(dtype: str) -> None:
    with pytest.raises(RecordInvalid):
        rebuilt("torch", dtype)


@pytest.mark.parametrize("shape", [(1 << 40, 1 << 40), (3,), (0,), (0, 1 << 40, 1 << 40), (2, 1, 1)])
@pytest.mark.parametrize(("maker", "dtype"), [("numpy", "<f4"), ("torch", "float32")])
def test_a_shape_either_fits_the_bytes_or_is_turned_away(maker: str, dtype: str, shape: tuple[int, ...]) -> None:
    try:
        assert tuple(rebuilt(maker, dtype, shape).shape) == shape == (2, 1, 1)
    except RecordInvalid:
        assert shape != (2, 1, 1)


DTYPES = sorted({str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_torch_comes_back_or_is_refused_on_both_ways(dtype: str) -> None:
    itemsize = getattr(torch, dtype).itemsize
    bits = np.arange(6 * itemsize, dtype=np.uint8) % 2
    spec = tree.LeafSpec(maker="torch", dtype=dtype, shape=(2, 3), size=bits.size)
    try:
        tensor = torch_model.make_tensor(tree.Leaf(spec, bits))
    except RecordInvalid:
        assert dtype.startswith(("q", "complex32")), "torch itself cannot hold this one as plain bytes"
        return
    leaf = torch_model.take_tensor(tensor)
    assert leaf is not None
    assert leaf.spec == spec
    assert np.array_equal(leaf.data, bits)


@pytest.mark.filterwarnings("ignore")  # torch warns that its quantised tensors are deprecated
@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (lambda: torch.eye(3).to_sparse(), r"sparse_coo"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.ones(3).as_subclass(type("Odd", (torch.Tensor,), {})), "Odd"),
    ],
    ids=["sparse", "quantised", "meta", "subclass"],
)
def test_a_tensor_that_cannot_be_kept_is_named_with_its_place(tensor: Callable[[], torch.Tensor], what: str) -> None:
    with pytest.raises(InputError, match=rf"state\['m'\]\[1\] is a .*{what}"):
        tree.flatten({"m": [0, tensor()]}, "state", torch_model.take_tensor, [])


def test_an_array_in_several_places_is_written_once_and_is_one_again() -> None:
    shared, own = torch.arange(3.0), torch.arange(3.0)
    leaves: list[tree.Leaf] = []
    plain = tree.flatten({"a": shared, "b": [shared, own]}, "state", torch_model.take_tensor, leaves)
    assert len(leaves) == 2
    found = tree.rebuild(plain, leaves, torch_model.make_tensor)
    assert found["a"] is found["b"][0]
    assert found["a"] is not found["b"][1]


def test_a_header_that_names_one_array_again_and_again_makes_one() -> None:
    spec = tree.LeafSpec(maker="numpy", dtype="<f4", shape=(2,), size=8)
    found = tree.rebuild(("l", (("a", 0),) * 1000), [tree.Leaf(spec, np.zeros(8, np.uint8))], torch_model.make_tensor)
    assert len({id(item) for item in found}) == 1
