"""The charter: what the owners of a run have agreed on. It is part of the membership (`objects.MembersHeader`)."""

from collections import Counter as Tally
from typing import Annotated, Literal

import msgspec

from isthmus.format.records.fields import Name, PublicKey, Signature, Text
from isthmus.format.signing.points import is_small_order

OWNERS_MAX = 64
TERMS_MAX = 4096
SOURCES_MAX = 256
FACTOR_LEAST, FACTOR_MOST = 1e-3, 1e3
PATTERN = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,61}[*]?\Z"
"""A name, or the beginning of names and a `*`."""

Entry = Annotated[str, msgspec.Meta(pattern=PATTERN)]
Threshold = Annotated[int, msgspec.Meta(ge=1, le=OWNERS_MAX)]


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One of a run's owners."""

    name: Name
    key: PublicKey


class Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the owners have agreed on for one member: all learners that an entry of the membership covers."""

    member: Entry
    """The name in the membership, such as `north-1` or `north-*`."""
    factor: Annotated[float, msgspec.Meta(ge=FACTOR_LEAST, le=FACTOR_MOST)] = 1.0
    """The weight of each of its updates is multiplied by this."""
    cap: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] | None = None
    """The most that its updates of one round weigh together, before `factor`, in weights of the usual update; None:
    no limit but the run's own for each learner."""
    sources: Annotated[tuple[Name, ...], msgspec.Meta(max_length=SOURCES_MAX)] = ()
    """Names of the data sources that its manifests may declare; none: any."""
    institution: Name | msgspec.UnsetType = msgspec.UNSET
    """The institution that the member belongs to; unset: the member itself is one."""


class PromotionRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rule by which a cut of the global model is promoted."""

    series: Name
    """The series of measurements that decides."""
    better: Literal["lower", "higher"]
    tolerance: Annotated[float, msgspec.Meta(ge=0.0, le=1e30)] = 0.0
    """By how much a cut may be worse than the one promoted last, in the unit of the series."""
    evaluators: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=OWNERS_MAX)]
    """Members whose measurements count."""
    limit: float | msgspec.UnsetType = msgspec.UNSET
    """The worst value that a promoted cut may have, in the unit of the series; unset: a first cut may have any."""
    least: Threshold
    """Evaluators that must have measured the cut and found it good enough."""
    promoters: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=OWNERS_MAX)]
    """Members that may promote a cut that satisfies the rule."""


class Charter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The agreement of a run's owners. Each number of owners is the least that must approve a change."""

    purpose: Text = ""
    owners: Annotated[tuple[Owner, ...], msgspec.Meta(min_length=1, max_length=OWNERS_MAX)]
    amend: Threshold
    """Owners who must approve another charter."""
    admit: Threshold
    """Owners who must approve a member that is added or changed."""
    expel: Threshold
    """Owners who must approve that a member is removed."""
    terms: Annotated[tuple[Terms, ...], msgspec.Meta(max_length=TERMS_MAX)] = ()
    manifests: bool = False
    """Whether only updates that name a manifest are merged."""
    gate: PromotionRule | None = None
    """None: nothing can be promoted."""

    def fault(self) -> str:
        """Return why this cannot be a charter; empty if it can."""
        count = len(self.owners)
        for what in ("amend", "admit", "expel"):
            if (least := getattr(self, what)) > count:
                return f"{what} needs {least} owners, and there are {count}"
        if any(is_small_order(owner.key) for owner in self.owners):
            return "an owner's key is of small order: anybody could sign under it"
        twice = (
            ("owner", Tally(owner.name for owner in self.owners)),
            ("key", Tally(owner.key.hex()[:16] for owner in self.owners)),
            ("member", Tally(terms.member for terms in self.terms)),
            ("evaluator", Tally(self.gate.evaluators if self.gate else ())),
        )
        for what, found in twice:
            if repeated := [name for name, times in found.items() if times > 1]:
                return f"{what} {repeated[0]} stands there twice"
        if self.gate and self.gate.least > len(self.gate.evaluators):
            return f"the gate needs {self.gate.least} evaluators, and names {len(self.gate.evaluators)}"
        return ""


class Approval(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """An owner's consent to a change of the membership or the charter."""

    owner: PublicKey
    signature: Signature
    """Of the change, in the namespace `isthmus-approval` (`isthmus.log.charter.change_of`)."""
