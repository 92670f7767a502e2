"""Training loops that are cut short and resume are compared with the same loop that never stops, without Isthmus.

At the end these must be equal bit for bit: `model.state_dict()`, the optimizer's state, the schedule, the random
numbers, the order of the data, and the tokens. Cases are models × optimizers × ways to end × numbers of incarnations.
"""

import copy
import itertools
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import isthmus
from isthmus.format.rules import Pace, Rules
from isthmus.learner import Boundary, checkpoint
from isthmus.store import files
from isthmus.torch import loop

STEPS, TOKENS = 16, 7
RULES, PACE = Rules(fragments=2, sync_every=1000), Pace(heartbeat_s=0.2, silence_s=0.4)


# --- models -----------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Two layers with dropout, which draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out

    def after(self) -> None:
        """Do what a loop does between the optimizer's step and `link.step`."""


class Normed(Plain):
    """A model with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


class Teacher(Plain):
    """A model with a copy of itself that follows it, as in MoCo, BYOL and DINO.

    The copy is changed through `tensor.data`, which does not increase torch's version counters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)

    def after(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


class Experts(Plain):
    """A model with experts, a bias without gradient that balances them, and a queue as a buffer."""

    queue: torch.Tensor
    at: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.load = torch.zeros(3)
        self.router, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("queue", torch.zeros(600, 4))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x)
        chosen = (scores + self.bias).argmax(1)
        self.load = F.one_hot(chosen, 3).float().mean(0)
        every = torch.stack([expert(x) for expert in self.experts], 1)
        weight = scores.softmax(1)[torch.arange(len(x)), chosen]
        chosen_ones: torch.Tensor = every[torch.arange(len(x)), chosen] * weight[:, None]
        return chosen_ones + super().forward(x)

    def after(self) -> None:
        with torch.no_grad():
            self.bias.add_(0.1 * (1 / 3 - self.load).sign())
            at = int(self.at)
            self.queue[at : at + 4] += 1.0
            self.at += 4


class Convolutions(Plain):
    """A model in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 6, 2, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 2), nn.Flatten(),
            nn.LazyLinear(4),
        )  # fmt: skip
        self.body(torch.zeros(2, 8))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Tied(Plain):
    """A model with one tensor at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Linear(8, 4))
        self.body[2].weight = self.body[0].weight


class Adapted(Plain):
    """A frozen base with a trained part of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 4, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.up(self.down(x))
        return super().forward(x) + added


class Quantised(Adapted):
    """An adapted model with its base in eight bits."""

    def __init__(self) -> None:
        super().__init__()
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(self.body, Int8WeightOnlyConfig())


class Remembers(Plain):
    """A model with a module whose state is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counts()

    def after(self) -> None:
        self.seen.counts.append(len(self.seen.counts))


class Counts(nn.Module):
    """A module that keeps a list."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def get_extra_state(self) -> Any:
        return {"counts": self.counts}

    def set_extra_state(self, state: Any) -> None:
        self.counts = list(state["counts"])


MODELS: dict[str, Callable[[], Plain]] = {
    "plain": Plain,
    "normed": Normed,
    "teacher": Teacher,
    "experts": Experts,
    "convolutions": Convolutions,
    "tied": Tied,
    "adapted": Adapted,
    "quantised": Quantised,
    "remembers": Remembers,
    "bf16": lambda: Plain().bfloat16(),
}


# --- optimizers -------------------------------------------------------------------------------------------------------


class Masters(torch.optim.SGD):
    """Steps a float32 copy of each parameter, and rounds it into the parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    master = self.state[p].setdefault("master", p.detach().float().clone())
                    master.add_(p.grad.float(), alpha=-float(group["lr"]))
                    p.copy_(master)


def _eight_bits(parameters: Any) -> torch.optim.Optimizer:
    import bitsandbytes

    made: torch.optim.Optimizer = bitsandbytes.optim.AdamW(parameters, lr=1e-2, optim_bits=8, min_8bit_size=16)
    return made


def _eight_bits_of_torchao(parameters: Any) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    made: torch.optim.Optimizer = AdamW8bit(parameters, lr=1e-2, block_size=16)
    return made


def _schedule_free(parameters: Any) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    made: torch.optim.Optimizer = AdamWScheduleFree(parameters, lr=1e-2, warmup_steps=3)
    made.train()  # type: ignore[attr-defined]
    return made


def _muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "masters": lambda p: Masters(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=1e-1, max_iter=2, history_size=3),
    "muon": _muon,
    "8 bits": _eight_bits,
    "8 bits of torchao": _eight_bits_of_torchao,
    "schedule-free": _schedule_free,
}


IMPOSSIBLE = {
    ("convolutions", "lbfgs"): "torch's LBFGS takes no gradients in channels_last",
    ("convolutions", "8 bits"): "bitsandbytes lays such weights out anew at its first step, and convolutions round so",
}


# --- the loop ---------------------------------------------------------------------------------------------------------


class Data:
    """Numbered batches in a shuffled order. At its end a loop has read one batch more than it trained on."""

    def __init__(self) -> None:
        self.order = np.random.default_rng(5).permutation(1000).tolist()
        self.at = 0

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        while True:
            number = self.order[self.at]
            self.at += 1
            yield number, torch.randn(6, 8, generator=torch.Generator().manual_seed(number))

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at = state["order"], state["at"]


class Cut(Exception):
    """Ends an incarnation."""


ENDS = ("return", "forward", "backward", "in the step", "after the step", "interrupted", "in link.step", "slow store")
WELL = ("return", "slow store")
"""With these ends an incarnation takes its last step and leaves in order."""

SLOW_S = 0.2
"""The time that each write takes while a learner leaves a slow store."""


@dataclass
class Life:
    """One incarnation of a training loop."""

    model: Plain
    optimizer: torch.optim.Optimizer
    schedule: Any
    data: Data
    first: int = 0
    batches: list[int] = field(default_factory=list)
    tokens: int = 0
    random: dict[str, Any] = field(default_factory=dict)
    """The state of the generators when it ended."""

    def state(self) -> dict[str, Any]:
        """Return the state for `join`, besides model, optimizer and data."""
        more = {} if self.schedule is None else {"schedule": self.schedule}
        return {"random": isthmus.RandomState(), **more}

    def step(self, x: torch.Tensor, cut: str | None) -> None:
        """Take an optimizer step, or end in the middle of the step."""
        x = x.to(next(self.model.parameters()).dtype)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            out = self.model(x)
            if cut == "forward":
                raise Cut
            if cut == "interrupted":
                signal.raise_signal(signal.SIGINT)
            if cut == "backward":
                out.register_hook(_raises)
            loss = torch.mean((out - x[:, :4].cumsum(1)) ** 2)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        if cut == "in the step":
            self.optimizer.register_step_pre_hook(_half_of_it)
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)  # type: ignore[no-untyped-call]
        else:
            closure()
            self.optimizer.step()
        self.optimizer.zero_grad()
        if cut == "after the step":
            raise Cut
        if self.schedule is not None:
            self.schedule.step()
        self.model.after()


_WRITE = files.FileStore._write


def _slowly(self: Any, *given: Any) -> bool:
    time.sleep(SLOW_S)
    return _WRITE(self, *given)


def _raises(*_: object) -> None:
    raise Cut


def _half_of_it(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Change some of the parameters and raise, like an optimizer that runs out of memory."""
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"][:1]:
            p.add_(1.0)
    raise Cut


def build(model: str, optimizer: str) -> Life:
    """Create model, optimizer, schedule and data anew, like a process that starts."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(11)
    net = MODELS[model]()
    made = OPTIMIZERS[optimizer]([p for p in net.parameters() if p.requires_grad])
    schedule = None
    if optimizer != "schedule-free":
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, T_max=2 * STEPS)
    torch.manual_seed(12)
    return Life(net, made, schedule, Data())


def uninterrupted(model: str, optimizer: str) -> Life:
    """Train without Isthmus."""
    life = build(model, optimizer)
    for number, x in itertools.islice(life.data, STEPS):
        life.step(x, None)
        life.batches.append(number)
        life.tokens += TOKENS
    life.random = isthmus.RandomState().state_dict()
    return life


def live(
    folder: Path, model: str, optimizer: str, until: int, end: str, trace: "Trace | None" = None, **joining: Any
) -> Life:
    """Run one incarnation of a learner, and end it as `end` says. After two steps a checkpoint is stored.

    `until`: the last step, counted over all incarnations. `trace`: raise at a line of the last step.
    """
    life = build(model, optimizer)
    try:
        # With a large NOTE_S each boundary is noted, however busy the machine is, so the result does not depend on it.
        with ExitStack() as leaving, patch.object(loop, "NOTE_S", 60.0), patch.object(
            checkpoint, "APART_BYTES", 64
        ), isthmus.join(
            str(folder), life.model, life.optimizer, learner="a", create=RULES, pace=PACE, data=life.data,
            state=life.state(), **joining,
        ) as link:  # fmt: skip
            _train(life, link, until, end, trace)
            if end == "slow store":
                leaving.enter_context(patch.object(files.FileStore, "_write", _slowly))
    except (Cut, KeyboardInterrupt):
        assert end not in WELL
        torch.set_grad_enabled(True)  # the line that raised may be the end of a `with torch.no_grad()`
    life.random = isthmus.RandomState().state_dict()
    return life


def _train(life: Life, link: isthmus.Link, until: int, end: str, trace: "Trace | None" = None) -> None:
    life.first, life.tokens = link.steps_done, link.tokens_seen
    batches = iter(life.data)
    while True:
        last = link.steps_done + 1 >= until and end not in WELL
        with trace if trace is not None and last else nullcontext():
            number, x = next(batches)
            if link.steps_done >= until:
                break  # this batch is read, but not trained on
            life.step(x, end if last and end in ENDS else None)
            if last and end == "in link.step":
                boundary_of(link)._move = _raises  # type: ignore[method-assign,assignment]
            life.batches.append(number)
            link.step(tokens=TOKENS)
            life.tokens = link.tokens_seen
        if link.steps_done == life.first + 2:
            store(link)


class Trace:
    """Counts the lines of the loop and of the library that a block runs, and raises at line number `at`."""

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, 0

    def __enter__(self) -> None:
        self._before = sys.gettrace()  # the trace function of coverage.py, if it records
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        return self._line if name == __file__ or any(part in name for part in TRACED) else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                sys.settrace(None)
                raise Cut
        return self._line


TRACED = ("isthmus/link/link.py", "isthmus/learner/boundary.py", "isthmus/torch/loop.py", "isthmus/torch/model.py")
"""The files of the library that a learner's step runs in the training thread."""


def boundary_of(link: isthmus.Link) -> Boundary:
    """Return the step boundary of the leading rank."""
    boundary = link._side.agent("boundary").boundary
    assert boundary is not None, "joined"
    return boundary


def store(link: isthmus.Link) -> None:
    """Take a checkpoint at this step boundary, and wait until it is stored."""
    boundary_of(link).freeze()
    wait_until_stored(link)


def wait_until_stored(link: isthmus.Link) -> None:
    """Wait until the checkpoint of this step boundary is in the store."""
    end = time.monotonic() + 60
    while link._side.agent("stored_step").stored_step != link.steps_done:
        assert time.monotonic() < end, "no checkpoint was stored"
        time.sleep(0.005)


def restarted(folder: Path, model: str, optimizer: str, end: str, lives: int) -> Life:
    """Train over this many incarnations; return the last, with all batches that are in its weights."""
    batches: list[int] = []
    for n in range(1, lives + 1):
        life = live(folder, model, optimizer, STEPS * n // lives, "return" if n == lives else end)
        batches = batches[: life.first] + life.batches
    life.batches = batches
    return life


# --- the judge --------------------------------------------------------------------------------------------------------


def differences(found: Life, wanted: Life) -> list[str]:
    """Return where the end of an incarnation differs from the loop that was never cut short."""
    pairs: list[tuple[str, Any, Any]] = [
        ("model", found.model.state_dict(), wanted.model.state_dict()),
        ("optimizer", found.optimizer.state_dict(), wanted.optimizer.state_dict()),
        ("random", found.random, wanted.random),
        ("batches", found.batches, wanted.batches),
        ("tokens", found.tokens, wanted.tokens),
    ]
    if found.schedule is not None:
        pairs.append(("schedule", found.schedule.state_dict(), wanted.schedule.state_dict()))
    return [where for name, a, b in pairs for where in _differ(a, b, name)]


def _differ(a: Any, b: Any, path: str) -> Iterator[str]:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if hasattr(a, "dequantize") and type(a) is not torch.Tensor and not isinstance(a, nn.Parameter):
            a, b = a.dequantize(), b.dequantize()
        if a.dtype != b.dtype or a.stride() != b.stride() or not torch.equal(a, b):
            yield f"{path}: {tuple(a.shape)} {a.dtype} {a.stride()}, not {b.stride()}, or other values"
    elif isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in a:
            yield from _differ(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differ(x, y, f"{path}[{i}]")
    elif isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if not np.array_equal(a, b):
            yield path
    elif type(a) is not type(b) or a != b:
        yield f"{path}: {a!r}, not {b!r}"


if __name__ == "__main__":
    # Arguments: FOLDER MODEL OPTIMIZER UNTIL. This is for tests that need a separate process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    where, what, how, stop = sys.argv[1:]
    quickly = store

    def store(link: isthmus.Link) -> None:
        """Print that a checkpoint is stored, and go on slowly."""
        quickly(link)
        print("stored", link.steps_done, flush=True)
        own = link.step

        def slowly(*given: Any, **named: Any) -> None:
            own(*given, **named)
            time.sleep(0.1)

        link.step = slowly  # type: ignore[method-assign]

    live(Path(where), what, how, int(stop), "return")
