"""One run of the lab: everything that decides its outcome, and what comes out of it. Plain data without torch."""

import hashlib
from typing import Any

import msgspec

from isthmus.format.rules import Pace, Rules

VERSION = 7
"""Raised whenever the same setting and seed would give other numbers: rows kept by an earlier one are made again."""

WINDOW_TOKENS = 128
"""Tokens of one window; a step of a learner is one window, unless its batch is larger."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The byte GPT at lab size."""

    width: int = 96
    layers: int = 2
    heads: int = 3
    experts: int = 0
    """Feed-forward nets per block, of which each token takes the best one; 0: one dense net."""


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """Learners that fail and come back. Failures are a Poisson process; a repair takes Weibull-distributed time."""

    every_s: float
    """Mean virtual seconds of training between two failures of one learner."""
    repair_s: float = 20.0
    """Mean virtual seconds until a new process has the machine."""
    moments: str = "own"
    """What the inner optimizer goes on with: its `own` checkpoint, a `peer`'s moments (under a new name), the `mean` of
    all peers', or `fresh` ones."""
    checkpoint_s: float = 30.0


class Guests(msgspec.Struct, frozen=True, kw_only=True):
    """Learners that are there for a part of the run."""

    count: int
    come: float
    """Share of the token budget after which they come …"""
    go: float
    """… and after which they are gone again."""


class Wires(msgspec.Struct, frozen=True, kw_only=True):
    """What lies between a learner and store and bus."""

    latency_s: float = 0.02
    spread: float = 0.2
    gbit_s: float | None = None
    """Bandwidth of each learner, up and down each; None: bodies take no time."""
    parameters: float | None = None
    """Parameters of the model this one stands for: payloads on the wires are scaled by the ratio."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One run, but for its seed."""

    name: str
    """What it is called in a table; it decides nothing."""
    method: str = "decoupled"
    """`decoupled`: learners and a syncer; `data-parallel`: one model, all learners' batches in every step."""
    learners: int = 4
    steps: int = 1500
    """Steps of one learner that all learners together need for the whole token budget; sets the budget."""
    until: str = "tokens"
    """What ends it: the `tokens` of the budget, or the `time` in which the fastest learner takes all its steps."""
    batch: int = 1
    """Windows in a learner's step."""
    step_s: tuple[float, ...] = (1.0,)
    """Mean duration of a step in virtual seconds, by learner; the last counts for those that follow."""
    noise: float = 0.0
    """Standard deviation of a step's duration, as a share of its mean."""
    inner: str = "adamw"
    """The inner optimizer: `adamw`, or `muon` for the matrices inside the blocks and AdamW for the rest."""
    peak_lr: float = 3e-3
    warmup: int = 100
    rules: Rules = Rules()
    pace: Pace = Pace(heartbeat_s=5.0, silence_s=15.0)
    adopt: str = "overwrite"
    reset_moments: bool = False
    """Whether the inner optimizer forgets the moments of a fragment whenever a version is adopted."""
    shape: Shape = Shape()
    failures: Failures | None = None
    guests: Guests | None = None
    wires: Wires = Wires()
    thin: Wires | None = None
    """What lies between the last learner and the store, where that is something else."""
    variant: str = ""
    """Arithmetic tried in place of the library's: a name of `isthmus_lab.training.variants`."""

    @property
    def budget(self) -> int:
        """Tokens of the whole run."""
        return self.learners * self.steps * self.batch * WINDOW_TOKENS

    def key(self, seed: int) -> str:
        """Return what a kept row of this setting is called: 20 hex digits."""
        plain = msgspec.to_builtins(self) | {"name": "", "seed": seed, "version": VERSION}
        if not self.variant:
            del plain["variant"]  # rows from before there were any are still good
        return hashlib.sha256(msgspec.json.encode(plain, order="deterministic")).hexdigest()[:20]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one run came to."""

    setting: str
    learners: int
    H: int
    K: int
    seed: int
    tokens: int
    """Processed by all learners, what was lost or trained again included."""
    val_loss: float
    """Held-out loss of the global model, nats per byte."""
    goodput: float
    """Share of the learners' time that went into steps that were not lost again."""
    uptime: float
    """Share of the time in which at least one learner trained."""
    participation: float
    """Learners in a commit, as a share of those expected, in the mean; 1 for data parallel."""
    up_bits_per_param: float
    """Payload of an update, bits per parameter of its fragment."""
    down_bits_per_param: float
    wall_virtual_s: float
    kept: float = 1.0
    """Share of the processed tokens that a commit holds."""
    extra: dict[str, float] = {}
    """What only some experiments measure."""

    def measured(self, what: str) -> float | None:
        """Return a field, or one of the extras; None where this run did not measure it."""
        return self.extra.get(what) if what not in self.__struct_fields__ else float(getattr(self, what))

    def plain(self) -> dict[str, Any]:
        """Return it as a report has it."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]
