"""The state of an inner optimizer, any of torch's kind: as a checkpoint keeps it, and back again bit for bit.

Kept is what `state_dict()` gives: tensors of any dtype and shape, nested in dicts, lists and tuples, beside plain
values. A tensor subclass is kept as the plain tensors inside it (`__tensor_flatten__`); its class is never looked up by
name, a copy of the optimizer that has stepped once shows it (`Stepped`).
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
from isthmus.torch.shards import is_sharded, local_of

logger = logging.getLogger(__name__)

WRAPPED = "isthmus: tensor subclass"
"""Marks a dict that stands for one tensor of a subclass; its value is the subclass's name."""

Path = tuple[Hashable, ...]
"""Keys and indices from the state down to one entry; the first is the parameter's number."""


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

    What a checkpoint cannot keep stays in it as it is, for `tree.flatten` to refuse by its place; without `wrapped`
    that goes for tensor subclasses too. `state` is the optimizer's `state_dict()`, and `copied` has, by their ids,
    copies of some of the tensors in it, or what stands for them.
    """
    named = {"class": class_of(optimizer), "names": names_of(model, optimizer)}
    return named | saved_of(optimizer, wrapped, state, copied)


def saved_of(
    optimizer: torch.optim.Optimizer,
    wrapped: bool = True,
    state: dict[str, Any] | None = None,
    copied: Mapping[int, Any] | None = None,
) -> dict[str, Any]:
    """Return a copy of the optimizer's state alone; see `state_of`."""
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
    """Return whether a tensor of a subclass is anywhere in a copied state."""
    if isinstance(tree, dict):
        return WRAPPED in tree or any(has_wrapped(value) for value in tree.values())
    return isinstance(tree, list | tuple) and any(has_wrapped(item) for item in tree)


class _Copies:
    """Copies of trees with every tensor on the CPU; one that is in several places is copied once."""

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
    """Return whether a tensor is of a subclass that says which plain tensors are in it."""
    return hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")


def plain(context: Any) -> Any:
    """Return what a subclass says of itself besides its tensors as plain data; what is none stays as it is."""
    if isinstance(context, torch.dtype | torch.layout):
        return str(context)
    if isinstance(context, torch.device):
        return "device"  # which one it is may change from life to life
    if isinstance(context, dict):
        return {key: plain(value) for key, value in context.items()}
    if isinstance(context, list | tuple):
        return tuple(plain(item) for item in context)
    return context


def _hosted(state: dict[Hashable, Any], devices: list[str]) -> Iterator[Path]:
    """Yield where tensors are that lie on the CPU, other than their parameters."""

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


# --- and back ---------------------------------------------------------------------------------------------------------


def load(optimizer: torch.optim.Optimizer, saved: dict[str, Any], *, settings: bool) -> None:
    """Load a state that `state_of` copied, or one like it, in the dtypes and with the bits it was saved with.

    Without `settings` moments only: learning rates and the like stay as they are here. Raises what the optimizer's own
    `load_state_dict` does, and `ValueError` for a tensor subclass that this optimizer does not have in that place.
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
        # On its way a state is cast to the dtypes of the parameters; some dtypes cannot be.
        logger.debug("load_state_dict does not take this state, which is put in place without it: %r", error)
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
        optimizer.state.update({parameters.get(key, key): entries for key, entries in state.items()})
    for key, entries in state.items():
        owner = parameters.get(key, key)
        if owner in optimizer.state:
            optimizer.state[owner] = _uncast(optimizer.state[owner], entries)


def _uncast(loaded: Any, saved: Any) -> Any:
    """Return what was loaded with what was saved wherever loading has cast it, as far as both are built alike."""
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
        return saved  # taken for a sequence of things to cast
    return loaded


def _placed(state: dict[Hashable, Any], parameters: dict[Any, torch.Tensor], hosted: set[Path]) -> dict[Hashable, Any]:
    """Return a state with its tensors beside their parameters, but for those that lay on the CPU."""
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
    """Return a group's saved settings; those that are tensors on the device of the ones they replace."""
    return {
        key: value.to(here[key].device)
        if isinstance(value, torch.Tensor) and isinstance(here.get(key), torch.Tensor)
        else value
        for key, value in saved.items()
    }


def _unwrapped(saved: Any, like: "Outline") -> Any:
    """Return a saved state with tensors of subclasses in it again, each as this optimizer has one in its place."""
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


# --- what an optimizer would hold -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor as an optimizer keeps one."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nonnegative: bool


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A tensor of a subclass."""

    kind: type
    context: Any
    parts: dict[str, "Outline"]

    def describes(self, saved: dict[Any, Any]) -> bool:
        """Return whether a saved tensor is one of these: of the class, with such tensors in it, saying the same."""
        parts = saved.get("parts")
        return (
            (saved.get(WRAPPED), saved.get("context")) == (_name(self.kind), plain(self.context))
            and isinstance(parts, dict)
            and parts.keys() == self.parts.keys()
        )


@dataclass(frozen=True, slots=True)
class Plain:
    """A plain value, or something that cannot be looked into."""

    kind: type
    nonnegative: bool


Outline = Any
"""`Array`, `Wrapped`, `Plain`, or a dict, list or tuple of outlines."""


def outline(tree: Any) -> Outline:
    """Return what a state is made of, without its values."""
    if isinstance(tree, torch.Tensor):
        if is_sharded(tree):  # saved whole, as it is shaped; what is known of its numbers is of this rank's
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
    """Return whether no number is below 0; for complex ones, which have no order, False."""
    if tensor.is_complex():
        return False
    return not bool((numbers(tensor) < 0).any())


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether it holds neither NaN nor infinity. Raises `NotImplementedError` for what cannot be judged."""
    return bool(torch.isfinite(tensor if tensor.is_complex() else numbers(tensor)).all())


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a dtype that can be compared. Raises `NotImplementedError` where torch has no way to."""
    return tensor if tensor.dtype in _ORDERED else tensor.detach().float()


_ORDERED = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_ORDERED |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """The length of some numbers, in a form that adds up over parts."""

    squares: float
    count: int

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.squares + other.squares, self.count + other.count)

    @property
    def rms(self) -> float:
        """Root mean square; 0 of none."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class Tried(Protocol):
    """An optimizer of which a copy has taken a step."""

    outline: dict[Hashable, Outline]
    """What the state is made of, by the parameter's number."""
    moved: list[Sums]
    """How far each parameter tensor went."""

    def moved_by(self, saved: dict[str, Any]) -> list[Sums]:
        """Return how far each parameter tensor goes in a step from here, with gradients of zero, with a saved state's
        moments. Raises what `load` and the optimizer's step do."""

    def lengths(self) -> list[Sums]:
        """Return how long each parameter tensor is."""


class Stepped(Tried):
    """A copy of an optimizer and of its parameters that has taken one step with gradients of −1: what it holds then,
    and how far it goes. Of sharded parameters it is what this rank holds, and all ranks do it.

    Costs, until it is dropped, the memory of the parameters, their gradients and the optimizer's state once more, and
    the time of a step. The optimizer, its parameters and torch's random numbers stay as they are; hooks of its own and
    whatever was patched into it (learning rate schedulers do) are left out. Hooks registered for all optimizers of the
    process see the step.

    Raises whatever the optimizer does that cannot be copied or stepped so: one that wants a closure, for example.
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
    """Return a copy with parameters of its own, without hooks, and with the methods of its class.

    `parameters`: what stands in it for each parameter, by the parameter's id; its state is empty then.
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
    torch.optim.Optimizer.__setstate__(made, {})  # empty hooks
    return made


def _full_speed(group: dict[str, Any]) -> None:
    """Set a group's learning rate to the largest one known of: at the start of a schedule it may be next to zero."""
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
