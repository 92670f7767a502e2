"""A rehearsal shows, before training begins, what an optimizer does after a restart and after an adoption."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from isthmus.errors import InputError
from isthmus.format.layout import partition
from isthmus.torch import model as torch_model
from isthmus.torch import rehearsal
from isthmus.torch.rehearsal import rehearse
from isthmus.torch.weight_copies import Copies
from support.restarts import OPTIMIZERS, Masters

pytestmark = [
    pytest.mark.usefixtures("uncompiled"), pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]  # fmt: skip


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


COPIES = {"masters": {("master",)}, "schedule-free": {("z",)}}


@pytest.mark.parametrize("name", [*OPTIMIZERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizers_pass_and_their_copies_are_found(name: str, dtype: torch.dtype) -> None:
    model = net(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    before, random = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    assert rehearse(optimizer).paths == COPIES.get(name, set())
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert not any(optimizer.state.values())
    assert torch.equal(random, torch.get_rng_state())


def test_no_gpu_is_seeded_that_holds_no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds of GPUs wait until CUDA starts: there, the last one would replace the program's own."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    optimizer = torch.optim.AdamW(net().parameters())
    assert seeds == [0], "`torch.manual_seed` does not seed GPUs by this function any more"
    rehearse(optimizer)
    assert seeds == [0]


class Lookahead(torch.optim.SGD):
    """Uses its slow weights only at every fifth step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if group["steps"] % 5 == 0:
                    slow.add_(p - slow, alpha=0.5)
                    p.copy_(slow)


def test_a_copy_that_is_seldom_looked_at_is_found() -> None:
    assert rehearse(Lookahead(net().parameters(), lr=0.1)).paths == {("slow",)}


class Hidden(torch.optim.SGD):
    """Keeps its own copy of the weights outside its state. The copy starts from the model's, also after a restart."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        own = self.__dict__.setdefault("own", {})
        for group in self.param_groups:
            for p in group["params"]:
                mine = own.setdefault(p, p.detach().clone())
                mine.add_(p.grad, alpha=-group["lr"])
                p.copy_(mine)


class Counts(torch.optim.SGD):
    """Takes ever longer steps, by a count that is not in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count = getattr(self, "count", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * self.count)


class Elsewhere(torch.optim.SGD):
    """Like ZeroRedundancyOptimizer, it does not have its state on this rank."""

    def state_dict(self) -> Any:
        raise RuntimeError("Optimizer state has not been consolidated on this rank")


class Odd(torch.optim.SGD):
    """Has a complex number in its state, which no checkpoint can keep."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["odd"] = 2j


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Hidden, "Hidden keeps a hidden second copy of the weights"),
        (Counts, "Counts takes another step after a restart than without one"),
        (Elsewhere, "Elsewhere cannot be read on each process .*not been consolidated"),
        (Odd, r"Odd cannot be brought back after a restart: .*\['odd'\] is a builtins.complex"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused_by_name(kind: type[torch.optim.SGD], why: str) -> None:
    with pytest.raises(InputError, match=why):
        rehearse(kind(net().parameters(), lr=0.1))


class Divides(torch.optim.SGD):
    """Divides by the length of the step before, which is 0 at first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad / 0.0)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "why"),
    [
        (torch.optim.AdamW, torch.float16, r"AdamW makes NaN or .* \(\d+, \d+\) and torch.float16 .* give it eps=1e-4 or more"),
        (torch.optim.Adam, torch.float16, "Adam makes NaN or infinities"),
        (Divides, torch.float32, "Divides makes NaN or .*torch.float32 in its first steps: see its learning rate"),
    ],
)  # fmt: skip
def test_an_optimizer_that_makes_nan_is_not_said_to_keep_a_copy(optimizer: Any, dtype: torch.dtype, why: str) -> None:
    with pytest.raises(InputError, match=why):
        rehearse(optimizer(net().to(dtype).parameters(), lr=1e-3))


def test_adamw_on_float16_with_a_larger_eps_is_no_trouble() -> None:
    assert not rehearse(torch.optim.AdamW(net().half().parameters(), lr=1e-3, eps=1e-4)).paths


class Unwilling(torch.optim.SGD):
    """Cannot step as it is called, as if it needed another argument."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("tell me more")


def test_an_optimizer_that_takes_no_trial_step_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert not rehearse(Unwilling(net().parameters(), lr=0.1)).paths
    assert "no copy of tests.unit.test_rehearsal.Unwilling can take a step" in caplog.text


# --- copies follow ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda p: Masters(p, lr=1e-3), OPTIMIZERS["schedule-free"], lambda p: Lookahead(p, lr=1e-3)]
)
def test_what_is_adopted_stays(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = net(torch.bfloat16 if make is not OPTIMIZERS["schedule-free"] else torch.float32)
    optimizer = make(model.parameters())
    copies = rehearse(optimizer)
    layout = partition(torch_model.specs_of(model), 2)

    def step() -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-3)
        optimizer.step()

    step()
    replica = torch_model.TorchReplica(model, layout, copies.move_along)
    for p, fragment in enumerate(layout.fragments):
        replica.write(p, torch.full((fragment.size,), 3.0 + p).numpy())
    for _ in range(12):
        step()
    for p, fragment in enumerate(layout.fragments):
        found = torch.empty(fragment.size).numpy()
        replica.read(p, found)
        assert abs(found - (3.0 + p)).max() < 0.1


def test_without_copies_nothing_is_looked_at() -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    with Copies(optimizer).move_along([(None, None)]):
        pass


def test_copies_of_another_learner_become_this_ones_weights() -> None:
    model = net()
    optimizer = Masters(model.parameters(), lr=0.1)
    for p in model.parameters():
        optimizer.state[p]["master"] = torch.zeros_like(p)
    Copies(optimizer, frozenset({("master",)})).become(list(model.parameters()))
    assert all(torch.equal(optimizer.state[p]["master"], p) for p in model.parameters())


def test_rehearsals_at_once_leave_the_log_as_it_was() -> None:
    """Two rehearsals in different threads overlap, and the one that began first ends first."""
    before = logging.root.manager.disable
    first, second = rehearsal._quiet(), rehearsal._quiet()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert logging.root.manager.disable == logging.WARNING, "the second rehearsal is still under way"
    second.__exit__(None, None, None)
    assert logging.root.manager.disable == before
