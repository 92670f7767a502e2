"""The settings of a run. `Rules` are its arithmetic and never change; `Pace` decides waiting and may change later.

The flags of the command line take their help texts and limits from the fields, and most defaults. `Rules.suited`
chooses what depends on the model or on other rules, and a process whose pace is not set takes the run's.
"""

import math
import re
import statistics
import types
import typing
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec

from isthmus.errors import InputError, plainly
from isthmus.format import isotropic
from isthmus.format.layout import Spec, TensorClass

STEPS_MOST = 1 << 20
Count = Annotated[int, msgspec.Meta(ge=1, le=STEPS_MOST)]
FRAGMENTS_MAX = 4096
"""Most fragments of a run, because heartbeats list the version of every fragment."""

BLOCK_MAX = 1 << 20

Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]

LONGEST = 8
"""The longest period, as a multiple of `sync_every`, unless the rules say otherwise."""

LONG = 4.0
"""Periods in a fragment's first round beyond which its work is merged as that of many periods.

The outer optimizer answers an update with twice its length, or more. That suits a period, after which learners
correct it; after fifty it ruined models whose learning rate had fallen meanwhile (docs/design/arithmetic.md).
"""

STALENESS_MAX = 64
"""Largest `Pace.staleness`. An update on an older base can never be merged, so it is settled for good."""


class MergeRule(StrEnum):
    """The rule by which the updates of a round are merged."""

    RDA = "rda"  # Radial-directional averaging: the direction of the mean of unit vectors, at the mean length.
    AVG = "avg"  # The weighted mean.
    TRIMMED = "trimmed"  # RDA of which a minority cannot choose the direction: the trimmed mean, at the median length.
    MEDIAN = "median"  # The same by the geometric median of unit vectors, also at the median length.
    ISO = "iso"  # Isotropic: for matrices the polar factor of the weighted mean, at RDA's length; RDA for the rest.


ROBUST = frozenset({MergeRule.TRIMMED, MergeRule.MEDIAN})
"""Rules under which a minority of a round's updates cannot choose the direction of the merged update.

A round keeps all updates, packed, until it closes.
"""


class MemberRole(StrEnum):
    """The role of a member of a signed run, which decides what it may write."""

    LEARNER = "learner"  # Updates, its claims and checkpoints, its messages.
    SYNCER = "syncer"  # Commits, values, snapshots, its messages.
    COLLECTOR = "collector"  # Segments, and the pointers under the keys of old commits.
    FOLLOWER = "follower"  # Measurements of versions.


class Adoption(StrEnum):
    """The effect of adopting a new version on the work that a learner did meanwhile."""

    OVERWRITE = "overwrite"  # The new version replaces the local work. Work that is not in an update is lost.
    BLEND = "blend"  # The model becomes the mean of the new version and the local work.
    CARRY = "carry"  # The local work is added to the new version.


class FrozenCheck(StrEnum):
    """The check of parameters that are not trained."""

    CHECKED = "checked"  # Their bytes must be those of the run.
    TRUSTED = "trusted"  # Their names must be those of the run.


class Hyperparameters(StrEnum):
    """The source of the learning rate, weight decay and so on of a learner that resumes."""

    RESTORED = "restored"  # The checkpoint.
    PASSED = "passed"  # The optimizer that was made for this start.


class CodecName(StrEnum):
    """The names of the codecs of fixed size. `isthmus.codecs` also has a codec for any rate (`rate_of`)."""

    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


Name = TypeVar("Name", bound=StrEnum)


def named(kind: type[Name], name: str, what: str, more: str = "") -> Name:
    """Return the member of an enum with this name. Raises `InputError`, which lists the members and `more`."""
    try:
        return kind(name)
    except ValueError:
        raise InputError(
            f"unknown {what} {name!r}: choose one of {', '.join((*kind, more) if more else kind)}"
        ) from None


RATE_LEAST, RATE_MOST = 0.5, 4.0
"""Limits of the bits a parameter in the name of a codec, such as q1.5."""

_RATE = re.compile(r"q(\d\.?\d{0,2})")


def rate_of(name: str) -> float | None:
    """Return the bits a parameter in the name of a codec such as q1.5, or None if the name is not that of a rate.

    Raises `InputError` if the rate is out of range or spelt in another way, as in q1.50.
    """
    if (found := _RATE.fullmatch(name)) is None:
        return None
    bits = float(found[1])
    if not RATE_LEAST <= bits <= RATE_MOST or f"q{bits:g}" != name:
        raise InputError(f"codec {name!r}: bits a parameter are from q{RATE_LEAST:g} to q{RATE_MOST:g}, such as q1.5")
    return bits


def require_codec(name: str) -> str:
    """Return the name of a codec. Raises `InputError`, which lists the known names, for any other name."""
    return name if rate_of(name) else named(CodecName, name, "codec", "or bits a parameter, such as q1.5")


def _flag(text: str, value: str | None = None, **limits: Any) -> msgspec.Meta:
    """Return metadata of a field: help text and value name of its flag, and limits (ge, gt, le, lt)."""
    meta: msgspec.Meta = msgspec.Meta(description=text, title=value, **limits)
    return meta


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The arithmetic of a run, fixed when the run is created. Other rules need another run.

    Traffic: a learner sends every fragment once in H steps and fetches it as often, coded by the codecs. A larger H
    sends less, and versions are adopted later. Losses: adoption by `overwrite` drops the steps that were trained while
    a fragment was under way, a larger share the smaller H is. A codec drops what it cannot represent, and error
    feedback adds that to the next update or version.

    The defaults of outer rate and momentum suit the other defaults, RDA at H = 12. `suited` chooses them for others.
    """

    fragments: Annotated[int, _flag("maximum number of fragments of the model", "P", ge=1, le=FRAGMENTS_MAX)] = 12
    """There are fewer if there are fewer pieces of tensors."""
    sync_every: Annotated[Count, _flag("steps between two uploads of the same fragment", "H")] = 12
    """There are more steps if rounds take long (docs/design/rounds.md)."""
    sync_every_max: Annotated[
        int,
        _flag("maximum steps between two uploads if rounds are slow; 0: eight times H", "STEPS", ge=0, le=STEPS_MOST),
    ] = 0
    merge: Annotated[str, _flag("merge rule; embeddings are averaged unless the rule is trimmed or median")] = (
        MergeRule.RDA.value
    )
    """A `MergeRule`, or its name."""
    merge_embeddings: str = MergeRule.AVG.value
    """How embeddings are merged. The paper merges them by plain averaging."""
    iso_block: Annotated[
        int, _flag("longest side of a matrix that iso does not cut into blocks; 0: no limit", "N", ge=0, le=BLOCK_MAX)
    ] = 0
    """Matrices with a longer side are cut into even blocks, each isotropic by itself, because the cost per parameter
    grows with the shorter side."""
    trim: Annotated[
        float, _flag("share of a round's updates that trimmed drops at each end", "SHARE", gt=0.0, lt=0.5)
    ] = 0.25
    """Each coordinate leaves out its own updates: their number is rounded down, but at least one of three or more."""
    outer_lr: Annotated[float, _flag("outer learning rate", gt=0.0, le=10.0)] = 0.4
    outer_momentum: Annotated[float, _flag("outer Nesterov momentum", ge=0.0, lt=1.0)] = 0.8
    codec_up: Annotated[str, _flag("codec of learners' updates")] = CodecName.INT4.value
    codec_down: Annotated[str, _flag("codec of the difference from one version to the next")] = CodecName.INT4.value
    error_feedback: bool = True
    """Whether a learner adds what the codec dropped from its merged updates to a later update."""
    feedback_down: bool = True
    """Whether the syncer keeps what `codec_down` drops and sends it with the next version. If not, it is given up: a
    state then consists of the published value and the momentum."""
    isotropic_up: Annotated[
        bool, _flag("send matrices with equal singular values, which suits coarse codecs but takes longer to compute")
    ] = False
    """Learners send the polar factor of a matrix's difference, at the norm of the difference. This applies to the
    matrices that `merge` = iso would take."""

    @classmethod
    def suited(cls, specs: Sequence[Spec] = (), *, flop_s: float = isotropic.SOUND_FLOP_S, **fields: Any) -> "Rules":
        """Return rules with these fields. The others are chosen to suit the model and the fields that are given.

        If the model's tensors are given and isotropic merges are cheap for them (`isthmus.format.isotropic.suits`), the
        merge rule is Iso, else RDA. `flop_s` is the number of operations a second of a core of the machine that merges,
        as `isthmus.agent.speed.products` measures it. With `isotropic_up`, learners and syncers send in three bits and
        give up what the codec drops. Rate and momentum are those that the lab supports (docs/experiments.md): an
        effective rate outer_lr / (1 − momentum) of 2 for RDA, 3.5 for Avg and 4 for Iso. If another momentum is given,
        the rate is chosen to keep the effective rate. Momentum averages the noise of few learners over several rounds.
        The longer rounds are, the sooner the momentum is out of date.
        """
        if "merge" not in fields:
            cheap = isotropic.suits(specs, max(0, fields.get("iso_block", 0)), flop_s)
            fields["merge"] = (MergeRule.ISO if cheap else MergeRule.RDA).value
        if fields.get("isotropic_up", False):
            fields = SENT_ISOTROPIC | fields
        if fields["merge"] in ROBUST:
            # A minority could move a table of embeddings that is merged by a plain mean.
            fields = {"merge_embeddings": fields["merge"]} | fields
        plain = cls(**fields)
        rate, momentum = outer_for(plain.merge, plain.sync_every)
        given = fields.get("outer_momentum", momentum)
        if given != momentum and 0.0 <= given < 1.0:
            rate = round(rate / (1.0 - momentum) * (1.0 - given), 6)
        return cls(**{"outer_lr": rate, "outer_momentum": momentum} | fields)

    @property
    def periods(self) -> tuple[int, int]:
        """The shortest and the longest period of a fragment, in steps."""
        return self.sync_every, self.sync_every_max or min(LONGEST * self.sync_every, STEPS_MOST)

    def periods_of(self, steps: Iterable[int]) -> float:
        """Return how many periods the median update of a fragment's first round holds; 1 if `LONG` or fewer."""
        held = statistics.median_low(steps) / self.sync_every
        return held if held > LONG else 1.0

    def merge_for(self, role: TensorClass) -> MergeRule:
        """Return the merge rule for a class of tensors."""
        if role == TensorClass.VECTOR and self.merge == MergeRule.ISO:
            return MergeRule.RDA
        return MergeRule(self.merge_embeddings if role == TensorClass.EMBEDDING else self.merge)

    def sends_isotropic(self, role: TensorClass) -> bool:
        """Return whether matrices of a class are sent isotropically."""
        return self.isotropic_up and role == TensorClass.DENSE

    def check(self) -> "Rules":
        """Return self. Raises `InputError` for an unknown name, a number out of range, or fields that conflict."""
        _validate(self)
        for name in (self.merge, self.merge_embeddings):
            named(MergeRule, name, "merge")
        for name in (self.codec_up, self.codec_down):
            require_codec(name)
        if self.merge in ROBUST and self.merge_embeddings not in ROBUST:
            raise InputError(
                f"merge_embeddings {self.merge_embeddings}: with merge {self.merge}, choose trimmed or median here "
                "too; otherwise a minority could steer the merged embeddings (Rules.suited chooses it)"
            )
        if 0 < self.sync_every_max < self.sync_every:
            raise InputError(
                f"sync_every_max {self.sync_every_max} is less than sync_every {self.sync_every}: choose at least as "
                "many, or 0 for eight times as many"
            )
        if self.isotropic_up and self.merge == MergeRule.AVG:
            raise InputError(
                "isotropic_up does not go with merge avg, which would average equal lengths: choose iso or rda"
            )
        return self


SENT_ISOTROPIC = {"codec_up": "q3", "codec_down": "q3", "error_feedback": False, "feedback_down": False}
"""The rules that suit learners that send matrices isotropically.

These are the fewest bits that cost nothing under failures, mixed speeds and late work in the lab (docs/experiments.md,
`bits`), without error feedback. They are not the default, because packing costs more than it gains if learners share
few cores.
"""

LONG_STEPS = 24
"""H above which the settings for long rounds apply. Measured were 12, 24 (at which both settings are alike) and 48."""

_SHORT_ROUNDS = {MergeRule.RDA: (0.4, 0.8), MergeRule.AVG: (0.7, 0.8), MergeRule.ISO: (1.1, 0.7)}
_LONG_ROUNDS = {MergeRule.RDA: (0.6, 0.7), MergeRule.AVG: (1.05, 0.7), MergeRule.ISO: (1.1, 0.7)}


def outer_for(merge: str, sync_every: int) -> tuple[float, float]:
    """Return outer rate and momentum for a merge rule and H. RDA's merged update is up to √M times as long as Avg's."""
    found = _LONG_ROUNDS if sync_every > LONG_STEPS else _SHORT_ROUNDS
    return found[MergeRule(merge)] if merge in found else found[MergeRule.RDA]


EFFECTIVE_MAX = {
    MergeRule.RDA: 3.0,
    MergeRule.TRIMMED: 3.0,
    MergeRule.MEDIAN: 3.0,
    MergeRule.AVG: 6.0,
    MergeRule.ISO: 6.0,
}
"""Effective outer rates above which the lab's losses are clearly worse, at H up to 64."""

MOMENTUM_MAX = 0.9
"""Momentum above which the updates that it remembers are older than the model to which it is applied."""


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When and how long processes wait. The run stores a default; a process may be started with another pace."""

    quorum: Annotated[Count, _flag("learners whose updates a round needs before its grace period starts", "K")] = 1
    """Only learners whose fresh update has arrived count."""
    overlap: Annotated[
        float,
        _flag(
            "steps allowed from the upload of a fragment to the arrival of its new version", "TAU", ge=0.0, le=1024.0
        ),
    ] = 2.0
    """τ: learners miss a fragment that is under way for longer."""
    grace: Annotated[Fraction, _flag("share of the slack that a round spends waiting for more learners", "GAMMA")] = 0.8
    """γ: with 0, a round merges at quorum."""
    staleness: Annotated[int, _flag("maximum age of an update's base, in versions", "N", ge=0, le=STALENESS_MAX)] = 1
    """Updates on older bases are not merged. With 0, all late work is dropped, as in the paper."""
    lead: Annotated[
        float,
        _flag("steps beyond the overlap after which a learner stops and waits for a version (never)",
              "STEPS", ge=0.0, le=1048576.0),
    ] | None = None  # fmt: skip
    """With K = M and a lead of 0 learners train in step, as in synchronous DiLoCo. That is a baseline only: a slow or
    missing learner then holds up the others."""
    snapshot_every: Annotated[int, _flag("versions between two snapshots of the same fragment", "S", ge=1, le=4096)] = 8
    """Snapshots are staggered over fragments."""
    heartbeat_s: Annotated[float, _flag("seconds between two heartbeats of a process", "S", gt=0.0, le=3600.0)] = 1.0
    """Announcements of an unsettled update are this far apart, too."""
    silence_s: Annotated[
        float, _flag("seconds without a message after which rounds stop waiting for a learner", "S", gt=0.0, le=86400.0)
    ] = 3.0
    """The documentation calls it L."""

    def check(self) -> "Pace":
        """Return self. Raises `InputError` for a number out of range or a silence shorter than a heartbeat."""
        _validate(self)
        if self.silence_s <= self.heartbeat_s:
            raise InputError(
                f"silence of {self.silence_s:g} s is not longer than the heartbeat of {self.heartbeat_s:g} s: "
                "every learner would be taken for silent"
            )
        return self


ABSENT_MAX = 1 << 20
Factor = Annotated[float, msgspec.Meta(ge=1.0, le=1e9)]


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits within which a learner's updates and messages count in full (`isthmus.rounds.bounds`).

    They are stored with the run, and each commit records how updates were clipped. Most are factors; 1e9 lets anything
    pass.
    """

    weight: Factor = 2.0
    """k: largest weight of an update, as a multiple of the median of recent updates. A learner beside M − 1 others of
    equal weight has at most k / (k + M − 1) of a round: with k = 2, less than half from three others on."""
    norm: Factor = 4.0
    """c: largest norm of an update per √steps, as a multiple of the median. A longer update is cut to this; one that is
    so many times shorter than the median weighs less."""
    refused: Factor = 100.0
    """Multiple of the median length above which an update is rejected."""
    rate: Factor = 8.0
    """Most tokens per step, as a multiple of the median."""
    jump: Factor = 4.0
    """Most tokens per step, as a multiple of those in the same learner's last merged update."""
    slow: Factor = 16.0
    """Longest duration that is believed of a learner, as a multiple of the learners' median."""
    fast: Factor = 4.0
    """The fastest step is taken to be at least the median step divided by this. Until an update of a learner has
    arrived, this is also its limit in place of `slow`."""
    opening: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.8
    """Shortest time between two rounds of a fragment that one learner opens, as a share of the time of a period. The
    period's steps are the learner's, or the median of all learners if that is longer."""
    absent: Annotated[int, msgspec.Meta(ge=1, le=ABSENT_MAX)] = 3
    """Consecutive rounds of a fragment without an update or a pass of a learner, after which rounds do not wait for the
    learner. Rounds that waited for less than half of the duration of its step do not count. Four times as many are
    needed if an update of the learner, of any fragment, has arrived."""

    def check(self) -> "Bounds":
        """Return self. Raises `InputError` for a number out of range."""
        _validate(self)
        return self


BOUNDS = Bounds()
"""The default bounds."""

# --- defaults of processes --------------------------------------------------------------------------------------------

CHECKPOINT_S = 60.0
"""Seconds between two checkpoints of a learner."""

CHECKPOINTS_KEPT = 2
"""Number of every learner's newest checkpoints that are kept."""

KEPT_VERSIONS = 64
"""Newest versions of every fragment that can still be folded after `gc`."""

MIN_AGE_S = 3600.0
"""Age in seconds below which objects are never collected, because a process may be reading them."""


def overdrive(rules: Rules) -> str | None:
    """Return a warning if the outer optimizer's settings are known to do harm at this H, else None."""
    effective = rules.outer_lr / (1.0 - rules.outer_momentum)
    most = EFFECTIVE_MAX[MergeRule(rules.merge)]
    if rules.sync_every > 64 or (rules.outer_momentum <= MOMENTUM_MAX and effective <= most + 1e-9):
        return None
    rate, momentum = outer_for(rules.merge, rules.sync_every)
    return (
        f"outer rate {rules.outer_lr:g} with momentum {rules.outer_momentum:g} is too high for rounds of H = "
        f"{rules.sync_every}: their effective rate is {effective:.1f}; use {rate:g} with {momentum:g} instead"
    )


def metadata(kind: type[Rules] | type[Pace], name: str) -> dict[str, Any]:
    """Return the limits (ge, gt, le, lt), title and description of a field of rules or pace, as far as it has them."""
    declared = typing.get_type_hints(kind, include_extras=True)[name]
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        declared = next(arm for arm in typing.get_args(declared) if arm is not type(None))
    metas = [meta for meta in getattr(declared, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
    said = ("ge", "gt", "le", "lt", "title", "description")
    return {key: found for meta in metas for key in said if (found := getattr(meta, key)) is not None}


def _validate(settings: Rules | Pace | Bounds) -> None:
    of = type(settings).__name__.lower()
    for field in msgspec.structs.fields(type(settings)):
        value = getattr(settings, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{of}.{field.name} {value}: must be a finite number")
        try:
            msgspec.convert(msgspec.to_builtins(value), field.type)
        except msgspec.ValidationError as error:
            raise InputError(f"{of}.{field.name} {value}: must be {plainly(str(error))}") from None
