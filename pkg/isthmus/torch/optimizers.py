"""Converts the state of any torch optimizer to the form that a checkpoint keeps, and restores it bit for bit.

A checkpoint keeps what `state_dict()` returns: tensors of any dtype and shape, nested in dicts, lists and tuples, and
plain values. A tensor subclass is kept as the plain tensors inside it (`__tensor_flatten__`). Its class is never looked
up by name. Instead, a copy of the optimizer that has taken one step shows which class belongs there (`Stepped`).
"""

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
from torch import nn
from typing_extensions import override

from isthmus.torch import model as torch_model
from isthmus.torch.model import why_not_kept
from isthmus.torch.shard_transfer import is_sharded, local_of

logger = logging.getLogger(__name__)

WRAPPED = "isthmus: tensor subclass"
"""The key that marks a dict as a tensor of a subclass; the value under it is the subclass's name."""

Path = tuple[Hashable, ...]
"""Keys and indices from the state down to one entry. The first is the parameter's number."""


# --- out --------------------------------------------------------------------------------------------------------------


def state_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    wrapped: bool = True,
    state: dict[str, Any] | None = None,
    copied: Mapping[int, Any] | None = None,
) -> dict[str, Any]:
    """Return a copy of the optimizer's state on the CPU, with its class and the names of its parameters by group.

    Objects that a checkpoint cannot keep stay in the copy unchanged, so that `tree.flatten` can raise an error with
    their place. Without `wrapped`, tensor subclasses stay unchanged too. `state` is the optimizer's `state_dict()`.
    `copied` has copies of some of its tensors, or objects that stand for them, by the tensors' ids.
    """
    named = {"class": class_of(optimizer), "names": names_of(model, optimizer)}
    return named | saved_of(optimizer, wrapped, state, copied)


def saved_of(
    optimizer: torch.optim.Optimizer,
    wrapped: bool = True,
    state: dict[str, Any] | None = None,
    copied: Mapping[int, Any] | None = None,
) -> dict[str, Any]:
    """Return a copy of the optimizer's state without class and names; see `state_of`."""
    state, copies = state or optimizer.state_dict(), _Copies(wrapped, copied or {})
    devices = [p.device.type for p in parameters_of(optimizer)]
    return {
        "state": copies.of(state),
        "hosted": None if set(devices) <= {"cpu"} else [list(p) for p in _hosted(state["state"], devices)],
    }


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the full name of an optimizer's class."""
    return _name(type(optimizer))


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the optimizer's parameters, by group."""
    names = {id(p): name for name, p in torch_model.named(model)}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the optimizer's parameters in the order in which `state_dict` numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def has_wrapped(tree: Any) -> bool:
    """Return whether a copied state contains a tensor of a subclass."""
    if isinstance(tree, dict):
        return WRAPPED in tree or any(has_wrapped(value) for value in tree.values())
    return isinstance(tree, list | tuple) and any(has_wrapped(item) for item in tree)


class _Copies:
    """Copies trees, with every tensor on the CPU. A tensor that is in several places is copied once."""

    def __init__(self, wrapped: bool, known: Mapping[int, Any]) -> None:
        self._wrapped = wrapped
        self._known: dict[int, Any] = dict(known)

    def of(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            if id(tree) not in self._known:
                self._known[id(tree)] = self._tensor(tree)
            return self._known[id(tree)]
        if isinstance(tree, dict):
            return {key: self.of(value) for key, value in tree.items()}
        if isinstance(tree, list):
            return [self.of(item) for item in tree]
        if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
            return tuple(self.of(item) for item in tree)
        return tree

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if why_not_kept(tensor) is None:
            return torch_model.copy_of(tensor)
        if self._wrapped and is_wrapper(tensor):
            parts, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            return {
                WRAPPED: _name(type(tensor)),
                "parts": {part: self.of(getattr(tensor, part)) for part in parts},
                "context": plain(context),
                "shape": tuple(tensor.shape),
                "stride": tuple(tensor.stride()),
            }
        return tensor


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a subclass that lists the plain tensors inside it."""
    return hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")


def plain(context: Any) -> Any:
    """Return the context of a tensor subclass (all but its inner tensors) as plain data.

    Objects that have no such form stay as they are.
    """
    if isinstance(context, torch.dtype | torch.layout):
        return str(context)
    if isinstance(context, torch.device):
        return "device"  # the device may change with a restart
    if isinstance(context, dict):
        return {key: plain(value) for key, value in context.items()}
    if isinstance(context, list | tuple):
        return tuple(plain(item) for item in context)
    return context


def _hosted(state: dict[Hashable, Any], devices: list[str]) -> Iterator[Path]:
    """Yield the path of each tensor that is on the CPU while its parameter is on another device."""

    def walk(tree: Any, path: Path) -> Iterator[Path]:
        if isinstance(tree, torch.Tensor):
            if tree.device.type == "cpu":
                yield path
        elif isinstance(tree, dict):
            for key, value in tree.items():
                yield from walk(value, (*path, key))
        elif isinstance(tree, list | tuple):
            for index, item in enumerate(tree):
                yield from walk(item, (*path, index))

    for key, entries in state.items():
        home = devices[key] if isinstance(key, int) and key < len(devices) else devices[0]
        if home != "cpu":
            yield from walk(entries, (key,))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# --- in ---------------------------------------------------------------------------------------------------------------


def load(optimizer: torch.optim.Optimizer, saved: dict[str, Any], *, settings: bool) -> None:
    """Load a state that `state_of` copied, or one like it, in the dtypes and with the bits in which it was saved.

    Without `settings`, only the moments are loaded; learning rates and other settings stay as they are. Raises the
    errors of the optimizer's own `load_state_dict`, and `ValueError` for a tensor subclass that this optimizer does not
    have in that place.
    """
    state, groups = saved["state"]["state"], optimizer.state_dict()["param_groups"]
    if has_wrapped(state):
        try:
            like = Stepped(optimizer).outline
        except Exception as error:
            raise ValueError(f"no copy of this optimizer can step, to show its tensor subclasses: {error!r}") from error
        state = _unwrapped(state, like)
    if settings:
        groups = [_on_devices_of(*both) for both in zip(groups, saved["state"]["param_groups"], strict=True)]
    parameters = dict(enumerate(parameters_of(optimizer)))
    hosted = saved.get("hosted") if settings else None
    if hosted is not None:
        state = _placed(state, parameters, {tuple(path) for path in hosted})
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (RuntimeError, TypeError) as error:
        # `load_state_dict` casts a state to the dtypes of the parameters, which some dtypes do not allow.
        logger.debug("load_state_dict does not take this state, which is put in place without it: %r", error)
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
        optimizer.state.update({parameters.get(key, key): entries for key, entries in state.items()})
    for key, entries in state.items():
        owner = parameters.get(key, key)
        if owner in optimizer.state:
            optimizer.state[owner] = _uncast(optimizer.state[owner], entries)


def _uncast(loaded: Any, saved: Any) -> Any:
    """Return `loaded` with the saved tensor in place of each tensor that loading has cast.

    Parts of `loaded` that have another structure than `saved` stay as they are.
    """
    if isinstance(saved, torch.Tensor):
        if isinstance(loaded, torch.Tensor) and loaded.shape == saved.shape and loaded.dtype != saved.dtype:
            return saved.to(loaded.device)
    elif isinstance(saved, dict):
        if isinstance(loaded, dict) and loaded.keys() == saved.keys():
            loaded.update({key: _uncast(loaded[key], value) for key, value in saved.items()})
    elif isinstance(saved, list | tuple):
        if isinstance(loaded, list | tuple) and len(loaded) == len(saved):
            return type(saved)(_uncast(*both) for both in zip(loaded, saved, strict=True))
    elif isinstance(saved, str):
        return saved  # `load_state_dict` treats a string as a sequence of values to cast
    return loaded


def _placed(state: dict[Hashable, Any], parameters: dict[Any, torch.Tensor], hosted: set[Path]) -> dict[Hashable, Any]:
    """Return a state with each tensor on the device of its parameter, except those at the paths in `hosted`."""
    moved: dict[tuple[int, str], torch.Tensor] = {}

    def walk(tree: Any, path: Path, home: torch.device) -> Any:
        if isinstance(tree, torch.Tensor):
            if path in hosted:
                return tree
            return moved.setdefault((id(tree), str(home)), tree.to(home))
        if isinstance(tree, dict):
            return {key: walk(value, (*path, key), home) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(walk(item, (*path, index), home) for index, item in enumerate(tree))
        return tree

    return {key: walk(tree, (key,), parameters.get(key, parameters[0]).device) for key, tree in state.items()}


def _on_devices_of(here: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return a group's saved settings, with each tensor on the device of the tensor that it replaces."""
    return {
        key: value.to(here[key].device)
        if isinstance(value, torch.Tensor) and isinstance(here.get(key), torch.Tensor)
        else value
        for key, value in saved.items()
    }


def _unwrapped(saved: Any, like: "Outline") -> Any:
    """Return a saved state with its tensor subclasses rebuilt, each like the one that this optimizer has in its place.

    Raises `ValueError` if the optimizer has no such tensor there.
    """
    if isinstance(saved, dict) and WRAPPED in saved:
        if not isinstance(like, Wrapped) or not like.describes(saved):
            raise ValueError(f"this optimizer has no such {saved[WRAPPED]} where one was saved")
        parts = {part: _unwrapped(saved["parts"][part], inner) for part, inner in like.parts.items()}
        remake = like.kind.__tensor_unflatten__  # type: ignore[attr-defined]
        return remake(parts, like.context, saved["shape"], saved["stride"])
    if isinstance(saved, dict):
        likes = like if isinstance(like, dict) else {}
        return {key: _unwrapped(value, likes.get(key)) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        of = like if isinstance(like, list | tuple) and len(like) == len(saved) else [None] * len(saved)
        return type(saved)(_unwrapped(*both) for both in zip(saved, of, strict=True))
    return saved


# --- outlines: what an optimizer would hold ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Array:
    """The outline of a tensor: its dtype, its shape, and whether no number in it is negative."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nonnegative: bool


@dataclass(frozen=True, slots=True)
class Wrapped:
    """The outline of a tensor of a subclass."""

    kind: type
    context: Any
    parts: dict[str, "Outline"]

    def describes(self, saved: dict[Any, Any]) -> bool:
        """Return whether a saved tensor has the same class, the same names of inner tensors and the same context."""
        parts = saved.get("parts")
        return (
            (saved.get(WRAPPED), saved.get("context")) == (_name(self.kind), plain(self.context))
            and isinstance(parts, dict)
            and parts.keys() == self.parts.keys()
        )


@dataclass(frozen=True, slots=True)
class Plain:
    """The outline of a plain value, or of an object whose contents are not known."""

    kind: type
    nonnegative: bool


Outline = Any
"""`Array`, `Wrapped`, `Plain`, or a dict, list or tuple of outlines."""


def outline(tree: Any) -> Outline:
    """Return the outline of a state: its structure without its values."""
    if isinstance(tree, torch.Tensor):
        if is_sharded(tree):  # it is saved whole, so the shape is the whole one; this rank sees only its own numbers
            return Array(tree.dtype, tuple(tree.shape), outline(local_of(tree)).nonnegative)
        if is_wrapper(tree) and why_not_kept(tree) is not None:
            parts, context = tree.__tensor_flatten__()  # type: ignore[attr-defined]
            return Wrapped(type(tree), context, {part: outline(getattr(tree, part)) for part in parts})
        try:
            return Array(tree.dtype, tuple(tree.shape), nowhere_negative(tree))
        except NotImplementedError:
            return Array(tree.dtype, tuple(tree.shape), nonnegative=False)
    if isinstance(tree, dict):
        return {key: outline(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [outline(item) for item in tree]
    if isinstance(tree, tuple):
        return tuple(outline(item) for item in tree)
    return Plain(type(tree), isinstance(tree, int | float) and tree >= 0)


def nowhere_negative(tensor: torch.Tensor) -> bool:
    """Return whether no number in a tensor is below 0. Return False for complex numbers, which have no order."""
    if tensor.is_complex():
        return False
    return not bool((numbers(tensor) < 0).any())


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinity.

    Raises `NotImplementedError` for a dtype that torch cannot convert; see `numbers`.
    """
    return bool(torch.isfinite(tensor if tensor.is_complex() else numbers(tensor)).all())


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a dtype that can be compared. Raises `NotImplementedError` if torch cannot convert it."""
    return tensor if tensor.dtype in _ORDERED else tensor.detach().float()


_ORDERED = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_ORDERED |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """The sum of the squares of some numbers, and their count. Both add up over parts of a tensor."""

    squares: float
    count: int

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.squares + other.squares, self.count + other.count)

    @property
    def rms(self) -> float:
        """Root mean square; 0 if there are no numbers."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class Tried(Protocol):
    """The result of a step that a copy of an optimizer has taken."""

    outline: dict[Hashable, Outline]
    """The outline of the state after the step, by the parameter's number."""
    moved: list[Sums]
    """How far the step moved each parameter tensor."""

    def moved_by(self, saved: dict[str, Any]) -> list[Sums]:
        """Return how far each parameter tensor moves in a step with a saved state's moments and gradients of zero.

        The step starts at the current parameters. Raises the errors of `load` and of the optimizer's step.
        """

    def lengths(self) -> list[Sums]:
        """Return the length of each parameter tensor."""


class Stepped(Tried):
    """A copy of an optimizer and of its parameters that has taken one step with gradients of −1.

    It shows what state the optimizer holds then, and how far the step moves the parameters. With sharded parameters,
    the copy has the shards of this rank, and all ranks must make one.

    Until it is dropped, the copy costs the memory of the parameters, their gradients and the optimizer's state once
    more. It also costs the time of a step. The optimizer, its parameters and torch's random state stay unchanged. The
    copy does not have the optimizer's own hooks, nor methods patched into it (as learning rate schedulers do). Hooks
    registered for all optimizers of the process see the step.

    Raises any error of an optimizer that cannot be copied or stepped in this way, such as one that needs a closure.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._here = parameters_of(optimizer)
        self._copy = twin(optimizer)
        for group in self._copy.param_groups:
            _full_speed(group)
            downhill = 1.0 if group.get("maximize") else -1.0
            for p in group["params"]:
                p.grad = torch.full_like(p, downhill) if p.requires_grad else None
        self._step()
        self.outline: dict[Hashable, Outline] = outline(self._copy.state_dict()["state"])
        self.moved = self._moved()

    @override
    def moved_by(self, saved: dict[str, Any]) -> list[Sums]:
        with torch.no_grad():
            for here, p in zip(self._here, parameters_of(self._copy), strict=True):
                p.copy_(here)
                if p.grad is not None:
                    p.grad.zero_()
        load(self._copy, saved, settings=False)
        self._step()
        return self._moved()

    @override
    def lengths(self) -> list[Sums]:
        return [_sums(local_of(p)) for p in self._here]

    def _step(self) -> None:
        devices = sorted({p.device.index or 0 for p in self._here if p.device.type == "cuda"})
        with torch.random.fork_rng(devices):
            type(self._copy).step(self._copy)

    def _moved(self) -> list[Sums]:
        pairs = zip(parameters_of(self._copy), self._here, strict=True)
        return [_sums(local_of(p) - local_of(here)) for p, here in pairs]


def twin(optimizer: torch.optim.Optimizer, parameters: dict[int, Any] | None = None) -> torch.optim.Optimizer:
    """Return a copy of an optimizer with its own parameters, without hooks, and with the methods of its class.

    `parameters`: the replacement for each parameter, by the parameter's id. The copy's state is then empty.
    """
    kind = type(optimizer)
    made = kind.__new__(kind)
    inside = {
        name: value
        for name, value in vars(optimizer).items()
        if not name.endswith("_hooks") and not callable(getattr(kind, name, None))
    }
    if parameters is not None:
        inside["state"] = defaultdict(dict)
    vars(made).update(copy.deepcopy(inside, dict(parameters or {})))
    torch.optim.Optimizer.__setstate__(made, {})  # sets empty hooks
    return made


def _full_speed(group: dict[str, Any]) -> None:
    """Set a group's learning rate to the largest that is known: at the start of a schedule it may be almost zero."""
    if "lr" not in group:
        return
    known = [float(group[name]) for name in ("lr", "initial_lr", "max_lr") if group.get(name) is not None]
    rate = max(known) or 1e-3
    if isinstance(group["lr"], torch.Tensor):
        group["lr"] = torch.full_like(group["lr"], rate)
    else:
        group["lr"] = rate


def _sums(tensor: torch.Tensor) -> Sums:
    length = float(torch.linalg.vector_norm(tensor.float())) if tensor.numel() else 0.0
    return Sums(length * length, tensor.numel())
