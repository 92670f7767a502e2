"""A checkpoint saves what a training loop holds besides merged parameters, all as of one step boundary."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import isthmus
from isthmus.errors import InputError
from isthmus.format.rules import Hyperparameters
from isthmus.link.follower_rank import Follower
from isthmus.torch import loop as loops
from isthmus.torch import optimizers
from isthmus.torch.loop import IDLE_STEPS, Loop, catch_up
from isthmus.torch.moments import choose
from isthmus.torch.optimizers import state_of
from isthmus.torch.unmerged_state import LocalState, local_tensors


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("large", torch.zeros(3000))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.body(x))
        return out


class Place:
    """A position in the data."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Clock:
    def __init__(self, takes_s: float = 0.0) -> None:
        self.now, self.takes_s = 0.0, takes_s

    def __call__(self) -> float:
        self.now += self.takes_s
        return self.now


def made(**given: Any) -> tuple[Net, torch.optim.Optimizer, Loop]:
    model = Net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return model, optimizer, Loop(model, optimizer, **given)


def step(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(6, 4)).pow(2).mean().backward()
    optimizer.step()


# --- state that changes -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch's compiler
def test_local_tensors_are_those_of_the_state_dict_that_are_not_merged() -> None:
    model = Net()
    merged = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(local_tensors(model)) == set(model.state_dict()) - merged
    compiled: Any = torch.compile(model)
    assert set(local_tensors(compiled)) == set(local_tensors(model))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("teacher.weight", lambda m: m.teacher.weight.data.mul_(0.5)),
        ("teacher.weight", lambda m: setattr(m.teacher.weight, "data", m.teacher.weight + 1)),
        ("large", lambda m: m.large[7:9].add_(1)),
        ("large", lambda m: m.large.data.add_(1)),
        ("large", lambda m: setattr(m, "large", torch.ones(3000))),
        ("large", lambda m: m.large.fill_(math.nan)),
        ("norm.num_batches_tracked", lambda m: m.norm.num_batches_tracked.data.add_(1)),
        ("norm.running_mean", lambda m: m.norm.running_mean.data[3:].add_(1e-6)),
    ],
)
def test_what_has_changed_is_kept_from_then_on(name: str, change: Callable[[Net], object]) -> None:
    model = Net()
    state = LocalState(model)
    assert state.changed() == {}
    with torch.no_grad():
        change(model)
    assert set(state.changed()) == {name}
    assert set(state.changed()) == {name}


def test_running_statistics_are_kept_after_a_step_in_training() -> None:
    model = Net()
    state = LocalState(model)
    model(torch.randn(6, 4))
    assert set(state.changed()) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_what_is_not_here_any_more_is_said(caplog: pytest.LogCaptureFixture) -> None:
    state = LocalState(Net())
    state.load({"gone": torch.zeros(3), "large": torch.zeros(5), "norm.running_mean": torch.full((4,), 7.0)}, {})
    assert "gone as a tensor of shape (3,), and this model has none of that name: it is not restored" in caplog.text
    assert "large as a tensor of shape (5,), and here it is one of shape (3000,)" in caplog.text
    assert set(state.changed()) == {"norm.running_mean"}


def test_what_was_frozen_and_is_trained_now_comes_with_the_merged_parameters(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    state = LocalState(model)
    model.teacher.weight.requires_grad_(True)
    state.load({"teacher.weight": torch.zeros_like(model.teacher.weight)}, {})
    assert not caplog.text
    assert state.changed() == {}


def test_parameters_that_something_else_has_changed_are_said(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, loop = made()
    best = {name: value.clone() for name, value in model.state_dict().items()}
    loop.mark(Clock())
    for _ in range(3):
        step(model, optimizer)
        loop.mark(Clock())
    with torch.no_grad():  # an average is swapped in and out again
        for parameter in model.parameters():
            kept = parameter.clone()
            parameter.mul_(3.0)
            parameter.copy_(kept * (1.0 + 1e-6))
    step(model, optimizer)
    loop.mark(Clock())
    assert "were changed" not in caplog.text
    for _ in range(2):
        model.load_state_dict({name: value + 1.0 for name, value in best.items()})
        step(model, optimizer)
        loop.mark(Clock())
    assert caplog.text.count("parameters were changed between link.step and the optimizer's step") == 1, "once"


def test_a_version_that_a_following_rank_adopts_is_no_change_of_something_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its boundary is noted before the leading rank's commands, by which versions are adopted, are carried out."""
    model = Net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    @contextmanager
    def adopts(*_: object) -> Iterator[None]:
        yield
        with torch.no_grad():
            model.body.weight += 1.0

    rank = Follower.__new__(Follower)
    vars(rank).update(_sharded=SimpleNamespace(call=adopts), _step=0, _tokens_seen=0, loop=Loop(model, optimizer))
    for _ in range(3):
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
        rank.step(4, None)
    assert (rank.steps_done, rank.tokens_seen) == (3, 12)
    assert "parameters were changed" not in caplog.text
    with torch.no_grad():
        model.body.weight += 1.0
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    assert "parameters were changed" in caplog.text, "it is still looked for"


# --- one boundary -----------------------------------------------------------------------------------------------------


def test_what_is_saved_is_of_the_boundary_whatever_came_after() -> None:
    place = Place()
    model, optimizer, loop = made(data=place, state={"random": isthmus.RandomState()})
    step(model, optimizer)
    place.at = 1
    loop.mark(Clock())
    mean, random = model.norm.running_mean.clone(), torch.get_rng_state()  # type: ignore[union-attr]
    place.at = 2
    optimizer.param_groups[0]["lr"] = 0.05
    model(torch.randn(6, 4))
    assert loop.moved(orderly=False) is None
    saved: Any = loop.save()
    assert saved.ranks[0]["objects"]["data"] == {"at": 1}
    assert torch.equal(saved.ranks[0]["objects"]["state['random']"]["torch"], random)
    assert torch.equal(saved.local["norm.running_mean"], mean)
    assert saved.optimizer["state"]["param_groups"][0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("an optimizer step has begun", step),
        ("body.weight has changed", lambda m, o: m.body.weight.add_(1)),
        ("teacher.bias has changed", lambda m, o: m.teacher.bias.add_(1)),
        ("body.weight has changed", lambda m, o: setattr(m.body, "weight", nn.Parameter(torch.zeros(4, 4)))),
    ],
)
def test_a_step_that_has_begun_is_known(what: str, change: Callable[[Net, Any], object]) -> None:
    model, optimizer, loop = made()
    loop.mark(Clock())
    with torch.set_grad_enabled(what.startswith("an")):
        change(model, optimizer)
    for orderly in (True, False):
        assert what.split()[-2] in str(loop.moved(orderly))
    loop.mark(Clock())
    assert loop.moved(orderly=False) is None


class Takes(torch.optim.SGD):
    """An optimizer that keeps its argument `closure` in `given`, and calls it only if `calls` is set."""

    given: Any = None

    def step(self, closure: Any = None) -> Any:
        self.given = closure
        return super().step(closure if callable(closure) and closure.__name__ == "called" and self.calls else None)

    calls = True


def test_a_step_with_a_closure_begins_with_its_gradients() -> None:
    model = Net()
    optimizer = Takes([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loop = Loop(model, optimizer)
    loop.mark(Clock())

    def fails() -> float:
        raise ValueError("no gradients")

    with pytest.raises(ValueError, match="no gradients"):
        optimizer.step(fails)
    assert loop.moved(orderly=False) is None, "nothing was changed yet"
    optimizer.step(lambda: 1.0)
    assert loop.uncounted == 1, "its class calls the step of its base class, and torch runs the hooks of both"
    assert loop.moved(orderly=False) == "an optimizer step has begun"
    loop.mark(Clock())
    optimizer.calls = False
    optimizer.step(closure=lambda: 1.0)
    assert loop.moved(orderly=False) == "an optimizer step has begun", (
        "even if the optimizer has not called the closure"
    )
    loss = torch.ones(())
    optimizer.step(loss)
    assert optimizer.given is loss, "an argument that is no closure is passed on unchanged"


def test_a_step_that_fails_after_its_gradients_has_begun() -> None:
    """It is not known what the step has changed by then."""

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            raise ValueError("no room")

    model = Net()
    optimizer = Fails([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loop = Loop(model, optimizer)
    loop.mark(Clock())
    with pytest.raises(ValueError, match="no room"):
        optimizer.step(lambda: 1.0)
    assert loop.moved(orderly=False) == "an optimizer step has begun"


def test_large_buffers_are_not_noted_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "NOTED_BYTES", 1000)
    model, _, loop = made()
    loop.mark(Clock())
    model(torch.randn(6, 4))
    assert loop.moved(orderly=True) == "norm.num_batches_tracked has changed"


@pytest.mark.parametrize(("takes_s", "noted"), [(1e-4, 100), (5e-3, 3), (5e-2, 2)])
def test_noting_takes_a_small_share_of_the_time(takes_s: float, noted: int) -> None:
    """Each of a hundred steps takes 10 ms and a look at the clock: 1.5 s and 6 s in all if noting is slow."""
    place, clock = Place(), Clock()
    _, _, loop = made(data=place)
    found = 0
    for _ in range(100):
        clock.takes_s = takes_s
        loop.mark(clock)
        found += loop.moved(orderly=False) is None
        assert loop.moved(orderly=True) is None, "between two steps the state can still be read"
        clock.takes_s = 0.01
        clock()
    assert found == noted


class Broken(Place):
    def state_dict(self) -> dict[str, Any]:
        if self.at:
            raise OSError("the shard is gone")
        return super().state_dict()


def test_where_noting_fails_nothing_is_stored(caplog: pytest.LogCaptureFixture) -> None:
    place = Broken()
    _, _, loop = made(data=place)
    place.at = 1
    loop.mark(Clock())
    assert "the shard is gone" in caplog.text
    assert "the shard is gone" in str(loop.moved(orderly=True))


def test_what_is_no_state_is_refused_at_once() -> None:
    with pytest.raises(InputError, match=r"state\['x'\] is an object, without state_dict"):
        made(state={"x": object()})
    with pytest.raises(
        InputError, match=r"data is a list, without state_dict .*: leave data= out .*StatefulDataLoader"
    ):
        made(data=[])
    odd = Place()
    odd.at = 2j  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"state\['x'\]\['at'\] is a builtins.complex"):
        made(state={"x": odd})


def test_the_optimizer_is_left_as_it_was() -> None:
    _, optimizer, loop = made()
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    loop.close()
    assert not optimizer._optimizer_step_pre_hooks


# --- a model that changes after join ----------------------------------------------------------------------------------


def _unfreeze(model: Net, _: Any) -> None:
    model.teacher.requires_grad_(True)


def _replace(model: Net, _: Any) -> None:
    model.body = nn.Linear(4, 4)


def _grow(model: Net, _: Any) -> None:
    model.more = nn.Linear(1, 1)


def _shrink(model: Net, _: Any) -> None:
    del model.teacher


def _add(model: Net, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def _add_own(model: Net, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [model.teacher.weight]})


def _take_out(model: Net, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].pop()


def _regroup(model: Net, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].reverse()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_unfreeze, "parameter teacher.bias is trained now and was frozen"),
        (_replace, "parameter body.bias was replaced by another tensor"),
        (_grow, "parameter more.bias has come into the model"),
        (_shrink, "parameter teacher.bias has gone from the model"),
        (_add, "the optimizer was given a tensor that is no parameter of the model"),
        (_add_own, "parameter teacher.weight was added to the optimizer"),
        (_take_out, "parameter norm.bias was taken out of the optimizer"),
        (_regroup, "the optimizer's parameters were grouped anew"),
    ],
)
def test_other_parameters_than_at_join_are_refused_by_name(change: Callable[[Net, Any], None], what: str) -> None:
    model, optimizer, loop = made()
    loop.require_same()
    change(model, optimizer)
    with pytest.raises(InputError, match=f"since join, {what}.* join"):
        loop.require_same()


def test_freezing_and_other_rates_are_no_change() -> None:
    model, optimizer, loop = made()
    model.body.requires_grad_(False)
    optimizer.param_groups[0]["lr"] = 1.0
    loop.require_same()


# --- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0.0)])
def test_a_rate_of_zero_is_said_once(zero: Any, caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer, loop = made()
    for rate, steps in ((0.1, 2), (zero, 2 * IDLE_STEPS), (0.1, 1), (zero, IDLE_STEPS - 1)):
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(steps):
            loop.mark(Clock())
    assert caplog.text.count("the learning rate has been 0 for 100 steps") == 1


@pytest.mark.parametrize("settings", list(Hyperparameters))
def test_whose_settings_count_can_be_chosen(settings: Hyperparameters, caplog: pytest.LogCaptureFixture) -> None:
    model, _, _ = made()
    was = torch.optim.AdamW(model.body.parameters(), lr=1e-2, weight_decay=0.5)
    saved = state_of(model, was)
    now = torch.optim.AdamW(model.body.parameters(), lr=1e-4, weight_decay=0.5)
    choose(now, saved, settings)
    rate = saved["state"]["param_groups"][0]["lr"]
    assert rate == (1e-2 if settings is Hyperparameters.RESTORED else 1e-4)
    said = "lr 0.01 and not 0.0001 in group 0; to use those"
    assert (said in caplog.text) == (settings is Hyperparameters.RESTORED)
    assert "weight_decay" not in caplog.text
    assert "schedule" not in caplog.text, "it has none"


@pytest.mark.parametrize("settings", list(Hyperparameters))
def test_a_schedule_decides_over_rates_that_are_passed(
    settings: Hyperparameters, caplog: pytest.LogCaptureFixture
) -> None:
    model, _, _ = made()
    was, now = (torch.optim.AdamW(model.body.parameters(), lr=rate) for rate in (1e-2, 1e-4))
    for optimizer in (was, now):
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5)
    choose(now, state_of(model, was), settings)
    assert ("lr 0.01 and not 0.0001 in group 0" in caplog.text) == (settings is Hyperparameters.RESTORED)
    caplog.clear()
    choose(was, state_of(model, was), settings)
    assert not caplog.text, "nothing differs"


def test_a_momentum_that_a_schedule_cycles_is_no_other_setting(caplog: pytest.LogCaptureFixture) -> None:
    model, _, _ = made()
    was, now = (torch.optim.AdamW(model.body.parameters(), lr=1e-2) for _ in range(2))
    schedule, _ = (torch.optim.lr_scheduler.OneCycleLR(one, 1e-2, total_steps=20) for one in (was, now))
    for _ in range(8):
        was.step()
        schedule.step()
    choose(now, state_of(model, was), Hyperparameters.RESTORED)
    assert not caplog.text


def test_a_schedule_that_was_made_otherwise_is_named(caplog: pytest.LogCaptureFixture) -> None:
    saved: dict[str, Any] = {}
    for number, length in enumerate((200, 200, 400)):
        caplog.clear()
        model = made()[0]
        optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)
        loop = Loop(model, optimizer, state={"schedule": schedule})
        if number:
            loop.go_on(saved, {})
        for _ in range(5):
            optimizer.step()
            schedule.step()
        loop.mark(Clock())
        saved = loop.own() or {}
        told = "state['schedule'] goes on with the settings of its checkpoint: T_max 200 and not 400; to use those"
        assert (told in caplog.text) == (length == 400)
        assert not (length == 200 and "goes on with" in caplog.text)


def test_a_schedule_in_between_is_no_other_rate(caplog: pytest.LogCaptureFixture) -> None:
    model, _, _ = made()
    was = torch.optim.SGD(model.body.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(was, 0.5)
    was.step()
    schedule.step()
    choose(torch.optim.SGD(model.body.parameters(), lr=1e-2), state_of(model, was), Hyperparameters.RESTORED)
    assert not caplog.text


S = torch.optim.lr_scheduler
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda o: S.ExponentialLR(o, 0.99),
    "cosine": lambda o: S.CosineAnnealingLR(o, 200),
    "steps": lambda o: S.StepLR(o, 25, 0.5),
    "linear": lambda o: S.LinearLR(o, 0.5, 0.1, 200),
    "lambda": lambda o: S.LambdaLR(o, lambda n: 0.99**n),
    "warm-up": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, 1.0, 10), S.CosineAnnealingLR(o, 200)], [10]),
}


@pytest.mark.parametrize("name", [*SCHEDULES])
def test_no_schedule_advances_twice(name: str) -> None:
    """A checkpoint has brought back the rate of step 100 before a fresh schedule catches up."""

    def fresh() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        return optimizer, SCHEDULES[name](optimizer)

    straight, schedule = fresh()
    for _ in range(100):
        straight.step()
        schedule.step()
    again, late = fresh()
    again.load_state_dict(straight.state_dict())
    catch_up(late, 100)
    assert again.param_groups[0]["lr"] == pytest.approx(straight.param_groups[0]["lr"], rel=1e-9)


def rates(optimizer: Any, schedule: Any, loop: Loop, steps: int) -> list[float]:
    """Return the learning rates of these many further steps."""
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
        loop.mark(Clock())
    return found


def restore(optimizer: Any, loop: Loop, own: dict[str, Any], saved: dict[str, Any], settings: Hyperparameters) -> None:
    """Restore a new loop from what a checkpoint has of the loop and of the optimizer."""
    choose(optimizer, saved, settings)
    optimizers.load(optimizer, saved, settings=True)
    loop.go_on(own, {}, settings)
    loop.settle_rates()


MORE = {
    "one cycle": lambda o: S.OneCycleLR(o, o.param_groups[0]["lr"], total_steps=200, cycle_momentum=False),
    "cycles": lambda o: S.CyclicLR(o, o.param_groups[0]["lr"] / 10, o.param_groups[0]["lr"], 7, cycle_momentum=False),
    "chained": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.1, 80), S.ExponentialLR(o, 0.99)]),
    "restarts": lambda o: S.CosineAnnealingWarmRestarts(o, 33),
}


@pytest.mark.parametrize("name", [*SCHEDULES, *MORE])
@pytest.mark.parametrize("settings", list(Hyperparameters))
def test_a_schedule_goes_on_at_its_place_with_the_rate_that_is_asked_for(name: str, settings: Hyperparameters) -> None:
    """Its own rate, or, if that is passed, the one that it was made with anew; and so in the start after that."""

    def made_with(rate: float) -> tuple[Any, Any, Loop]:
        model = made()[0]
        optimizer = torch.optim.SGD(model.body.parameters(), lr=rate)
        schedule = (SCHEDULES | MORE)[name](optimizer)
        return optimizer, schedule, Loop(model, optimizer, state={"schedule": schedule})

    passed = settings is Hyperparameters.PASSED
    straight = rates(*made_with(0.01 if passed else 0.1), 160)
    optimizer, schedule, loop = made_with(0.1)
    rates(optimizer, schedule, loop, 40)
    for start in (40, 100):  # the first restart asks for another rate, and the second one for the same
        own, saved = loop.own() or {}, state_of(loop.model, optimizer)
        optimizer, schedule, loop = made_with(0.01)
        restore(optimizer, loop, own, saved, settings)
        assert rates(optimizer, schedule, loop, 60) == pytest.approx(straight[start : start + 60], rel=1e-6)


LONGER: dict[str, Callable[[Any, int], Any]] = {
    "cosine": S.CosineAnnealingLR,
    "one cycle": lambda o, steps: S.OneCycleLR(o, 0.1, total_steps=steps + 1),
    "warm-up": lambda o, steps: S.SequentialLR(o, [S.LinearLR(o, 0.1, 1.0, 10), S.CosineAnnealingLR(o, steps)], [10]),
}


@pytest.mark.parametrize("name", LONGER)
@pytest.mark.parametrize("done", [40, 100])
def test_a_schedule_that_is_passed_may_be_longer_also_after_its_end(name: str, done: int) -> None:
    def made_for(steps: int) -> tuple[Any, Any, Loop]:
        model = made()[0]
        optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1, momentum=0.9)
        schedule = LONGER[name](optimizer, steps)
        return optimizer, schedule, Loop(model, optimizer, state={"schedule": schedule})

    straight = rates(*made_for(300), 200)
    optimizer, schedule, loop = made_for(100)
    rates(optimizer, schedule, loop, done)
    own, saved = loop.own() or {}, state_of(loop.model, optimizer)
    optimizer, schedule, loop = made_for(300)
    restore(optimizer, loop, own, saved, Hyperparameters.PASSED)
    assert rates(optimizer, schedule, loop, 100) == pytest.approx(straight[done : done + 100], rel=1e-6)


def test_a_schedule_that_ends_before_the_learners_step_is_refused() -> None:
    model = made()[0]
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
    schedule = S.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False)
    loop = Loop(model, optimizer, state={"schedule": schedule})
    loop.go_on({"objects": {"state['schedule']": {"last_epoch": 30}}}, {}, Hyperparameters.PASSED)
    with pytest.raises(
        InputError, match=r"^state\['schedule'\], a OneCycleLR, does not reach the learner's step: .*20"
    ):
        loop.settle_rates()


def test_a_plateau_that_is_passed_keeps_what_it_has_seen() -> None:
    model = made()[0]
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
    was, now = (S.ReduceLROnPlateau(optimizer, patience=5) for _ in range(2))
    for loss in (3.0, 1.0, 2.0):
        was.step(loss)
    loop = Loop(model, optimizer, state={"schedule": now})
    loop.go_on({"objects": {"state['schedule']": was.state_dict()}}, {}, Hyperparameters.PASSED)
    loop.settle_rates()
    assert (now.best, now.num_bad_epochs) == (1.0, 1)


def test_random_numbers_go_on() -> None:
    import random

    import numpy as np

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    state = isthmus.RandomState()
    saved = state.state_dict()
    first = draw()
    assert draw() != first
    state.load_state_dict(saved)
    assert draw() == first


def test_random_numbers_of_devices_go_on_as_far_as_the_devices_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = isthmus.RandomState().state_dict() | {"cuda": ["first", "second"]}
    given: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: given.append((state, device)))
    isthmus.RandomState().load_state_dict(saved)
    assert given == [("first", 0)]
