"""A newcomer takes another learner's optimizer state only if it fits its own optimizer and moves a model sanely.

The run of one veteran, merged by a syncer that has left, is copied for each test. In the copy the veteran comes back,
spoils its optimizer state and leaves a checkpoint of it.
"""

import copy
import logging
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isthmus
from isthmus.format.rules import Pace, Rules
from isthmus_services.processes import isthmus_command

pytestmark = pytest.mark.tier("test")

PACE = Pace(heartbeat_s=0.2, silence_s=0.8)
WARMUP = 10

Entries = dict[str, Any]
"""An optimizer's state of one parameter."""

Spoil = Callable[[Entries], object]
Kind = Callable[..., torch.optim.Optimizer]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class Learner:
    """A training loop on noise."""

    joined_with: list[Entries]

    def __init__(self, folder: Path, name: str, kind: Kind = torch.optim.AdamW, **options: Any) -> None:
        self.model = net()
        self.optimizer = kind(self.model.parameters(), lr=options.pop("lr", 1e-2))
        self.link = isthmus.join(
            str(folder), self.model, self.optimizer, learner=name, warmup_steps=WARMUP, pace=PACE, **options
        )

    def steps(self, count: int) -> "Learner":
        for _ in range(count):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(self.link.steps_done))
            self.model(x).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.link.step(tokens=10, loss=1.0)
        return self

    def state(self) -> list[Entries]:
        """Return the optimizer's state, in the order of the parameters."""
        return [dict(self.optimizer.state[p]) for p in self.model.parameters()]

    def leave(self) -> "Learner":
        self.link.close()
        return self

    def sane(self) -> bool:
        return all(bool((p.abs() < 10.0).all()) for p in self.model.parameters())


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run in progress, with a checkpoint of a learner whose updates were merged."""
    place = tmp_path_factory.mktemp("donors")
    veteran = Learner(place / "run", "veteran", create=Rules(fragments=2, sync_every=4))
    with open(place / "s.log", "wb") as log:
        syncer = subprocess.Popen(isthmus_command("syncer", str(place / "run")), stdout=log, stderr=log)
    try:
        end = time.monotonic() + 240
        while not all(veteran.link.versions):
            assert time.monotonic() < end, (place / "s.log").read_text()
            veteran.steps(1)
            time.sleep(0.02)
        veteran.leave()
    finally:
        syncer.terminate()
        syncer.wait(60)
    return place / "run"


@pytest.fixture
def run(merged: Path, tmp_path: Path) -> Path:
    return shutil.copytree(merged, tmp_path / "run")


def spoiled(run: Path, spoil: Spoil, kind: Kind = torch.optim.AdamW) -> Learner:
    """Let the veteran come back, spoil its optimizer's state and leave a checkpoint of it."""
    veteran = Learner(run, "veteran", kind).steps(3)
    for entries in veteran.optimizer.state.values():
        spoil(entries)
    return veteran.leave()


def a_newcomer(run: Path, kind: Kind = torch.optim.AdamW, **options: Any) -> Learner:
    """Join as a newcomer, train three steps and leave."""
    newcomer = Learner(run, "newcomer", kind, **options)
    newcomer.joined_with = copy.deepcopy(newcomer.state())
    return newcomer.steps(3).leave()


@pytest.fixture(autouse=True)
def _said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "isthmus")


def test_honest_moments_are_taken(run: Path) -> None:
    veteran = Learner(run, "veteran").steps(3).leave()
    newcomer = Learner(run, "newcomer", lr=5e-3)
    assert newcomer.link.moments == "peer"
    for mine, theirs in zip(newcomer.state(), veteran.state(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert newcomer.optimizer.param_groups[0]["lr"] == 5e-3, "moments come from the peer, settings do not"
    newcomer.leave()


def test_they_are_taken_at_the_foot_of_a_schedule_too(run: Path) -> None:
    Learner(run, "veteran").steps(3).leave()
    assert a_newcomer(run, lr=0.0).link.moments == "peer"


SPOILED: dict[str, tuple[Spoil, str]] = {
    "negative second moments": (lambda e: e["exp_avg_sq"].fill_(-1.0), "exp_avg_sq is below 0 somewhere"),
    "one negative second moment": (lambda e: e["exp_avg_sq"].view(-1)[0].fill_(-1e-30), "exp_avg_sq is below 0"),
    "a count before the first": (lambda e: e["step"].fill_(-1.0), "step is below 0"),
    "a missing entry": (lambda e: e.pop("exp_avg"), "holds step, exp_avg_sq; here it would be step, exp_avg, exp_avg_sq"),
    "an entry too many": (lambda e: e.update(more=torch.zeros(1)), "exp_avg_sq, more; here it would be"),
    "a number for a tensor": (lambda e: e.update(step=3), "step is an int, here it would be a tensor"),
    "another dtype": (lambda e: e.update(exp_avg=e["exp_avg"].double()), "is a torch.float64 of shape"),
    "float8": (lambda e: e.update(exp_avg=e["exp_avg"].to(torch.float8_e4m3fn)), "is a torch.float8_e4m3fn of shape"),
    "another shape": (lambda e: e.update(exp_avg=e["exp_avg"][:1]), "here it would be a torch.float32 of shape"),
    "nested": (lambda e: e.update(exp_avg=[e["exp_avg"]]), "exp_avg is a list, here it would be a tensor"),
    "huge first moments": (
        lambda e: (e["exp_avg"].fill_(1e30), e["exp_avg_sq"].zero_()),
        "its moments alone move 0.weight by",
    ),
    "moments a thousandfold": (lambda e: e["exp_avg_sq"].mul_(1e-6), "its moments alone move"),
    "nothing": (lambda e: e.clear(), "holds nothing; here it would be step, exp_avg, exp_avg_sq"),
    "not finite": (lambda e: e["exp_avg"].fill_(float("inf")), "exp_avg is not finite"),
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILED)
def test_spoiled_moments_are_not(how: str, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    spoil, why = SPOILED[how]
    spoiled(run, spoil)
    newcomer = a_newcomer(run)
    assert newcomer.link.moments == "fresh"
    assert newcomer.link.rate < 1.0, "the learning rate warms up"
    assert newcomer.sane()
    assert why in caplog.text


class Kept(torch.optim.Optimizer):
    """Signed descent whose state of each parameter is what `keep` returns."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    def keep(self, p: torch.Tensor) -> Entries:
        return {}

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if p not in self.state:
                        self.state[p] = self.keep(p)
                    p.sub_(group["lr"] * p.grad.sign())


class EightBit(Kept):
    """Moments as bitsandbytes stores them: bytes, a scale per block, and a codebook that all parameters share."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.book = torch.linspace(-1.0, 1.0, 256)

    def keep(self, p: torch.Tensor) -> Entries:
        codes = torch.full(p.shape, 200, dtype=torch.uint8)
        return {"step": 1, "state1": codes, "absmax1": torch.ones(-(-p.numel() // 8)), "qmap1": self.book}


class Float8(Kept):
    """Moments in float8 with a scale in float32."""

    def keep(self, p: torch.Tensor) -> Entries:
        assert p.grad is not None
        return {"m": p.grad.to(torch.float8_e4m3fn), "v": p.grad.square().to(torch.float8_e5m2), "scale": torch.ones(1)}


class Nested(Kept):
    """A list with a preconditioner for each dimension, and a dict with a few settings."""

    def keep(self, p: torch.Tensor) -> Entries:
        return {"left": [torch.eye(n) for n in p.shape], "how": {"mode": "full", "rank": 3, "since": (0, None)}}


class NeedsClosure(Kept):
    """An optimizer whose step needs a closure that returns the loss."""

    def step(self, closure: object) -> None:  # type: ignore[override]
        super().step()


class TrainedWithClosure(NeedsClosure):
    """The training loop can step without a closure; a copy of the optimizer cannot, and its step fails."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        vars(self)["step"] = lambda: NeedsClosure.step(self, None)


KINDS = [EightBit, Float8, Nested]


@pytest.mark.parametrize("kind", KINDS)
def test_any_optimizers_moments_are_taken_bit_for_bit(kind: Kind, run: Path) -> None:
    veteran = spoiled(run, lambda entries: None, kind)
    newcomer = a_newcomer(run, kind)
    assert newcomer.link.moments == "peer"
    assert alike(newcomer.joined_with, veteran.state())


@pytest.mark.parametrize("kind", [*KINDS, torch.optim.AdamW])
def test_and_a_learner_goes_on_with_its_own(kind: Kind, run: Path) -> None:
    before = spoiled(run, lambda entries: None, kind)
    after = Learner(run, "veteran", kind)
    assert after.link.moments == "own"
    assert alike(after.state(), before.state())
    after.steps(2).leave()


def test_ones_own_state_is_taken_even_where_no_donors_would_be(run: Path) -> None:
    """The digest proves that the state is the learner's own, so its content is not judged."""

    def odd(entries: Entries) -> None:
        entries["exp_avg"].neg_().mul_(3.0)
        entries["scratch"] = torch.zeros(3).to(torch.float8_e4m3fn)

    before = spoiled(run, odd)
    after = Learner(run, "veteran")
    assert after.link.moments == "own"
    assert alike(after.state(), before.state())
    after.steps(2).leave()


@pytest.mark.parametrize(
    ("kind", "spoil", "why"),
    [
        (EightBit, lambda e: e["absmax1"].neg_(), "absmax1 is below 0 somewhere"),
        (EightBit, lambda e: e.update(qmap1=torch.ones(999)), "here it would be a torch.float32 of shape (256,)"),
        (Float8, lambda e: e.update(v=(-e["v"].float() - 1).to(torch.float8_e5m2)), "v is below 0 somewhere"),
        (Float8, lambda e: e.update(m=(e["m"].float() * float("nan")).to(e["m"].dtype)), "m is not finite"),
        (Nested, lambda e: e["left"].append(torch.eye(2)), "left is not a list of"),
        (Nested, lambda e: e["left"].__setitem__(0, torch.eye(9)), "left, 0 is a torch.float32 of shape (9, 9)"),
        (Nested, lambda e: e["how"].update(mode=3), "how, mode is an int, here it would be a str"),
        (Nested, lambda e: e["how"].update(rank=-3), "how, rank is -3, where it is never below 0 here"),
    ],
)
def test_theirs_are_judged_entry_by_entry_too(
    kind: Kind, spoil: Spoil, why: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoiled(run, spoil, kind)
    assert a_newcomer(run, kind).link.moments == "fresh"
    assert why in caplog.text


def test_where_no_copy_can_step_no_donor_is_used_and_the_log_says_why(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoiled(run, lambda entries: None, TrainedWithClosure)
    newcomer = a_newcomer(run, TrainedWithClosure)
    assert newcomer.link.moments == "fresh"
    assert "no other learner's moments are used: no copy of this optimizer can step" in caplog.text
    assert "missing 1 required positional argument: 'closure'" in caplog.text


def test_a_stranger_of_whom_the_log_merged_nothing_is_not_asked(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    veteran = Learner(run, "veteran").steps(3).leave()
    Learner(run, "stranger").steps(5).leave()  # the stranger's checkpoint is newer, but no syncer merges its work
    newcomer = a_newcomer(run)
    assert newcomer.link.moments == "peer"
    assert alike(newcomer.joined_with, veteran.state())
    assert "stranger/" not in caplog.text, "the stranger's checkpoint is not even read"
    shutil.rmtree(run / "learners" / "veteran")
    shutil.rmtree(run / "learners" / "newcomer")
    assert a_newcomer(run).link.moments == "fresh", "the stranger is no donor even if no other learner is there"


def alike(a: Any, b: Any) -> bool:
    """Return whether two trees hold the same values, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    return type(a) is type(b) and bool(a == b)
