"""Nested plain data with arrays, such as an optimizer's `state_dict`, as msgpack and raw bytes instead of pickle.

A tree is None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict with plain keys, or a leaf. `flatten`
takes the leaves out, `rebuild` puts them back. Lists stay lists and tuples stay tuples, because functions such as
`random.setstate` insist on it.
"""

import copy
import math
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from isthmus.errors import InputError, RecordInvalid
from isthmus.format.records.frame import ALIGN
from isthmus.reasons import Reason
from isthmus.wording import an

DEPTH_MAX = 64
_INT64 = range(-(1 << 63), 1 << 63)
_SIMPLE = {type(None), bool, int, float}
"""Lists of these types alone, such as the order of a sampler, may have millions of items; they are kept unchanged."""
_DTYPE = re.compile(r"[<>|=][biufc][0-9]{1,2}", re.ASCII)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class LeafSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The description of an array, whose bytes are in the payload."""

    maker: Annotated[str, msgspec.Meta(max_length=16)]
    """The library of the array: `numpy`, or the name that the caller of `flatten` uses for its own arrays."""
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)], ...], msgspec.Meta(max_length=16)]
    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
    """Bytes."""
    stride: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)], ...], msgspec.Meta(max_length=16)] = ()
    """Strides in elements, if the array was not in C order in memory, as with channels_last. Its bytes in the payload
    are in C order in any case."""


NOWHERE = np.empty(0, np.uint8)


class Leaf:
    """An array as bytes [size] uint8, with its description."""

    __slots__ = ("data", "pieces", "shared", "spec")

    def __init__(self, spec: LeafSpec, data: Bytes, pieces: Sequence[Any] = (), *, shared: bool = True) -> None:
        """`pieces`: where the bytes of the array are, if they are not in `data`; the caller defines their type.
        `shared`: the bytes belong to a larger object, so an array made from this leaf has to copy them."""
        self.spec = spec
        self.data = data
        self.pieces = pieces
        self.shared = shared


Take = Callable[[object], Leaf | None]
"""Turns an object that is not plain data into a leaf, or returns None if it is not an array. Raises `InputError` for an
array that cannot be kept. The error's text continues a sentence that begins with the place, as "is a sparse tensor"."""


def flatten(tree: object, what: str, take: Take, leaves: list[Leaf]) -> Any:
    """Return the tree as data for msgpack, and append the leaves to which it refers to `leaves`.

    An array that is in several places is appended once. Raises `InputError`, naming the place in `what`, for an object
    that is neither plain data nor an array, and for an array for which `take` raises it.
    """
    places: dict[int, int] = {}

    def walk(node: object, path: str, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise InputError(f"{path}: nested more than {DEPTH_MAX} deep")
        if node is None or isinstance(node, bool | float | bytes):
            return node
        if isinstance(node, str):
            return _text(node)
        if isinstance(node, int):
            return node if node in _INT64 else ["i", str(node)]
        if isinstance(node, list | tuple) and not hasattr(node, "_fields"):  # A named tuple would lose its names.
            simple = _is_simple(node)
            items = list(node) if simple else [walk(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(node)]
            return ["l" if isinstance(node, list) else "t", items]
        if isinstance(node, set | frozenset):
            items = [walk(item, f"{path} item", depth + 1) for item in node]
            return ["e" if isinstance(node, set) else "f", items]
        if isinstance(node, dict):
            pairs = [[walk(k, f"{path} key", depth + 1), walk(v, f"{path}[{k!r}]", depth + 1)] for k, v in node.items()]
            return ["d", pairs]
        if id(node) in places:
            return ["a", places[id(node)]]
        try:
            leaf = take(node) or _take_numpy(node)
        except InputError as error:
            raise InputError(f"{path} {error}") from None
        if leaf is None:
            raise InputError(
                f"{path} is {an(f'{type(node).__module__}.{type(node).__qualname__}')}: a checkpoint holds plain data "
                "(numbers, text, bytes, lists, tuples, sets, dicts) and arrays"
            )
        leaves.append(leaf)
        places[id(node)] = len(leaves) - 1
        return ["a", len(leaves) - 1]

    return walk(tree, what, 0)


def _is_simple(items: Sequence[object]) -> bool:
    """Return whether a list holds only None, bools and numbers that msgpack can encode."""
    kinds = set(map(type, items))
    if not kinds <= _SIMPLE:
        return False
    whole = [item for item in items if isinstance(item, int)]
    return not whole or (min(whole) in _INT64 and max(whole) in _INT64)


def _text(node: str) -> Any:
    """Return text in a form that msgpack can encode. A file name that is not UTF-8 has characters that it cannot."""
    try:
        node.encode()
    except UnicodeEncodeError:
        return ["s", node.encode("utf-8", "surrogatepass")]
    return node


def copied(tree: Any) -> Any:
    """Return an independent copy of a tree. Raises whatever copying an object in it raises."""
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(tree) if set(map(type, tree)) <= _SIMPLE else type(tree)(map(copied, tree))
    return copy.deepcopy(tree)


def rebuild(plain: Any, leaves: Sequence[Leaf], make: Callable[[Leaf], object]) -> Any:
    """Undo `flatten`. `make` makes the arrays that are not NumPy's. An array in several places becomes one array again.

    Raises `RecordInvalid` for data that `flatten` does not write.
    """
    made: dict[int, object] = {}

    def walk(node: Any, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise RecordInvalid(Reason.MALFORMED, "a tree is nested too deep")
        if node is None or isinstance(node, bool | int | float | str | bytes):
            return node
        match node:
            case ("i", str(text)) if len(text) < 512 and text.lstrip("-").isdigit():
                return int(text)
            case ("l", (*items,)):
                return items if _is_simple(items) else [walk(item, depth + 1) for item in items]
            case ("t", (*items,)):
                return tuple(items) if _is_simple(items) else tuple(walk(item, depth + 1) for item in items)
            case ("e", (*items,)):
                return {walk(item, depth + 1) for item in items}
            case ("f", (*items,)):
                return frozenset(walk(item, depth + 1) for item in items)
            case ("s", bytes(text)):
                return text.decode("utf-8", "surrogatepass")
            case ("d", (*pairs,)) if all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
                keys = [walk(key, depth + 1) for key, _ in pairs]
                if any(isinstance(key, list | dict) for key in keys):
                    raise RecordInvalid(Reason.MALFORMED, "a tree has a key that cannot be one")
                return dict(zip(keys, (walk(value, depth + 1) for _, value in pairs), strict=True))
            case ("a", int(index)) if 0 <= index < len(leaves):
                if index not in made:
                    leaf = leaves[index]
                    made[index] = _make_numpy(leaf) if leaf.spec.maker == "numpy" else make(leaf)
                return made[index]
        raise RecordInvalid(Reason.MALFORMED, "a tree holds something no tree holds")

    try:
        return walk(plain, 0)
    except RecordInvalid:
        raise
    except Exception as error:  # Untrusted bytes can raise any exception here.
        raise RecordInvalid(Reason.MALFORMED, f"a tree that nothing of ours wrote: {error!r}") from None


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    plain: Any
    specs: tuple[LeafSpec, ...]


def packed(tree: object, what: str, take: Take) -> bytes:
    """Return a tree as bytes, which `unpacked` reads. Raises `InputError` as `flatten` does."""
    leaves: list[Leaf] = []
    head = msgspec.msgpack.encode(_Packed(flatten(tree, what, take, leaves), tuple(leaf.spec for leaf in leaves)))
    starts, size = place(leaves)
    out = np.zeros(8 + len(head) + size, np.uint8)
    out[:8] = np.frombuffer(len(head).to_bytes(8, "little"), np.uint8)
    out[8 : 8 + len(head)] = np.frombuffer(head, np.uint8)
    for leaf, start in zip(leaves, starts, strict=True):
        at = 8 + len(head) + start
        out[at : at + leaf.spec.size] = leaf.data
    return out.tobytes()


def unpacked(blob: bytes, make: Callable[[Leaf], object]) -> Any:
    """Undo `packed`. Raises `RecordInvalid` for bytes that `packed` does not write."""
    end = 8 + int.from_bytes(blob[:8], "little")
    try:
        head = msgspec.msgpack.decode(blob[8:end], type=_Packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordInvalid(Reason.MALFORMED, f"no packed tree: {error}") from None
    return rebuild(head.plain, cut(head.specs, memoryview(blob)[end:]), make)


def place(leaves: Sequence[Leaf]) -> tuple[list[int], int]:
    """Return the byte of a payload at which each leaf starts, and the payload's size in bytes."""
    starts, at = [], 0
    for leaf in leaves:
        starts.append(at)
        at += -(-leaf.spec.size // ALIGN) * ALIGN
    return starts, at


def laid(leaves: Sequence[Leaf]) -> tuple[list[int], "list[bytes | Bytes]"]:
    """Return the byte of a payload at which each leaf starts, and the payload in pieces: leaves, with zeros between.

    The leaves are not copied.
    """
    starts, size = place(leaves)
    pieces: list[bytes | Bytes] = []
    at = 0
    for leaf, start in zip(leaves, starts, strict=True):
        pieces += [bytes(start - at), leaf.data]
        at = start + leaf.spec.size
    return starts, [*pieces, bytes(size - at)]


def cut(specs: Sequence[LeafSpec], payload: memoryview) -> list[Leaf]:
    """Return the leaves in a payload. Raises `RecordInvalid` if the payload does not have their size."""
    leaves, at = [], 0
    for spec in specs:
        if at + spec.size > len(payload):
            raise RecordInvalid(Reason.TRUNCATED, "the payload is shorter than its arrays")
        leaves.append(Leaf(spec, np.frombuffer(payload[at : at + spec.size], np.uint8)))
        at += -(-spec.size // ALIGN) * ALIGN
    if at != len(payload):
        raise RecordInvalid(Reason.OVERSIZED, "the payload is longer than its arrays")
    return leaves


def numpy_leaf(array: "np.ndarray[Any, Any]") -> Leaf:
    """Return an array of numbers [any shape] as a leaf, which shares the array's memory if that is contiguous."""
    spec = LeafSpec(maker="numpy", dtype=array.dtype.str, shape=array.shape, size=array.nbytes)
    return Leaf(spec, np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _take_numpy(node: object) -> Leaf | None:
    if isinstance(node, np.generic):
        node = np.asarray(node)
    if not isinstance(node, np.ndarray) or node.dtype.kind not in "biufc":
        return None
    return numpy_leaf(node)


def _make_numpy(leaf: Leaf) -> object:
    # np.dtype parses a whole language, and errors in it raise nearly any exception. Only names of numbers are passed.
    if not _DTYPE.fullmatch(leaf.spec.dtype):
        raise RecordInvalid(Reason.MALFORMED, f"no dtype of numbers: {leaf.spec.dtype!r}")
    try:
        dtype = np.dtype(leaf.spec.dtype)
    except TypeError as error:
        raise RecordInvalid(Reason.MALFORMED, f"no dtype: {error}") from None
    if dtype.kind not in "biufc" or leaf.spec.size != dtype.itemsize * math.prod(leaf.spec.shape):
        raise RecordInvalid(Reason.MALFORMED, "an array is not of its dtype and shape")
    found = leaf.data.view(dtype).reshape(leaf.spec.shape)
    return found.copy() if leaf.shared else found
