"""A torch module as Isthmus sees it: which of its tensors are merged, and how values get in and out of them.

Merged: every parameter that requires a gradient, tied ones once. Frozen parameters are not merged, but must hold the
same values everywhere. Buffers stay local and are not looked at: running statistics differ between learners.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from isthmus.codecs.kernels import F32
from isthmus.errors import InputError, LayoutMismatch, RecordInvalid
from isthmus.format.layout import Layout, Spec, TensorClass
from isthmus.format.records.tree import Leaf, LeafSpec
from isthmus.learner.boundary import Replica
from isthmus.reasons import Reason

logger = logging.getLogger(__name__)

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Under these names modules hold what they wrap: `torch.compile`, and checkpointing of activations."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module whose parameters are merged: what `torch.compile` and data parallelism have wrapped."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, _WRAPPERS[0], None), nn.Module):
            model = inner
        else:
            return model


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a module's parameters under the names they have without wrappers: the same for every learner of a run."""
    for name, p in model.named_parameters():
        yield plain_name(name), p


def plain_name(name: str) -> str:
    """Return the name that something in a module has without wrappers around it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def specs_of(model: nn.Module, vectors: Sequence[str] = ()) -> list[Spec]:
    """Return the trainable parameters, in the module's own order; tied ones appear once, under their first name.

    `vectors`: patterns (`*.gate.weight`) of names of tensors that no merge takes for matrices. Of a model with
    embeddings, the last linear layer with as many outputs as there are words is among them. Raises `InputError` for a
    pattern that fits no trainable parameter.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    embeddings, words = {id(table.weight) for table in tables}, {table.num_embeddings for table in tables}
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    heads = {id(module.weight) for module in linear[-1:] if module.out_features in words}
    trained = [(name, p) for name, p in named(model) if p.requires_grad]
    for pattern in vectors:
        if not any(fnmatchcase(name, pattern) for name, _ in trained):
            raise InputError(f"no trainable parameter is named {pattern}: there are {', '.join(n for n, _ in trained)}")

    def role(name: str, p: nn.Parameter) -> TensorClass:
        if id(p) in embeddings:
            return TensorClass.EMBEDDING
        plain = id(p) in heads or any(fnmatchcase(name, pattern) for pattern in vectors)
        return TensorClass.VECTOR if plain else TensorClass.DENSE

    return [Spec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), role(name, p)) for name, p in trained]


def values_of(model: nn.Module) -> list[F32]:
    """Return the trainable parameters' values as flat float32 arrays, in the order of `specs_of`."""
    trained = [p for _, p in model.named_parameters() if p.requires_grad]
    room = Room(sum(p.numel() for p in trained))
    found = [room.take(p.numel()) for p in trained]
    for p, values in zip(trained, found, strict=True):
        torch.from_numpy(values).copy_(p.detach().reshape(-1))
    return found


class Room:
    """Memory for many arrays, as one: it goes back to the system when the last of them is gone. What as many small ones
    took the allocator keeps, 4 bytes a parameter for as long as the process lives."""

    def __init__(self, size: int) -> None:
        """`size`: of all of them together, in elements."""
        self._values = np.empty(size, np.float32)
        self._at = 0

    def take(self, size: int) -> F32:
        """Return the next array [size]; its values are anything."""
        self._at += size
        return self._values[self._at - size : self._at]


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `InputError` where the optimizer trains a tensor that is no parameter of the model: it is not merged."""
    known = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in known:
                raise InputError(
                    f"parameter group {number} of the optimizer holds a tensor of shape {tuple(p.shape)} that is not a "
                    "parameter of the model: join the module that owns it"
                )
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in named(model) if p.requires_grad and id(p) not in trained]
    if left:
        logger.warning(
            "the optimizer does not train %d of the model's trainable parameters (%s%s): they are merged all the same, "
            "and change nothing; requires_grad_(False) keeps them out of the run",
            len(left), ", ".join(left[:3]), ", …" if len(left) > 3 else "",
        )  # fmt: skip


Follow = Callable[[Sequence[tuple[Any, tuple[int, int] | None]]], AbstractContextManager[None]]
"""See `copies.Copies.follow`."""


def nothing_follows(_: object) -> AbstractContextManager[None]:
    """Move nothing."""
    return nullcontext()


class TorchReplica(Replica):
    """Reads and writes a module's parameters, fragment by fragment, on any device and in any of the dtypes."""

    def __init__(self, model: nn.Module, layout: Layout, follow: Follow = nothing_follows) -> None:
        """`follow`: moves what follows the parameters that a block writes."""
        parameters = dict(named(model))
        self._follow = follow
        self._places = [
            [(parameters[t.spec.name], t.rows, slice(t.start, t.stop)) for t in fragment.tensors]
            for fragment in layout.fragments
        ]

    @override
    def read(self, fragment: int, out: F32) -> None:
        for parameter, rows, at in self._places[fragment]:
            held = rows_of(parameter, rows)
            torch.from_numpy(out[at]).view(held.shape).copy_(held)

    @override
    def write(self, fragment: int, values: F32) -> None:
        with self._follow([(parameter, rows) for parameter, rows, _ in self._places[fragment]]):
            for parameter, rows, at in self._places[fragment]:
                held = rows_of(parameter, rows)
                held.copy_(torch.from_numpy(writable(values[at])).view(held.shape))


def rows_of(parameter: torch.Tensor, rows: tuple[int, int] | None) -> torch.Tensor:
    """Return a view of a parameter, or of some rows of it."""
    whole = parameter.detach()
    return whole if rows is None else whole[rows[0] : rows[1]]


def keep_denormals() -> None:
    """Let the calling thread, and those it starts from now on, compute with denormal numbers; no other is touched.

    Whoever trains with `torch.set_flush_denormal(True)` hands that mode on to every thread he starts, and in it the
    values that the log records cannot be computed.
    """
    torch.set_flush_denormal(False)


# --- tensors as leaves -----------------------------------------------------------------------------------------------


def why_not_kept(tensor: torch.Tensor) -> str | None:
    """Return what a tensor is that bytes, a dtype and a shape do not say everything about, or None."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}, a tensor with contents of its own"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype}, with its scale inside)"
    if tensor.layout != torch.strided or tensor.is_meta:
        return f"a tensor without plain memory ({tensor.layout}, on {tensor.device})"
    return None


def take_tensor(node: object) -> Leaf | None:
    """Turn a tensor into a leaf (see `records.tree`). Raises `InputError` for one that is more than its bytes."""
    if not isinstance(node, torch.Tensor):
        return None
    if (why := why_not_kept(node)) is not None:
        raise InputError(f"is {why}: a checkpoint cannot keep it; let the optimizer or the data hold plain tensors")
    bits = bits_of(node)
    dtype = str(node.dtype).removeprefix("torch.")
    spec = LeafSpec(
        maker="torch", dtype=dtype, shape=tuple(node.shape), size=bits.numel(), stride=own_order(node)
    )  # fmt: skip
    return Leaf(spec, bits.numpy())


def own_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor that fills its memory in another order than C's; () for all others."""
    if tensor.is_contiguous() or not _fills(tuple(tensor.shape), tensor.stride()):
        return ()
    return tuple(tensor.stride())


def _fills(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether elements at these strides lie side by side, each at a place of its own."""
    expected = 1
    for step, count in sorted((step, count) for step, count in zip(stride, shape, strict=True) if count != 1):
        if step != expected:
            return False
        expected *= count
    return True


def make_tensor(leaf: Leaf) -> torch.Tensor:
    """Undo `take_tensor`. Raises `RecordInvalid`."""
    dtype = dtype_of(leaf.spec)
    try:
        if leaf.spec.size == 0:
            return torch.empty(leaf.spec.shape, dtype=dtype, device="cpu")
        found = torch.from_numpy(leaf.data.copy() if leaf.shared else leaf.data).view(dtype).reshape(leaf.spec.shape)
        if leaf.spec.stride:
            return torch.empty_strided(leaf.spec.shape, leaf.spec.stride, dtype=dtype, device="cpu").copy_(found)
        return found
    except Exception as error:  # its dtypes are many, and each raises its own
        raise RecordInvalid(Reason.MALFORMED, f"no {dtype} of shape {leaf.spec.shape}: {error}") from None


def dtype_of(spec: LeafSpec) -> torch.dtype:
    """Return the dtype of a leaf that `take_tensor` may have written. Raises `RecordInvalid` for any other."""
    dtype = getattr(torch, spec.dtype, None)
    if spec.maker != "torch" or not isinstance(dtype, torch.dtype) or dtype in _QUANTISED:
        raise RecordInvalid(Reason.MALFORMED, f"no tensor of {spec.maker}: {spec.dtype!r}")
    if spec.size != math.prod(spec.shape) * dtype.itemsize:
        raise RecordInvalid(Reason.MALFORMED, "a tensor is not of its dtype and shape")
    if spec.stride and not (len(spec.stride) == len(spec.shape) and _fills(spec.shape, spec.stride)):
        raise RecordInvalid(Reason.MALFORMED, "a tensor lies in an order that there is none of")
    return dtype


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values on the CPU, in memory of their own; any dtype that `take_tensor` takes.

    They lie as they lay, where a tensor fills its memory (channels_last); else in the order of C.
    """
    if own_order(tensor):
        return tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True)
    bits = bits_of(tensor)
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return (bits.clone() if tensor.device.type == "cpu" else bits).view(tensor.dtype).reshape(tensor.shape)


_QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as bytes [size] uint8 on the CPU; shared with it where they lie together there."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def load(model: nn.Module, layout: Layout, values: Iterable[F32]) -> None:
    """Write all fragments' values into a module."""
    replica = TorchReplica(model, layout)
    for fragment, flat in enumerate(values):
        replica.write(fragment, flat)


def load_named(model: nn.Module, specs: Sequence[Spec], values: Sequence[F32]) -> None:
    """Write values into the trainable parameters of these names, and into frozen ones and buffers where there are any.

    Raises `LayoutMismatch`, naming the first misfit.
    """
    others: dict[str, torch.Tensor] = {name: p for name, p in named(model) if not p.requires_grad}
    others |= dict(model.named_buffers())
    parameters: dict[str, torch.Tensor] = {name: p for name, p in named(model) if p.requires_grad}
    parameters |= {spec.name: others[spec.name] for spec in specs if spec.name in others}
    given = {spec.name: (spec, flat) for spec, flat in zip(specs, values, strict=True)}
    for name in sorted(parameters.keys() | given.keys()):
        if name not in given or name not in parameters:
            raise LayoutMismatch(f"tensor {name!r} is only in the {'file' if name in given else 'model'}")
        spec, flat = given[name]
        if spec.shape != tuple(parameters[name].shape):
            raise LayoutMismatch(
                f"tensor {name!r} has shape {spec.shape} in the file, {tuple(parameters[name].shape)} in the model"
            )
        with torch.no_grad():
            parameters[name].copy_(torch.from_numpy(writable(flat)).view(spec.shape))


def load_local(model: nn.Module, local: Mapping[str, tuple[str, "np.ndarray[Any, Any]"]]) -> None:
    """Write tensors that are not merged into the buffers and frozen parameters of their names, where there are any."""
    there: dict[str, torch.Tensor] = {name: p for name, p in named(model) if not p.requires_grad}
    there |= {plain_name(name): buffer for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, (_, values) in local.items():
            if name in there and there[name].shape == values.shape:
                there[name].copy_(torch.from_numpy(np.array(values)))


def writable(values: F32) -> F32:
    """torch warns of read-only memory even where it only reads."""
    return values if values.flags.writeable else values.copy()
