"""One run of the lab: everything that determines its outcome, and the outcome. Plain data without torch."""

import hashlib
from typing import Annotated, Any, Literal

import msgspec

from isthmus.format.rules import Adoption, Count, Fraction, Pace, Rules

Positive = Annotated[float, msgspec.Meta(gt=0.0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]
Moments = Literal["own", "peer", "mean", "fresh"]

WINDOW_TOKENS = 128
"""Tokens of one window; a learner's step takes one window, unless its batch is larger."""

TOKEN_S = 70e-6
"""Seconds of one core for a token of a run: 9.0 ms for a step of each of eight learners (`parity`, a Xeon of 2023)."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The byte GPT at lab size."""

    width: Count = 96
    layers: Count = 2
    heads: Count = 3
    experts: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Feed-forward nets per block; each token takes the one with the highest probability; 0: one dense net."""


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """Learners that fail and come back. Failures are a Poisson process; repair times have a Weibull distribution."""

    every_s: Positive
    """Mean virtual seconds of training between two failures of one learner."""
    repair_s: Positive = 20.0
    """Mean virtual seconds until a new process runs on the machine. It then reads its checkpoint and the newest version
    over its link."""
    moments: Moments = "own"
    """Moments with which the inner optimizer continues: those of its `own` checkpoint, those of a `peer` (under a new
    name), the `mean` of all peers' moments, or `fresh` ones."""
    checkpoint_s: Positive = 30.0
    """Virtual seconds between two checkpoints."""


class Guests(msgspec.Struct, frozen=True, kw_only=True):
    """Learners that take part for only a part of the run."""

    count: Count
    come: Fraction
    """Share of the run that is done when the guests join."""
    go: Fraction
    """Share of the run that is done when the guests leave."""


class Wires(msgspec.Struct, frozen=True, kw_only=True):
    """Network between a learner and the store and bus."""

    latency_s: NotNegative = 0.02
    spread: NotNegative = 0.2
    gbit_s: Positive | None = None
    """Bandwidth of each learner in each direction, in Gbit/s; None: transfers take no time beyond the latency."""
    parameters: Positive | None = None
    """Parameters of the model that the lab's model represents: payloads on the wires are scaled by the ratio."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One run, except its seed."""

    name: str
    """Name in a table; it has no effect on the run."""
    method: Literal["decoupled", "data-parallel"] = "decoupled"
    """`decoupled`: learners and a syncer; `data-parallel`: one model, all learners' batches in every step."""
    learners: Count = 4
    steps: Count = 1500
    """Steps per learner from which the token budget follows (see `budget`)."""
    until: Literal["tokens", "time"] = "tokens"
    """What ends the run: the `tokens` of the budget, or the `time` in which the fastest learner takes all its steps."""
    batch: Count = 1
    """Windows in a learner's step."""
    step_s: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)] = (1.0,)
    """Mean duration of a step in virtual seconds, by learner; the last entry applies to all further learners."""
    noise: NotNegative = 0.0
    """Standard deviation of a step's duration, as a share of its mean."""
    inner: Literal["adamw", "muon"] = "adamw"
    """The inner optimizer: `adamw`, or `muon` for the matrices inside the blocks and AdamW for the rest."""
    peak_lr: Positive = 3e-3
    warmup: Count = 100
    rules: Rules = Rules()
    pace: Pace = Pace(heartbeat_s=5.0, silence_s=15.0)
    adopt: Adoption = Adoption.OVERWRITE
    reset_moments: bool = False
    """Whether the inner optimizer forgets the moments of a fragment whenever the learner adopts a version of it."""
    shape: Shape = Shape()
    adapters: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Rank of the adapters that are trained instead of the model, which is first trained on code and then frozen; all
    texts are prose then. 0: the model itself is trained, on code."""
    failures: Failures | None = None
    guests: Guests | None = None
    wires: Wires = Wires()
    thin: Wires | None = None
    """Network of the last learner; None: the same `wires` as the others."""
    variant: str = ""
    """Arithmetic that replaces the library's: a name in `isthmus_lab.training.variants`; empty: none."""
    own_merge: str = ""
    """A function MODULE:FUNCTION that merges in place of `rules.merge` (`isthmus.inspect.own_merge`); empty: none."""

    @property
    def budget(self) -> int:
        """Tokens of the whole run."""
        return self.learners * self.steps * self.batch * WINDOW_TOKENS

    @property
    def core_s(self) -> float:
        """Seconds of one core that a run takes, about. Other shapes are scaled by their matrices (not measured)."""
        usual = Shape()
        return TOKEN_S * self.budget * (self.shape.width / usual.width) ** 2 * self.shape.layers / usual.layers

    def key(self, seed: int, made_by: str = "") -> str:
        """Return the name under which a row of this setting is kept: 20 hex digits.

        `made_by`: what else decides the row, such as the code that computes it.
        """
        plain = msgspec.to_builtins(self) | {"name": "", "seed": seed, "made_by": made_by}
        return hashlib.sha256(msgspec.json.encode(plain, order="deterministic")).hexdigest()[:20]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one run."""

    setting: str
    learners: int
    H: int
    K: int
    seed: int
    tokens: int
    """Tokens processed by all learners, including those that were lost or trained again."""
    val_loss: float
    """Held-out loss of the global model, nats per byte."""
    goodput: float
    """Share of the learners' time in steps that no failure took back (`working_time.goodput`)."""
    uptime: float
    """Share of the time in which at least one learner had a process, which may still read its checkpoint."""
    participation: float
    """Mean share of the expected learners whose updates are in a commit; 1 for data parallel."""
    up_bits_per_param: float
    """Payload of an update in bits per parameter of its fragment."""
    down_bits_per_param: float
    """Payload of a value in bits per parameter of its fragment."""
    wall_virtual_s: float
    kept: float = 1.0
    """Share of the processed tokens that a commit holds."""
    extra: dict[str, float] = {}
    """Measures that only some experiments have."""

    def measured(self, what: str) -> float | None:
        """Return a field, or one of the extra measures; None if this run did not measure it."""
        return self.extra.get(what) if what not in self.__struct_fields__ else float(getattr(self, what))

    def plain(self) -> dict[str, Any]:
        """Return the row as plain data for a report."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]
