"""Selects the tensors of a torch module that are merged, and reads and writes their values.

Every parameter that requires a gradient is merged; a tied parameter is merged once. Frozen parameters are not merged,
but must hold the same values everywhere. Buffers stay local and are not compared: running statistics differ between
learners.
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
from torch.nn.parameter import is_lazy
from typing_extensions import override

from isthmus.codecs.kernels import F32
from isthmus.errors import InputError, LayoutMismatch, RecordInvalid
from isthmus.format.layout import Layout, Spec, TensorClass
from isthmus.format.records.tree import Leaf, LeafSpec
from isthmus.learner.boundary import Replica
from isthmus.reasons import Reason
from isthmus.wording import an

logger = logging.getLogger(__name__)

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Attributes under which wrappers hold the wrapped module: those of `torch.compile` and of activation checkpointing."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module whose parameters are merged: the one inside `torch.compile` and data parallelism."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, _WRAPPERS[0], None), nn.Module):
            model = inner
        else:
            return model


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a module's parameters under their names without wrappers, which are the same for every learner of a run."""
    for name, p in model.named_parameters():
        yield plain_name(name), p


def plain_name(name: str) -> str:
    """Return a name without the parts that wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def specs_of(model: nn.Module, vectors: Sequence[str] = ()) -> list[Spec]:
    """Return the trainable parameters, in the module's own order; tied ones appear once, under their first name.

    `vectors`: patterns (`*.gate.weight`) of names of tensors that no merge treats as matrices. The weight of the
    model's last linear layer is also among these tensors if the layer has as many outputs as an embedding has entries.
    Raises `InputError` for a pattern that fits no trainable parameter.
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
    """One block of memory for many arrays. The system gets it back when the last of the arrays is gone.

    If each array were allocated by itself, the allocator would keep the memory of the small ones (4 bytes a parameter)
    for as long as the process lives.
    """

    def __init__(self, size: int) -> None:
        """`size`: the size of all arrays together, in elements."""
        self._values = np.empty(size, np.float32)
        self._at = 0

    def take(self, size: int) -> F32:
        """Return the next array [size], uninitialised."""
        self._at += size
        return self._values[self._at - size : self._at]


def require_numbers(model: nn.Module) -> None:
    """Raise `InputError` if a parameter has no numbers yet: it is on the meta device, or its layer is lazy."""
    for name, p in named(model):
        if is_lazy(p):
            raise InputError(
                f"parameter {name} has no shape yet, since its layer is lazy: pass a batch through the model, and make "
                "the optimizer, before join"
            )
        if p.is_meta:
            raise InputError(
                f"parameter {name} is on the meta device, without numbers: give the model some before join "
                "(model.to_empty(device=…), then its initialisation), and make the optimizer after that"
            )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise `InputError` if the optimizer trains a tensor that is not a parameter of the model, and so is not merged.

    Log a warning if it does not train all trainable parameters of the model.
    """
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


MoveAlong = Callable[[Sequence[tuple[Any, tuple[int, int] | None]]], AbstractContextManager[None]]
"""See `weight_copies.Copies.move_along`."""


def no_copies(_: object) -> AbstractContextManager[None]:
    """Return a context manager that moves nothing."""
    return nullcontext()


class TorchReplica(Replica):
    """Reads and writes a module's parameters by fragment, on any device and in any dtype that a run allows."""

    def __init__(self, model: nn.Module, layout: Layout, move_along: MoveAlong = no_copies) -> None:
        """`move_along`: moves second copies of the parameters along with them; see `MoveAlong`."""
        parameters = dict(named(model))
        self._move_along = move_along
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
        with self._move_along([(parameter, rows) for parameter, rows, _ in self._places[fragment]]):
            for parameter, rows, at in self._places[fragment]:
                held = rows_of(parameter, rows)
                held.copy_(torch.from_numpy(writable(values[at])).view(held.shape))


def rows_of(parameter: torch.Tensor, rows: tuple[int, int] | None) -> torch.Tensor:
    """Return a view of a parameter, or of some of its rows."""
    whole = parameter.detach()
    return whole if rows is None else whole[rows[0] : rows[1]]


def keep_denormals() -> None:
    """Let the calling thread, and the threads it starts from now on, compute with denormal numbers.

    Other threads stay as they are. A thread that called `torch.set_flush_denormal(True)` passes that mode on to every
    thread it starts. In that mode, the values that the log records cannot be computed.
    """
    torch.set_flush_denormal(False)


# --- tensors as leaves -----------------------------------------------------------------------------------------------


def why_not_kept(tensor: torch.Tensor) -> str | None:
    """Return a description of a tensor that its bytes, dtype and shape do not fully define; None for other tensors."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return f"{an(f'{type(tensor).__module__}.{type(tensor).__qualname__}')}, a tensor with contents of its own"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype}, with its scale inside)"
    if tensor.layout != torch.strided or tensor.is_meta:
        return f"a tensor without plain memory ({tensor.layout}, on {tensor.device})"
    return None


def take_tensor(node: object) -> Leaf | None:
    """Return a tensor as a leaf (see `records.tree`); None for other objects.

    Raises `InputError` for a tensor that `why_not_kept` describes.
    """
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
    """Return the strides of a tensor that fills its memory in an order other than C order; () for all others."""
    if tensor.is_contiguous() or not _fills(tuple(tensor.shape), tensor.stride()):
        return ()
    return tuple(tensor.stride())


def _fills(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether elements at these strides fill memory without gaps and without sharing a place."""
    expected = 1
    for step, count in sorted((step, count) for step, count in zip(stride, shape, strict=True) if count != 1):
        if step != expected:
            return False
        expected *= count
    return True


def make_tensor(leaf: Leaf) -> torch.Tensor:
    """Return the tensor of a leaf that `take_tensor` made. Raises `RecordInvalid`."""
    dtype = dtype_of(leaf.spec)
    try:
        if leaf.spec.size == 0:
            return torch.empty(leaf.spec.shape, dtype=dtype, device="cpu")
        found = torch.from_numpy(leaf.data.copy() if leaf.shared else leaf.data).view(dtype).reshape(leaf.spec.shape)
        if leaf.spec.stride:
            return torch.empty_strided(leaf.spec.shape, leaf.spec.stride, dtype=dtype, device="cpu").copy_(found)
        return found
    except Exception as error:  # torch raises different errors for different dtypes
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
    """Return a copy of a tensor on the CPU, in memory of its own. It may have any dtype that `take_tensor` accepts.

    The copy keeps the memory order of a tensor that fills its memory (channels_last); otherwise it is in C order.
    """
    if own_order(tensor):
        return tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True)
    bits = bits_of(tensor)
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return (bits.clone() if tensor.device.type == "cpu" else bits).view(tensor.dtype).reshape(tensor.shape)


_QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as bytes [size] uint8 on the CPU. They share the memory of a contiguous CPU tensor."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def load(model: nn.Module, layout: Layout, values: Iterable[F32]) -> None:
    """Write the values of all fragments into a module."""
    replica = TorchReplica(model, layout)
    for fragment, flat in enumerate(values):
        replica.write(fragment, flat)


def load_named(model: nn.Module, specs: Sequence[Spec], values: Sequence[F32]) -> None:
    """Write values into the trainable parameters of the same names, and into frozen parameters and buffers if named.

    Raises `LayoutMismatch`, with the first difference, if a value has no tensor, a trainable parameter has no value, or
    a shape differs.
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
    """Write tensors that are not merged into the buffers and frozen parameters of the same names and shapes.

    Tensors without such a place are ignored.
    """
    there: dict[str, torch.Tensor] = {name: p for name, p in named(model) if not p.requires_grad}
    there |= {plain_name(name): buffer for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, (_, values) in local.items():
            if name in there and there[name].shape == values.shape:
                there[name].copy_(torch.from_numpy(np.array(values)))


def writable(values: F32) -> F32:
    """Return values in writable memory, copied if necessary: torch warns of read-only memory even if it only reads."""
    return values if values.flags.writeable else values.copy()
