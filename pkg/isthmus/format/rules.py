"""What a run obeys. `Rules` are its arithmetic and never change; `Pace` is about waiting and may change on the way."""

import math
import re
import types
import typing
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec

from isthmus.errors import InputError, plainly
from isthmus.format import isotropic
from isthmus.format.layout import Spec, TensorClass

STEPS_MOST = 1 << 20
Count = Annotated[int, msgspec.Meta(ge=1, le=STEPS_MOST)]
FRAGMENTS_MAX = 4096
"""Heartbeats list the version of every fragment."""

BLOCK_MAX = 1 << 20

Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]

LONGEST = 8
"""Times `sync_every` is the longest period, where the rules say nothing else."""

STALENESS_MAX = 64
"""No pace lets a base be older than this and still be merged: what is beyond it is settled for good."""


class MergeRule(StrEnum):
    """How the updates of a round become one."""

    RDA = "rda"  # radial-directional averaging: the mean length, in the mean direction of unit vectors
    AVG = "avg"  # the weighted mean
    TRIMMED = "trimmed"  # RDA of which a minority cannot choose the direction: the trimmed mean of unit vectors
    MEDIAN = "median"  # the same by their geometric median; both as long as the median update
    ISO = "iso"  # isotropic: of matrices the polar factor of the weighted mean, with RDA's length; of all else RDA


ROBUST = frozenset({MergeRule.TRIMMED, MergeRule.MEDIAN})
"""Rules under which less than half of the updates of a round cannot choose where it goes. They keep all of them,
packed, until it closes."""


class MemberRole(StrEnum):
    """What a member of a signed run may do."""

    LEARNER = "learner"  # updates, its claims and checkpoints, what it says on the bus
    SYNCER = "syncer"  # commits, values, snapshots, what it says on the bus
    COLLECTOR = "collector"  # segments, and the pointers under the keys of old commits
    FOLLOWER = "follower"  # measurements of versions


class Adoption(StrEnum):
    """What a new version does to the work a learner did meanwhile."""

    OVERWRITE = "overwrite"  # it is in the update that is under way, or lost
    BLEND = "blend"  # half of each
    CARRY = "carry"  # done again on top of it


class FrozenCheck(StrEnum):
    """What is asked of parameters that are not trained."""

    CHECKED = "checked"  # that they are stored in the run's bytes
    TRUSTED = "trusted"  # that they have the run's names


class Hyperparameters(StrEnum):
    """Whose learning rate, weight decay and the like a learner goes on with, when it comes back."""

    RESTORED = "restored"  # its checkpoint's
    PASSED = "passed"  # those that its optimizer was made with this time


class CodecName(StrEnum):
    """How a difference travels: `isthmus.codecs` has one for each, and one for any rate (`rate_of`)."""

    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


Name = TypeVar("Name", bound=StrEnum)


def named(kind: type[Name], name: str, what: str, more: str = "") -> Name:
    """Return the member of a vocabulary. Raises `InputError` that lists it, and `more`, where none has this name."""
    try:
        return kind(name)
    except ValueError:
        raise InputError(
            f"unknown {what} {name!r}: choose one of {', '.join((*kind, more) if more else kind)}"
        ) from None


RATE_LEAST, RATE_MOST = 0.5, 4.0
"""Bits a parameter that a codec may be asked for by name, as in q1.5."""

_RATE = re.compile(r"q(\d\.?\d{0,2})")


def rate_of(name: str) -> float | None:
    """Return the bits a parameter in the name of a codec such as q1.5; None where it names no rate. Raises
    `InputError` for one that there is not."""
    if (found := _RATE.fullmatch(name)) is None:
        return None
    bits = float(found[1])
    if not RATE_LEAST <= bits <= RATE_MOST or f"q{bits:g}" != name:
        raise InputError(f"codec {name!r}: bits a parameter are from q{RATE_LEAST:g} to q{RATE_MOST:g}, such as q1.5")
    return bits


def require_codec(name: str) -> str:
    """Return the name of a codec. Raises `InputError` that says which there are."""
    return name if rate_of(name) else named(CodecName, name, "codec", "or bits a parameter, such as q1.5")


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The arithmetic of a run, fixed when it is created: another choice is another run.

    What they cost: a learner sends every fragment once in H steps and fetches as often, in the codecs' bits; a round
    merges what came within its grace, so a larger H sends less and adopts later. What they discard: `overwrite` drops
    the steps a fragment was under way, more of them as a share the smaller H is; a codec drops what it cannot say, and
    error feedback says it next time.

    Outer rate and momentum default to what suits the other defaults, RDA at H = 12; `suited` chooses them for others.
    """

    fragments: Annotated[int, msgspec.Meta(ge=1, le=FRAGMENTS_MAX)] = 12
    """P: fragments the model is cut into (at most one per tensor)."""
    sync_every: Count = 12
    """H: steps between two uploads of one fragment; more where rounds take long (docs/design/rounds.md)."""
    sync_every_max: Annotated[int, msgspec.Meta(ge=0, le=STEPS_MOST)] = 0
    """How many steps that may be at most; 0: eight times `sync_every`. As many as `sync_every`: never more."""
    merge: str = MergeRule.RDA.value
    """How the updates of a round are merged: a `MergeRule`, or its name."""
    merge_embeddings: str = MergeRule.AVG.value
    """The same for embeddings; the paper merges them by plain averaging."""
    iso_block: Annotated[int, msgspec.Meta(ge=0, le=BLOCK_MAX)] = 0
    """Where `merge` is `iso`: matrices with a longer side are cut into even blocks, each isotropic by itself, since the
    cost per parameter grows with the shorter side; 0: they stay whole."""
    trim: Annotated[float, msgspec.Meta(gt=0.0, lt=0.5)] = 0.25
    """Where `merge` is `trimmed`: the share of the updates that is left out at either end of each coordinate, rounded
    down, but one at least of three or more."""
    outer_lr: Annotated[float, msgspec.Meta(gt=0.0, le=10.0)] = 0.4
    outer_momentum: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.8
    codec_up: str = CodecName.INT4.value
    """How a learner's update travels."""
    codec_down: str = CodecName.INT4.value
    """How a new global version travels."""
    error_feedback: bool = True
    """Whether a learner adds what the codec dropped from its last merged update to the next one."""
    feedback_down: bool = True
    """Whether what `codec_down` drops stays with the syncer and follows with the next version. Else it is given up: a
    state is the published value and the momentum."""
    isotropic_up: bool = False
    """Whether of matrices (those that `merge` = iso would take) learners send the polar factor, as long as the
    difference: its directions are as loud as one another, and few bits drown none of them."""

    @classmethod
    def suited(cls, specs: Sequence[Spec] = (), *, flop_s: float = isotropic.SOUND_FLOP_S, **fields: Any) -> "Rules":
        """Return rules of which what is not given suits the model and the rest: how updates are merged and sent.

        Given the model's tensors, matrices are merged isotropically where that is cheap
        (`isthmus.format.isotropic.suits`); without them, or where it is dear, by RDA. `flop_s`: operations a second
        that a core makes where they are merged (`isthmus.agent.speed.products`), where that was measured. Learners that
        are to send matrices isotropically do so in three bits, of which the rest is given up. Rate and momentum are
        what the lab supports (docs/experiments.md): an effective rate outer_lr / (1 − momentum) of 2 for RDA, 3.5 for
        Avg and 4 for Iso, which a rate for another momentum keeps. Momentum averages over rounds what few learners
        leave of noise; the longer rounds are, the sooner what it remembers is out of date.
        """
        if "merge" not in fields:
            cheap = isotropic.suits(specs, max(0, fields.get("iso_block", 0)), flop_s)
            fields["merge"] = (MergeRule.ISO if cheap else MergeRule.RDA).value
        if fields.get("isotropic_up", False):
            fields = SENT_ISOTROPIC | fields
        if fields["merge"] in ROBUST:
            # One table of embeddings that a plain mean merges would be the way around it.
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

    def merge_for(self, role: TensorClass) -> MergeRule:
        """Return the merge rule for a class of tensors."""
        if role == TensorClass.VECTOR and self.merge == MergeRule.ISO:
            return MergeRule.RDA
        return MergeRule(self.merge_embeddings if role == TensorClass.EMBEDDING else self.merge)

    def sends_isotropic(self, role: TensorClass) -> bool:
        """Return whether matrices of a class are sent isotropically."""
        return self.isotropic_up and role == TensorClass.DENSE

    def check(self) -> "Rules":
        """Return self. Raises `InputError` for a name that does not exist or a number out of range."""
        _validate(self)
        for name in (self.merge, self.merge_embeddings):
            named(MergeRule, name, "merge")
        for name in (self.codec_up, self.codec_down):
            require_codec(name)
        if self.merge in ROBUST and self.merge_embeddings not in ROBUST:
            raise InputError(
                f"merge_embeddings {self.merge_embeddings}: with merge {self.merge}, trimmed or median; what a "
                "minority says of a table of embeddings would be merged all the same (Rules.suited chooses it)"
            )
        if 0 < self.sync_every_max < self.sync_every:
            raise InputError(
                f"sync_every_max {self.sync_every_max} is less than sync_every {self.sync_every}: let it be as many or "
                "more, or 0 for eight times as many"
            )
        if self.isotropic_up and self.merge == MergeRule.AVG:
            raise InputError("isotropic_up: merge by iso or rda; the plain mean of equal lengths is what neither means")
        return self


SENT_ISOTROPIC = {"codec_up": "q3", "codec_down": "q3", "error_feedback": False, "feedback_down": False}
"""What suits learners that send matrices isotropically: the fewest bits that cost nothing under failures, mixed speeds
and late work in the lab (docs/experiments.md, `bits`), of which the rest is given up. None of it is the default: where
learners share few cores, what packing takes costs more than it brings."""

LONG_STEPS = 24
"""H above which rounds are long: measured were 12, 24 (where both are alike) and 48."""

_SHORT_ROUNDS = {MergeRule.RDA: (0.4, 0.8), MergeRule.AVG: (0.7, 0.8), MergeRule.ISO: (1.1, 0.7)}
_LONG_ROUNDS = {MergeRule.RDA: (0.6, 0.7), MergeRule.AVG: (1.05, 0.7), MergeRule.ISO: (1.1, 0.7)}


def outer_for(merge: str, sync_every: int) -> tuple[float, float]:
    """Return outer rate and momentum for a merge rule and H; RDA's merged update is up to √M longer than Avg's."""
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
"""Beyond this, what the momentum remembers is older than the model it is applied to."""


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When to wait and for how long. Stored with the run as its default; a process may be started with another."""

    quorum: Count = 1
    """K: learners whose fresh update a round waits for before grace starts."""
    overlap: Annotated[float, msgspec.Meta(ge=0.0, le=1024.0)] = 2.0
    """τ, in steps: how long a fragment may be under way before learners miss it."""
    grace: Fraction = 0.8
    """γ: share of the slack that is spent waiting for more learners; 0 merges at quorum."""
    staleness: Annotated[int, msgspec.Meta(ge=0, le=STALENESS_MAX)] = 1
    """How many versions old a base may be and still be merged; 0 drops all late work, as the paper does."""
    lead: Annotated[float, msgspec.Meta(ge=0.0, le=1048576.0)] | None = None
    """Steps past τ after which a learner waits for a version that is under way; None: it never waits. With K = M and 0
    learners go in step, as in synchronous DiLoCo: a baseline, since one that is slow or gone then holds up the rest."""
    snapshot_every: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 8
    """S: versions between two full states of one fragment (staggered over fragments)."""
    heartbeat_s: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 1.0
    """How often every process says that it is there, and learners repeat what is not settled."""
    silence_s: Annotated[float, msgspec.Meta(gt=0.0, le=86400.0)] = 3.0
    """L: a learner not heard from for this long is not waited for."""

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
    """How far one learner may be from the others and still count in full. Stored with the run; what a commit made of it
    is recorded there (`isthmus.rounds.bounds`). Each is a factor; 1e9 lets anything pass."""

    weight: Factor = 2.0
    """k: an update weighs at most so many times the median of what came lately. One learner among M − 1 that weigh the
    same has at most k / (k + M − 1) of a round: with 2, less than half from three others on."""
    norm: Factor = 4.0
    """c: an update is at most so many times as long (per root of its steps) as the median: a longer one is cut, and one
    that is so many times shorter weighs less."""
    refused: Factor = 100.0
    """Times the median length above which an update is turned away."""
    rate: Factor = 8.0
    """Tokens per step, in medians."""
    jump: Factor = 4.0
    """Tokens per step, in those of the same learner's last merged update."""
    slow: Factor = 16.0
    """Durations that learners say of themselves are taken to be at most so many times their median …"""
    fast: Factor = 4.0
    """… and at least this part of it."""
    opening: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.8
    """Of the time that H steps take a learner, or half of all learners if that is longer, how much passes at least
    between two rounds of a fragment that it opens."""
    absent: Annotated[int, msgspec.Meta(ge=1, le=ABSENT_MAX)] = 3
    """Rounds of a fragment in a row, none of them shorter than half a step of its, to which a learner has not come, nor
    passed them, after which none waits for it; four times as many where an update of its, of any fragment, has come."""

    def check(self) -> "Bounds":
        """Return self. Raises `InputError` for a number out of range."""
        _validate(self)
        return self


BOUNDS = Bounds()
"""What holds where nobody says otherwise."""

# --- what processes do unless they are told otherwise ----------------------------------------------------------------

CHECKPOINT_S = 60.0
"""Seconds between two checkpoints of a learner."""

CHECKPOINTS_KEPT = 2
"""The newest ones of every learner."""

KEPT_VERSIONS = 64
"""Versions of every fragment that `gc` leaves foldable."""

MIN_AGE_S = 3600.0
"""Objects younger than this are never collected: somebody may just be reading them."""


def overdrive(rules: Rules) -> str | None:
    """Return a warning where the outer optimizer is known to hurt at this H, else None."""
    effective = rules.outer_lr / (1.0 - rules.outer_momentum)
    most = EFFECTIVE_MAX[MergeRule(rules.merge)]
    if rules.sync_every > 64 or (rules.outer_momentum <= MOMENTUM_MAX and effective <= most + 1e-9):
        return None
    rate, momentum = outer_for(rules.merge, rules.sync_every)
    return (
        f"outer rate {rules.outer_lr:g} with momentum {rules.outer_momentum:g} overdrives rounds of H = "
        f"{rules.sync_every}: their effective rate is {effective:.1f}, and what suits them is "
        f"{rate:g} with {momentum:g}"
    )


def bounds(kind: type[Rules] | type[Pace], name: str) -> dict[str, float]:
    """Return what a field of rules or pace has to keep to: ge, gt, le, lt, where it has such."""
    declared = typing.get_type_hints(kind, include_extras=True)[name]
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        declared = next(arm for arm in typing.get_args(declared) if arm is not type(None))
    metas = [meta for meta in getattr(declared, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
    return {at: limit for meta in metas for at in ("ge", "gt", "le", "lt") if (limit := getattr(meta, at)) is not None}


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
