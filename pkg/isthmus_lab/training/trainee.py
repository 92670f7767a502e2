"""The model that the lab trains: the byte GPT on the standard library's source, one window or a few per step."""

import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from isthmus.codecs.kernels import F32
from isthmus.demo.gpt import CONTEXT, ByteGPT, held_out_loss, loss_of
from isthmus.demo.text import Corpus, corpus
from isthmus.demo.trainer import CLIP, FINAL_SHARE, WEIGHT_DECAY, optimizer_for
from isthmus.format.layout import Layout
from isthmus.learner import LearnerAgent
from isthmus.learner.boundary import Replica
from isthmus.learner.checkpoint import Checkpoint, Saver
from isthmus.torch import model as torch_model
from isthmus.torch import moments, optimizers
from isthmus.torch.loop import Loop
from isthmus_lab.simulate.world import Trainee
from isthmus_lab.training import adapters
from isthmus_lab.training.experts import BALANCE_WEIGHT, ExpertGPT
from isthmus_lab.training.setting import WINDOW_TOKENS, Setting, Shape

BASE_STEPS, BASE_BATCH = 1500, 8
"""Steps and windows of a step by which a model is trained on code before it gets adapters."""

HELD_OUT_EVERY = 2
"""Every second one of the held-out windows is evaluated: 64 KiB."""

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def build(setting: Setting, seed: int) -> ByteGPT:
    """Return a setting's model, initialised from a seed."""
    shape = setting.shape
    if setting.adapters:
        model = _plain(shape, seed)
        model.load_state_dict(_trained_on_code(shape, seed))
        torch.manual_seed(seed)
        adapters.adapt(model, setting.adapters)
        return model
    return _plain(shape, seed)


def _plain(shape: Shape, seed: int) -> ByteGPT:
    torch.manual_seed(seed)
    if shape.experts:
        return ExpertGPT(shape.width, shape.layers, shape.heads, shape.experts)
    return ByteGPT(shape.width, shape.layers, shape.heads)


@functools.lru_cache(maxsize=4)
def _trained_on_code(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Return the parameters of a model that one process has trained on code, for adapters to be added to."""
    setting = Setting(name="", learners=1, steps=BASE_STEPS, batch=BASE_BATCH, shape=shape)
    model = _plain(shape, seed)
    inner, text = optimizer(setting, model), np.frombuffer(adapters.code().shard(0, 1), np.uint8)
    for number in range(BASE_STEPS):
        batch = windows(text, BASE_BATCH, seed, 0, number)
        train_on(model, inner, batch, rate(setting, number / BASE_STEPS))
    return model.state_dict()


def _corpus(*, prose: bool) -> Corpus:
    return adapters.prose() if prose else corpus()


@functools.lru_cache(maxsize=128)
def shard(index: int, count: int, *, prose: bool = False) -> Bytes:
    """Return the text of one learner's shard as bytes."""
    return np.frombuffer(_corpus(prose=prose).shard(index, count), np.uint8)


@functools.lru_cache(maxsize=2)
def held_out(*, prose: bool = False) -> torch.Tensor:
    """Return the held-out text."""
    return torch.frombuffer(bytearray(_corpus(prose=prose).held_out), dtype=torch.uint8)


def val_loss(model: nn.Module, setting: Setting) -> float:
    """Return the held-out loss in nats per byte, on text of the setting's kind."""
    return held_out_loss(model, held_out(prose=setting.adapters > 0), every=HELD_OUT_EVERY)


def windows(text: Bytes, count: int, *draw: int) -> torch.Tensor:
    """Return windows [count, WINDOW_TOKENS + 1] int64, drawn at random with the numbers `draw` as the seed."""
    starts = np.random.Generator(np.random.PCG64(draw)).integers(0, text.size - CONTEXT - 1, count)
    return torch.from_numpy(np.stack([text[s : s + WINDOW_TOKENS + 1] for s in starts]).astype(np.int64))


def rate(setting: Setting, progress: float) -> float:
    """Return the learning rate after this share of the run: linear warm-up, then a cosine decay to a twentieth."""
    warmup = min(setting.warmup / setting.steps, 0.25)
    if progress < warmup:
        return setting.peak_lr * max(progress, 1.0 / setting.steps) / warmup
    done = min(1.0, (progress - warmup) / (1.0 - warmup))
    return setting.peak_lr * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))


class _Muon(torch.optim.Optimizer):
    """Muon for the matrices inside the blocks, AdamW for everything else, at one learning rate."""

    def __init__(self, model: nn.Module) -> None:
        inside = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
        others = [p for p in model.parameters() if all(p is not q for q in inside)]
        # Muon's steps are scaled to the length of AdamW's, so that AdamW's rates and decay fit (arXiv 2502.16982).
        self._muon = torch.optim.Muon(inside, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True)
        super().__init__([*inside, *others], {"lr": 0.0})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Take one step at the learning rate of the only group."""
        for part in (self._muon, self._adamw):
            part.state = self.state  # Both share the dictionary that a checkpoint stores; loading one replaces it.
            part.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            part.step()  # type: ignore[no-untyped-call]


def optimizer(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    """Return a setting's inner optimizer."""
    return _Muon(model) if setting.inner == "muon" else optimizer_for(model)


def train_on(model: ByteGPT, optimizer: torch.optim.Optimizer, batch: torch.Tensor, lr: float) -> float:
    """Take one optimizer step; return the loss of the batch, in nats per byte."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss = loss_of(model, batch)
    whole = loss
    if isinstance(model, ExpertGPT):
        whole = loss + BALANCE_WEIGHT * sum(choice.balance for choice in model.choices)
    whole.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


class _Forgetful(Replica):
    """A replica that clears the inner optimizer's state of a fragment whenever the fragment is written."""

    def __init__(self, replica: Replica, model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout) -> None:
        named = dict(model.named_parameters())
        self._replica = replica
        self._optimizer = optimizer
        self._parameters = [[named[t.spec.name] for t in f.tensors] for f in layout.fragments]

    @override
    def read(self, fragment: int, out: Any) -> None:
        self._replica.read(fragment, out)

    @override
    def write(self, fragment: int, values: F32) -> None:
        self._replica.write(fragment, values)
        for parameter in self._parameters[fragment]:
            self._optimizer.state.pop(parameter, None)


def _average(optimizer: torch.optim.Optimizer, donors: Sequence[Checkpoint]) -> None:
    """Give an optimizer the mean of several learners' moments and step counts. The first donor is loaded already."""
    for order, donor in enumerate(donors[1:], start=2):
        before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        optimizers.load(optimizer, donor.optimizer(torch_model.make_tensor), settings=False)
        for parameter, state in optimizer.state.items():
            for what, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.lerp_(before[parameter][what], 1.0 - 1.0 / order)


class Trained(Trainee):
    """One process of one learner: a `Trainee` with real gradients."""

    def __init__(
        self,
        setting: Setting,
        seed: int,
        *,
        order: int,
        step_s: float,
        draw: random.Random,
        progress: Callable[[], float],
        enough: Callable[[], bool],
        count: Callable[[int], None],
        donors: Sequence[Checkpoint] = (),
    ) -> None:
        """Build the model and its inner optimizer.

        `progress`: returns the share of the run that is done. `count`: is called with the tokens of every step.
        `donors`: without a checkpoint of its own, the trainee continues with the mean of the donors' moments.
        """
        self.model = build(setting, seed)
        self.optimizer = optimizer(setting, self.model)
        self.idle_experts: list[float] = []
        self._setting = setting
        self._seed = seed
        self._order = order
        self._step_s = step_s
        self._draw = draw
        self._progress = progress
        self._enough = enough
        self._count = count
        self._donors = donors
        self._fresh_at: int | None = None
        self._text = shard(order % setting.learners, setting.learners, prose=setting.adapters > 0)

    @override
    def begin(self, agent: LearnerAgent, layout: Layout) -> tuple[Replica, Saver | None]:
        own = agent.history.checkpoint
        loop = Loop(self.model, self.optimizer)
        origin = moments.restore(loop, own, next(iter(self._donors), None))
        if origin == "peer":
            _average(self.optimizer, self._donors)
        if origin == "fresh" and any(known.version for known in agent.downlink.known):
            self._fresh_at = agent.history.step
        replica = torch_model.TorchReplica(self.model, layout)
        return (
            _Forgetful(replica, self.model, self.optimizer, layout) if self._setting.reset_moments else replica
        ), loop

    @override
    def duration(self) -> float:
        return self._step_s * max(0.2, 1.0 + self._setting.noise * self._draw.gauss(0.0, 1.0))

    @override
    def step(self, number: int) -> tuple[int, float]:
        s = self._setting
        batch = windows(self._text, s.batch, self._seed, self._order, number)
        warm = 1.0 if self._fresh_at is None else moments.warmth(number - self._fresh_at, s.warmup)
        loss = train_on(self.model, self.optimizer, batch, warm * rate(s, self._progress()))
        tokens = s.batch * WINDOW_TOKENS
        self._count(tokens)
        if isinstance(self.model, ExpertGPT) and (number + 1) % s.rules.sync_every == 0:
            for choice in self.model.choices:
                self.idle_experts.append(float((choice.seen == 0).float().mean()))
                choice.seen.zero_()
        return tokens, loss

    @override
    def enough(self, _: LearnerAgent) -> bool:
        return self._enough()
