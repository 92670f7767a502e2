"""The state of a training loop besides the merged parameters, as it is at a step boundary.

A restart continues from one step boundary. So this module notes, right after each step, the state that the next step
changes before it ends: the position in the data, schedules, random numbers, small buffers. When a loop ends in the
middle of a step, this module can tell whether the loop's state is still that of the boundary.
"""

import logging
import math
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from isthmus.errors import InputError
from isthmus.format.records import tree
from isthmus.format.records.tree import Leaf
from isthmus.format.rules import Hyperparameters
from isthmus.learner.checkpoint import WITHOUT_STEP, LoopState, Saver, Stateful
from isthmus.torch import model as torch_model
from isthmus.torch import optimizers
from isthmus.torch.optimizers import Stepped
from isthmus.torch.rehearsal import rehearse
from isthmus.torch.unmerged_state import LocalState, local_tensors, version_of
from isthmus.wording import an

logger = logging.getLogger(__name__)

NOTE_S, NOTE_SHARE = 2e-3, 0.01
"""If noting the loop's state takes at most `NOTE_S` seconds, it is noted at each boundary. Otherwise it is noted only
so often that it takes the share `NOTE_SHARE` of the training thread's time. If a loop ends in the middle of a step
after a boundary without a note, its restart continues from the previous checkpoint."""

IDLE_STEPS = 100
"""After this many steps in a row with a learning rate of 0, or without `link.step`, a warning is logged."""

UNCOUNTED_STEPS = 10
"""The same without `link.step` if it was never called, and the other way round: a trial is over long before a hundred
steps."""

FEW = 16
"""How many numbers of one parameter are compared, to see whether something else than the optimizer has changed it."""

SAME = 1e-3
"""Numbers that differ by less, relative to the larger, or by less than this in all, have not been changed."""

STEPPED = 0.75
"""A warning is logged, too, if fewer of `IDLE_STEPS` calls of `link.step` than this share came after a step of the
optimizer. A gradient scaler leaves out some steps."""

DISORDERED = 10
"""A warning is logged, too, if so many calls of `link.step` in a row came between the backward pass and the step of the
optimizer. Such a loop ends in the middle of a step, so that nothing of its end can be stored."""

NOTED_BYTES = 1 << 20
"""Most bytes of buffers that are noted at a boundary. If a model's buffers are larger in all, none is noted."""


@dataclass(slots=True)
class _Noted:
    """The state that the next step changes before it ends, as it was at the boundary."""

    objects: Any
    buffers: dict[str, torch.Tensor]


class Loop(Saver):
    """One process's model, optimizer, data, and other objects that a restart restores. Training thread."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Stateful | None = None,
        state: Mapping[str, Stateful] | None = None,
    ) -> None:
        """Record the loop as the training script has built it, and rehearse a restart and an adoption.

        Raises `InputError`, with the name, for an object or an optimizer that could not continue after a restart.
        """
        self.model, self.optimizer = model, optimizer
        self._objects: dict[str, Stateful] = {f"state[{name!r}]": one for name, one in (state or {}).items()}
        if data is not None:
            self._objects["data"] = data
        for name, one in self._objects.items():
            if not all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")):
                remedy = (
                    "leave data= out (the place in the data is then not kept: begin at batch link.steps_done), or "
                    "pass a sampler or loader that has both, such as torchdata's StatefulDataLoader"
                    if name == "data"
                    else "pass an object that has both, such as a scheduler, a GradScaler or isthmus.RandomState()"
                )
                raise InputError(
                    f"{name} is {an(type(one).__qualname__)}, without state_dict and load_state_dict: {remedy}"
                )
        self.local = LocalState(model)
        self.copies = rehearse(optimizer)
        self._unwraps: bool | None = None
        self._sharded = any(c.__name__ == "FSDPModule" for m in model.modules() for c in type(m).__mro__)
        self._places = [] if self._sharded else _places_of(model)
        self._buffers = {} if self._sharded else _buffers_of(model)
        self._seen: list[tuple[torch.Tensor | None, int]] = []
        self._groups: list[dict[str, Any]] = []
        self._noted: _Noted | None = None
        self._failed = ""
        self._note_after = -math.inf
        self._begun = False
        for name, one in self._objects.items():
            tree.unpacked(tree.packed(one.state_dict(), name, torch_model.take_tensor), torch_model.make_tensor)
        self._joined = dict(torch_model.named(model))
        self._trained = {name for name, p in self._joined.items() if p.requires_grad}
        self._stepped = optimizers.names_of(model, optimizer)
        self._idle = self._untold = self._calls = self._steps = self._made = 0
        self._few = self._many = self._counts = self._entered = self._stepped_once = False
        self._disordered = 0
        self._used: tuple[torch.Tensor, weakref.ref[torch.Tensor], int] | None = None
        """A parameter, the gradient of it that the optimizer's last step used, and its version then."""
        trained = [p for p in self._joined.values() if p.requires_grad]
        self._witness = trained[0] if trained else None
        self._witnessed: tuple[int, torch.Tensor] | None = None
        """The version of one parameter at the last boundary, and a few of its numbers."""
        self._told_changed = False
        self._made_anew: list[tuple[str, Any, int]] = []
        """Schedules that keep the settings that they were made with, and the place that each is to have."""
        self._hooks = optimizer.register_step_pre_hook(self._begin), optimizer.register_step_post_hook(self._end)

    def _begin(self, _: object, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Note that an optimizer step begins. With a closure, note it once the closure has computed the gradients."""
        self._watch_changes()
        self._entered = True
        closure = arguments[1] if len(arguments) > 1 else named.get("closure")
        if not callable(closure):  # some optimizers take a loss as this argument
            self._begun = True
            return None

        def called(*given: Any, **more: Any) -> Any:
            found = closure(*given, **more)
            self._begun = True
            return found

        if len(arguments) > 1:
            return (arguments[0], called, *arguments[2:]), named
        return arguments, {**named, "closure": called}

    def _end(self, *_: object) -> None:
        self._begun = True
        stepped = (p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None)
        first = next(stepped, None)
        self._used = None if first is None else (first, weakref.ref(first.grad), version_of(first.grad))
        if not self._entered:
            return  # the hooks run twice for an optimizer whose class calls the step of its base class
        self._entered = False
        self._untold += 1
        if self._untold == (IDLE_STEPS if self._counts else UNCOUNTED_STEPS):
            logger.warning(
                "the optimizer that join was given made %d steps in a row without link.step: nothing of them is sent "
                "or stored; call link.step(tokens=…) after each step of the optimizer",
                self._untold,
            )

    def count(self) -> None:
        """Note that the loop says that a step is done; log a warning if the optimizer has made fewer, or more."""
        self._watch_order()
        self._counts = True
        self._made += self._untold
        self._calls += 1
        self._steps += self._begun
        self._stepped_once = self._stepped_once or self._begun
        if self._calls != IDLE_STEPS and (self._stepped_once or self._calls != UNCOUNTED_STEPS):
            return
        few, many = self._steps < STEPPED * IDLE_STEPS, STEPPED * self._made > self._calls
        if few and not self._few:
            logger.warning(
                "%d of %d calls of link.step came after a step of the optimizer that was handed to join: call "
                "link.step once after each optimizer.step(), not for each micro-batch, or hand join the optimizer that "
                "steps%s",
                self._steps, self._calls, "" if self._stepped_once else "; until then, a restart lacks its moments",
            )  # fmt: skip
        if many and not self._many:
            logger.warning(
                "the optimizer that was handed to join made %d steps in %d calls of link.step: call link.step once "
                "after each optimizer.step(), or the steps of this learner are counted too low",
                self._made, self._calls,
            )  # fmt: skip
        self._few, self._many = few, many
        if self._calls == IDLE_STEPS:
            self._calls = self._steps = self._made = 0

    def _watch_order(self) -> None:
        """Log a warning if the last calls of `link.step` found gradients that the optimizer has not used."""
        parameter, used, version = self._used or (None, None, 0)
        grad = None if parameter is None else parameter.grad
        new = grad is not None and used is not None and (used() is not grad or version != version_of(grad))
        self._disordered = self._disordered + 1 if self._begun and new else 0
        # Gradients that were set to zero are changed, too.
        if self._disordered == DISORDERED and grad is not None and bool(getattr(grad, "_local_tensor", grad).any()):
            logger.warning(
                "link.step is called between the backward pass and optimizer.step(): call it after optimizer.step(); "
                "whenever this loop ends, it is in the middle of a step, and nothing of its end is stored"
            )

    def _watch_changes(self) -> None:
        """Log a warning if something else than the optimizer has changed parameters since the last boundary.

        Swapping an average in and out again is no change, but for rounding.
        """
        if self._witness is None or self._witnessed is None or self._told_changed or self._untold:
            return
        version, before = self._witnessed
        if version_of(self._witness) == version:
            return
        now = _few(self._witness)
        if now.shape != before.shape or torch.allclose(now.cpu().float(), before.cpu().float(), SAME, SAME):
            return
        self._told_changed = True
        logger.warning(
            "parameters were changed between link.step and the optimizer's step (by load_state_dict, for example): the "
            "change counts as work of this learner, and is merged; load weights before join, and evaluate others in a "
            "copy of the model"
        )

    @property
    def uncounted(self) -> int:
        """Steps that the optimizer has made since the last call of `link.step`, or since `join`."""
        return self._untold

    @property
    def never_stepped(self) -> bool:
        """Whether `link.step` was called and the optimizer has made no step."""
        return self._counts and not self._stepped_once

    def described(self) -> str:
        """Return the names of data and other objects as a phrase; it must be the same on every rank of a learner."""
        return f"with {', '.join(sorted(self._objects)) or 'no data or other state'}"

    def close(self) -> None:
        """Remove the hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()

    # --- at a boundary ------------------------------------------------------------------------------------------------

    def mark(self, now: Callable[[], float]) -> None:
        """Note a step boundary, and the state that the next step changes before it ends."""
        self._begun, self._untold = False, 0
        self._seen = self._look()
        self.see_parameters()
        self._groups = _settings_of(self.optimizer)
        self._watch_rates()
        self._noted, failed, self._failed = None, self._failed, ""
        began = now()
        if began >= self._note_after:
            try:
                self._noted = self._note()
            except Exception as error:
                self._failed = f"the loop's state for a restart could not be noted: {error!r}"
                if self._failed != failed:  # the same failure is not logged at each step
                    logger.warning("%s", self._failed)
            took = now() - began
            self._note_after = began if took <= NOTE_S else began + took / NOTE_SHARE

    def see_parameters(self) -> None:
        """Note the present parameters: every change of them until now was made by the optimizer or the link."""
        if self._witness is not None and not self._told_changed:
            self._witnessed = version_of(self._witness), _few(self._witness).clone()

    def _watch_rates(self) -> None:
        rates = [group.get("lr") for group in self._groups]
        known = [rate for rate in rates if not _is_elsewhere(rate)]
        self._idle = self._idle + 1 if known and all(rate == 0 for rate in known) else 0
        if self._idle == IDLE_STEPS:
            logger.warning(
                "the learning rate has been 0 for %d steps: nothing is learnt, and rounds go on; check whether its "
                "schedule has ended, and whether it was restored with the optimizer (join's state=)",
                self._idle,
            )

    def _note(self) -> _Noted:
        buffers = {name: held[key] for name, (held, key) in self._buffers.items() if held.get(key) is not None}
        if sum(b.nbytes for b in buffers.values()) > NOTED_BYTES:
            buffers = {}
        return _Noted(self._own(), {name: b.detach().clone() for name, b in buffers.items()})

    def _look(self) -> list[tuple[torch.Tensor | None, int]]:
        tensors = [held.get(key) for held, key in self._places]
        return [(t, 0 if t is None else version_of(t)) for t in tensors]

    def _own(self) -> dict[str, Any]:
        objects = {name: tree.copied(one.state_dict()) for name, one in self._objects.items()}
        return {"objects": objects, "extra": tree.copied(self.local.extra())}

    def moved(self, orderly: bool) -> str | None:
        """Return why the loop's state can no longer be saved as it was at the boundary, or None; see `Saver.moved`.

        A change that torch does not count (by `tensor.data`, outside the optimizer's step) is not detected.
        """
        if self._untold > 1:
            return f"the optimizer made {self._untold} steps {WITHOUT_STEP}"
        if self._begun:
            return "an optimizer step has begun"
        if self._failed:
            return self._failed
        if not orderly and self._noted is None and (self._objects or self.local.extra()):
            return "the place in the data, or other state, has not been noted, which takes too long for each step"
        noted = {} if self._noted is None else self._noted.buffers
        names = {id(t): name for name, t in (*torch_model.named(self.model), *local_tensors(self.model).items())}
        for (was, before), (now, after) in zip(self._seen, self._look(), strict=True):
            if now is was and before == after:
                continue
            name = names.get(id(now), "a tensor of the model")
            if name not in noted:
                return f"{name} has changed"
        return None

    def require_same(self) -> None:
        """Raise `InputError` if the model or the optimizer holds other parameters than at `join`.

        `join` settled which parameters are merged. A parameter that was frozen since then is allowed, and still merged.
        """
        # In a sharded model, whole parameters temporarily replace the shards, so use the parameters found at `join`.
        now = self._joined if self._sharded else dict(torch_model.named(self.model))
        for name in sorted(now.keys() | self._joined.keys()):
            what = None
            if name not in self._joined:
                what = "has come into the model"
            elif name not in now:
                what = "has gone from the model"
            elif now[name] is not self._joined[name]:
                what = "was replaced by another tensor, which is not the one that versions are written to"
            elif now[name].requires_grad and name not in self._trained:
                what = "is trained now and was frozen"
            if what is not None:
                raise InputError(f"since join, parameter {name} {what}: {_ANEW}")
        known = {id(p): name for name, p in self._joined.items()}
        stepped = [[known.get(id(p), "") for p in group["params"]] for group in self.optimizer.param_groups]
        if stepped == self._stepped:
            return
        before, after = ({name for group in of for name in group} for of in (self._stepped, stepped))
        if "" in after:
            raise InputError(f"since join, the optimizer was given a tensor that is no parameter of the model: {_ANEW}")
        for names, what in ((after - before, "was added to"), (before - after, "was taken out of")):
            if names:
                raise InputError(f"since join, parameter {min(names)} {what} the optimizer: {_ANEW}")
        raise InputError(f"since join, the optimizer's parameters were grouped anew: {_ANEW}")

    # --- out ----------------------------------------------------------------------------------------------------------

    @override
    def save(self) -> LoopState:
        optimizer = self.optimizer_state(wrapped=self._unwraps is not False)
        if self._unwraps is None and optimizers.has_wrapped(optimizer):
            self._unwraps = self._can_unwrap()
            if not self._unwraps:
                optimizer = self.optimizer_state(wrapped=False)
        local = {name: torch_model.copy_of(tensor) for name, tensor in self.changed().items()}
        return LoopState(optimizer, local, (self.own(),))

    @override
    def take(self, node: object) -> Leaf | None:
        return torch_model.take_tensor(node)

    def optimizer_state(self, *, wrapped: bool = True, **given: Any) -> dict[str, Any]:
        """Return a copy of the optimizer's state, with its groups' settings as they were at the boundary.

        See `optimizers.state_of`.
        """
        state = given.pop("state", None) or self.optimizer.state_dict()
        if len(state["param_groups"]) == len(self._groups):
            both = zip(state["param_groups"], self._groups, strict=True)
            state = {**state, "param_groups": [{**group, **settings} for group, settings in both]}
        return optimizers.state_of(self.model, self.optimizer, wrapped=wrapped, state=state, **given)

    def changed(self) -> dict[str, torch.Tensor]:
        """Return the local tensors that a checkpoint must hold, as they were at the boundary if that was noted."""
        noted = {} if self._noted is None else self._noted.buffers
        return {name: noted.get(name, tensor) for name, tensor in self.local.changed().items()}

    def own(self) -> dict[str, Any] | None:
        """Return the state that only this process has: its objects' state and the modules' extra state, or None.

        It is that of the boundary if it was noted there; otherwise it is read now.
        """
        own = self._own() if self._noted is None else self._noted.objects
        return own if any(own.values()) else None

    def _can_unwrap(self) -> bool:
        """Return whether a restart will be able to rebuild the tensor subclasses in the optimizer's state.

        This is checked before a checkpoint with such tensors is written.
        """
        try:
            Stepped(self.optimizer)
        except (MemoryError, torch.OutOfMemoryError):
            return True  # a restart has no state yet, so there is more room
        except Exception as error:
            logger.warning("no copy of the optimizer can step, so its tensor subclasses cannot be kept: %r", error)
            return False
        return True

    # --- and back -----------------------------------------------------------------------------------------------------

    def go_on(
        self,
        own: Mapping[str, Any],
        local: Mapping[str, Any],
        settings: Hyperparameters = Hyperparameters.RESTORED,
    ) -> None:
        """Restore data, other objects and local state. Raises `InputError` if an object cannot load its state.

        With `PASSED`, of a schedule of learning rates only its place is restored, see `settle_rates`.
        """
        extra = own.get("extra", {})
        self.local.load(local, extra)
        states = own.get("objects", {})
        for name, one in self._objects.items():
            if name not in states:
                logger.warning("the checkpoint holds nothing of %s: it starts anew", name)
                continue
            plan = _plan_of(one)
            if settings is Hyperparameters.PASSED and (place := _place_of(one, states[name])) is not None:
                self._made_anew.append((name, one, place))
                continue
            try:
                one.load_state_dict(states[name])
            except Exception as error:
                raise InputError(
                    f"{name}, {an(type(one).__qualname__)}, cannot go on from the learner's checkpoint: {error!r}; "
                    "leave it out of join to start it anew"
                ) from error
            differ = [
                f"{key} {now} and not {plan[key]}" for key, now in _plan_of(one).items() if now != plan.get(key, now)
            ]
            if differ:
                logger.warning(
                    "%s goes on with the settings of its checkpoint: %s; to use those that it was made with, join with "
                    "hyperparameters='passed'",
                    name, ", ".join(differ[:3]),
                )  # fmt: skip
        for name in states.keys() - self._objects.keys():
            logger.warning(
                "the checkpoint holds the state of %s, which was not handed to join: the next checkpoint will not have "
                "it; if it is needed, end this process by SIGKILL before that, and hand it to join",
                name,
            )

    def settle_rates(self) -> None:
        """Advance the schedules that were made anew to the place of the checkpoint, and with them the learning rates.

        To be called once the optimizer's state is loaded, too. Raises `InputError` for a schedule that ends before.
        """
        for name, schedule, place in self._made_anew:
            try:
                catch_up(schedule, place)
            except ValueError as error:
                raise InputError(
                    f"{name}, {an(type(schedule).__qualname__)}, does not reach the learner's step: {error}; make it "
                    "for as many steps as the learner is to take in all"
                ) from error
        self._made_anew.clear()


def catch_up(schedule: Any, steps: int) -> None:
    """Advance a schedule by this many steps, for a restart without its saved state.

    The learning rates are first set back to those that the schedule began with, because a checkpoint may have replaced
    them.
    """
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns because no optimizer step comes between the schedule's steps
        for _ in range(steps):
            schedule.step()


COUNTED = {"last_epoch", "base_lrs", "best", "num_bad_epochs", "cooldown_counter", "last_lr", "T_cur", "T_i"}
"""Of a schedule's state, what changes from step to step, or is compared as the optimizer's setting."""


def _plan_of(one: object) -> dict[str, Any]:
    """Return the settings of a schedule of learning rates, by name; nothing for another object."""
    if not isinstance(one, torch.optim.lr_scheduler.LRScheduler):
        return {}
    state = one.state_dict()
    return {
        key: value
        for key, value in state.items()
        if not key.startswith("_") and key not in COUNTED and isinstance(value, int | float | str | tuple | list)
    }


def _place_of(one: object, state: Any) -> int | None:
    """Return how many steps a schedule had taken, by its saved state; None for other objects, and one that watches a
    metric, whose state is more than a place."""
    watches = isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if not isinstance(one, torch.optim.lr_scheduler.LRScheduler) or watches:
        return None
    while "last_epoch" not in state:
        state = state["_schedulers"][0]
    return int(state["last_epoch"])


_ANEW = (
    "change model and optimizer first, and join then (link.close(), the change, isthmus.join again under this name); "
    "where other parameters are to be merged that is another run: isthmus export, then isthmus init NEW --from the file"
)


def _few(parameter: torch.Tensor) -> torch.Tensor:
    local = getattr(parameter, "_local_tensor", parameter).detach()
    return local.flatten()[:FEW] if local.is_contiguous() else local[:1]


def _places_of(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return the dict and key under which modules keep each parameter and each buffer of the model's `state_dict()`."""
    found: list[tuple[dict[str, Any], str]] = []
    for module in model.modules():
        found += [(module._parameters, key) for key in module._parameters]
        found += [(module._buffers, key) for key in module._buffers if key not in module._non_persistent_buffers_set]
    return found


def _buffers_of(model: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the dict and key under which modules keep each buffer of the model's `state_dict()`, by buffer name."""
    return {
        torch_model.plain_name(f"{prefix}.{key}" if prefix else key): (module._buffers, key)
        for prefix, module in model.named_modules()
        for key in module._buffers
        if key not in module._non_persistent_buffers_set
    }


def _is_elsewhere(rate: Any) -> bool:
    """Return whether a learning rate is missing, or on a device, so that reading it would wait for the device."""
    return rate is None or (isinstance(rate, torch.Tensor) and rate.device.type != "cpu")


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return copies of the settings of the optimizer's groups."""

    def copied(value: Any) -> Any:
        return value if value is None or isinstance(value, bool | int | float | str) else tree.copied(value)

    return [{k: copied(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
