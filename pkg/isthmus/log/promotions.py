"""Promotions: the cuts of the global model that have passed the charter's gate. They are a log beside the commits.

A promotion names a cut, the measurements that it rests on, the membership version whose charter has the rule, and the
promotion before it. So every reader can check it again, and needs to trust neither the store nor the promoter.
Promotions are created and never overwritten. One that does not hold is named with the reason, and has no effect: the
next one follows the last that holds. Otherwise anybody who may create promotions could block the gate for ever.
"""

import asyncio
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from msgspec import UnsetType

from isthmus.errors import InputError, LogCorrupt, ObjectMissing, RecordInvalid
from isthmus.format import digests
from isthmus.format.records import frame
from isthmus.format.records.charter import PromotionRule
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import PROMOTIONS, evaluations_prefix, promotion_key
from isthmus.format.records.objects import SCHEMA, EvaluationHeader, Evidence, PromotionHeader
from isthmus.format.rules import MemberRole
from isthmus.format.signing import Signer, fingerprint
from isthmus.log import evaluations
from isthmus.log.commits import Log
from isthmus.log.membership import WRITERS, Members, Membership, require_may
from isthmus.log.verify import Verified

AT_ONCE = 16

Measured = Verified[EvaluationHeader]


def cut_digest(published: Iterable[bytes]) -> bytes:
    """Return the digest [32 bytes] of a cut, from the digests of the published values of all fragments, in order.

    For version 0 of a fragment, pass the digest of its first snapshot, which the run object names.
    """
    return digests.digest(b"".join(published))


@dataclass(frozen=True)
class CutInLog:
    """One version of every fragment, as the log has it."""

    published: bytes
    """Its `cut_digest` [32 bytes]."""
    members: int
    """The newest membership version under which one of its commits was made."""


@dataclass(frozen=True)
class Promotion:
    """A promotion as it was read, and whether it holds."""

    number: int
    fault: str = ""
    """Why it does not hold; empty if it does."""
    header: PromotionHeader | None = None
    """None if it cannot be read, or is not by a member."""
    digest: bytes = b""
    measured: Sequence[EvaluationHeader] = ()
    """The measurements that it rests on, as far as they can be read."""

    @property
    def version(self) -> int:
        """The version of every fragment in its cut; 0 if it cannot be read."""
        return self.header.versions[0] if self.header and self.header.versions else 0

    @cached_property
    def values(self) -> Mapping[str, float]:
        """The measured values, by evaluator."""
        return {m.by: m.value for m in self.measured if m.by is not None}


# --- the rule ---------------------------------------------------------------------------------------------------------


def gate_of(membership: Membership) -> PromotionRule | None:
    """Return the gate in the charter of a membership version; None if there is none."""
    return membership.charter.gate if membership.charter else None


def shortfall(gate: PromotionRule, evaluator: str, value: float, last: Promotion | None) -> str:
    """Return why a measured value is not good enough after the promotion before; empty if it is.

    The value is compared with the rule's limit, and with that of the same evaluator, or else with the median of all. If
    the charter's series has changed since, there is nothing before to compare it with.
    """
    lower, limit = gate.better == "lower", gate.limit
    if not isinstance(limit, UnsetType) and not (value <= limit if lower else value >= limit):
        return f"{evaluator}'s number {value:g} is beyond the limit of {limit:g} ({gate.better} is better)"
    if last is None or any(m.series != gate.series for m in last.measured):
        return ""
    own = last.values.get(evaluator)
    before = statistics.median(last.values.values()) if own is None else own
    if value <= before + gate.tolerance if lower else value >= before - gate.tolerance:
        return ""
    whose = "the median" if own is None else "its number"
    return (
        f"{evaluator}'s number {value:g} is worse than {before:g}, {whose} at promotion {last.number} (version "
        f"{last.version}), by more than the tolerance of {gate.tolerance:g} ({gate.better} is better)"
    )


def fault_of(
    found: Verified[PromotionHeader],
    evidence: Sequence[Measured | str],
    cut: CutInLog | None,
    before: Sequence[Promotion],
    members: Members,
) -> str:
    """Return why a promotion does not hold; empty if it does.

    `evidence`: the measurements that it names, in order; a text says why one cannot be read. `cut`: the cut of its
    version in the log; None: the log does not have it. `before`: the promotions before it that hold, in order. All
    membership versions up to the one that it names must be known, or it does not hold.
    """
    h, last = found.header, before[-1] if before else None
    if h.members >= members.known:
        return f"membership {h.members}, under which it was made, is not known here"
    under = members.versions[h.members]
    gate = gate_of(under)
    if gate is None:
        return f"membership {h.members}, under which it was made, has no charter with a gate"
    if h.by not in gate.promoters:
        return f"{h.by} is no promoter in the charter of membership {h.members}"
    if not under.permits(found.author, WRITERS[Kind.PROMOTION], h.by):
        return f"membership {h.members} has no follower {h.by} with the key {fingerprint(found.author)}"
    if h.previous != (last.digest if last else members.run.digest):
        right = f"promotion {last.number}" if last else "the run object"
        return f"it follows {h.previous.hex()[:16]}, and not {right}, the last before it that holds"
    if len(h.versions) != len(members.run.layout.fragments) or len(set(h.versions)) > 1:
        return "it is of no cut: a cut is the same version of every fragment"
    if last and h.versions[0] < last.version:
        return f"version {h.versions[0]} is older than version {last.version}, which promotion {last.number} promoted"
    if cut is None:
        return f"version {h.versions[0]} is not in the log"
    if h.members < (newest := max(cut.members, last.header.members if last and last.header else 0)):
        return f"it was made under membership {h.members}, when membership {newest} was in force"
    if h.published != cut.published:
        return f"version {h.versions[0]} has the digest {cut.published.hex()[:16]}, it names {h.published.hex()[:16]}"
    return _fault_in(evidence, h, under, gate, before)


def _fault_in(
    evidence: Sequence[Measured | str],
    h: PromotionHeader,
    under: Membership,
    gate: PromotionRule,
    before: Sequence[Promotion],
) -> str:
    """Return why measurements are no evidence for a promotion; empty if they are."""
    names, authors = set[str](), set[bytes]()
    last = before[-1] if before else None
    of_this = itertools.takewhile(lambda p: p.version == h.versions[0], reversed(before))
    first = {(m.series, m.by): (m.value, p.number) for p in of_this for m in p.measured}
    for one in evidence:
        if isinstance(one, str):
            return one
        m, by = one.header, one.header.by
        if by is None or by not in gate.evaluators:
            return f"{one.key} is by {by or 'no named member'}, who is no evaluator in the charter"
        if not under.permits(one.author, WRITERS[Kind.EVALUATION], by):
            return f"{one.key}: membership {under.version} has no {by} with the key {fingerprint(one.author)}"
        if by in names or one.author in authors:
            return f"{one.key}: {by}, or the same key under another name, has measured already: each counts once"
        if m.series != gate.series:
            return f"{one.key} is of the series {m.series}; the gate's is {gate.series}"
        if (m.cut, m.published) != (h.versions[0], h.published):
            return f"{one.key} is the number of another cut"
        value, number = first.get((m.series, by), (m.value, 0))
        if value != m.value:
            return (
                f"{one.key}: {by}'s number for this version is {value:g}, by promotion {number}: no other replaces it"
            )
        if worse := shortfall(gate, by, m.value, last):
            return worse
        names.add(by)
        authors.add(one.author)
    if len(names) < gate.least:
        return f"it rests on the numbers of {len(names)} evaluators, and the charter asks for {gate.least}"
    return ""


# --- reading ----------------------------------------------------------------------------------------------------------


async def cut_in_log(log: Log, version: int) -> CutInLog | None:
    """Return the cut of a version; None if a fragment does not have it. Raises `LogCorrupt`, and what the store
    raises."""
    if version == 0:
        return CutInLog(cut_digest(log.run.header.snapshots), 0)
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(p: int) -> tuple[bytes, int] | None:
        async with slots:
            commit = await log.commit(p, version)
        return (commit.header.published_digest, commit.header.members) if commit else None

    found = await asyncio.gather(*(one(f.index) for f in log.run.layout.fragments))
    there = [one for one in found if one is not None]
    if len(there) < len(found):
        return None
    return CutInLog(cut_digest(published for published, _ in there), max(members for _, members in there))


@dataclass
class Promotions:
    """The promotions of a run that are known here."""

    log: Log
    sound: list[Promotion] = field(default_factory=list)
    """Those that hold, in order."""
    unsound: list[Promotion] = field(default_factory=list)
    """Those that do not hold, in order."""
    free: int = 1
    """The number of the first promotion that is not there."""

    @property
    def last(self) -> Promotion | None:
        """The last promotion that holds."""
        return self.sound[-1] if self.sound else None

    async def refresh(self) -> Promotion | None:
        """Read the promotions after the last one that holds; return the last one that holds then.

        Those that did not hold are judged again, as what they lacked may have been restored. Raises `LogCorrupt` if the
        log is damaged where a promotion names it, and what the store raises.
        """
        number = self.last.number if self.last else 0
        self.unsound = [promotion for promotion in self.unsound if promotion.number < number]
        while (found := await self._read(number := number + 1)) is not None:
            (self.unsound if found.fault else self.sound).append(found)
        self.free = number
        return self.last

    async def beyond(self) -> list[int]:
        """Return the numbers of promotions that are there, but after one that is missing, so that none is read. Lists.
        Raises what the store raises."""
        there = {entry.key for entry in await self.log.store.list(PROMOTIONS)}
        numbers = [int(name) for key in there if len(name := key.removeprefix(PROMOTIONS)) == 12 and name.isdecimal()]
        return sorted(number for number in numbers if number > self.free)

    async def _read(self, number: int) -> Promotion | None:
        """Return a promotion; None if there is none of this number."""
        key = promotion_key(number)
        try:
            found = await self.log.open(await self.log.fetch(key, Kind.PROMOTION), key, PromotionHeader)
        except ObjectMissing:
            return None
        except RecordInvalid as error:
            return Promotion(number, error.detail or str(error))
        return await self.judged(found)

    async def judged(self, found: Verified[PromotionHeader]) -> Promotion:
        """Return a promotion that follows the last one that holds, and whether it holds. Raises as `refresh` does."""
        h, log = found.header, self.log
        if h.members >= log.members.known:
            await log.members.refresh(log.store)
        evidence, cut = await self._evidence(h), await cut_in_log(log, h.versions[0]) if h.versions else None
        fault = fault_of(found, evidence, cut, self.sound, log.members)
        measured = [one.header for one in evidence if not isinstance(one, str)]
        return Promotion(h.number, fault, h, found.digest, measured)

    async def _evidence(self, h: PromotionHeader) -> list[Measured | str]:
        slots = asyncio.Semaphore(AT_ONCE)
        gate = gate_of(self.log.members.versions[h.members]) if h.members < self.log.members.known else None

        async def one(named: Evidence) -> Measured | str:
            # Read nothing else for it: what this process may not read would end it.
            if gate is None or not named.key.startswith(evaluations_prefix(gate.series)):
                return f"{named.key} is no measurement of the gate's series"
            async with slots:
                try:
                    blob = await self.log.fetch(named.key, Kind.EVALUATION)
                    return await self.log.open(blob, named.key, EvaluationHeader, digest=named.digest)
                except ObjectMissing:
                    return f"{named.key} is missing"
                except RecordInvalid as error:
                    return f"{named.key}: {error.detail or error}"

        return list(await asyncio.gather(*map(one, h.evidence)))


async def stored(log: Log) -> list[Measured]:
    """Return all numbers that evaluators of the run's gates, of now and before, have stored, in the order of series,
    version and evaluator. Raises what the store raises."""
    evaluators = defaultdict[str, set[str]](set)
    for gate in filter(None, map(gate_of, log.members.versions)):
        evaluators[gate.series].update(gate.evaluators)
    found = [
        one
        for series, names in evaluators.items()
        for one in await evaluations.read(log, series, in_force=False)
        if one.header.by in names
    ]
    return sorted(found, key=lambda one: (one.header.series, one.header.cut, one.header.by or "", *_said_when(one)))


def others(promotion: Promotion, numbers: Iterable[Measured]) -> dict[str, list[float]]:
    """Return the other numbers for a promoted cut by the evaluators whose numbers it rests on, by evaluator.

    Nothing proves which number an evaluator stored first. So the promotion holds, and readers are told of the others.
    """
    named = {(m.series, m.by, m.cut, m.published): m.value for m in promotion.measured}
    found = defaultdict[str, list[float]](list)
    for one in numbers:
        h = one.header
        known = named.get((h.series, h.by, h.cut, h.published), h.value)
        if h.by is not None and h.value != known and h.value not in found[h.by]:
            found[h.by].append(h.value)
    return {by: values for by, values in found.items() if values}


def left_out(promotion: Promotion, numbers: Iterable[Measured]) -> dict[str, list[float]]:
    """Return the numbers for a promoted cut of evaluators on whose numbers the promotion does not rest."""
    found = defaultdict[str, list[float]](list)
    cuts = {(m.series, m.cut, m.published) for m in promotion.measured}
    for one in numbers:
        h = one.header
        if h.by is not None and h.by not in promotion.values and (h.series, h.cut, h.published) in cuts:
            found[h.by].append(h.value)
    return dict(found)


def doubts(promotion: Promotion, numbers: Iterable[Measured]) -> list[str]:
    """Return, in words, what `others` finds."""
    return [
        f"promotion {promotion.number} rests on {name}'s number {promotion.values[name]:g} for version "
        f"{promotion.version}; {name} has stored other numbers for it, too: {', '.join(map(str, values))}; ask {name} "
        "which is right"
        for name, values in others(promotion, numbers).items()
    ]


async def newest(log: Log) -> Promotion | None:
    """Return the last promotion that holds; None if there is none. Reads nothing in a run that never had a gate.

    Raises as `Promotions.refresh` does.
    """
    if not any(map(gate_of, log.members.versions)):
        return None
    return await Promotions(log).refresh()


async def require(log: Log, version: int | None = None) -> Promotion:
    """Return the last promotion of a version, or of any. Raises `InputError` if it is not promoted, and as
    `Promotions.refresh` does."""
    known = Promotions(log)
    last = await known.refresh()
    if last is None:
        why = "".join(f"; promotion {p.number} does not hold: {p.fault}" for p in known.unsound)
        raise InputError(f"{log.run.url}: no version has been promoted yet{why} (isthmus promote --help)")
    if version is None:
        return last
    found = [promotion for promotion in known.sound if promotion.version == version]
    if not found:
        listed = ", ".join(str(v) for v in sorted({promotion.version for promotion in known.sound})[-8:])
        raise InputError(f"version {version} is not promoted; the newest promoted versions are: {listed}")
    return found[-1]


def require_bytes(promotion: Promotion, published: bytes | None) -> None:
    """Raise `LogCorrupt` unless a promotion is of the cut with this digest [32 bytes]; None: not all is there."""
    if published is not None and (promotion.header is None or published != promotion.header.published):
        raise LogCorrupt(promotion_key(promotion.number), f"is not of the bytes that version {promotion.version} has")


# --- promoting --------------------------------------------------------------------------------------------------------


async def measured(log: Log, gate: PromotionRule) -> dict[int, dict[str, list[Measured]]]:
    """Return the numbers of each of the gate's evaluators for each cut, by version and evaluator.

    Only numbers that name their cut's digest count, by evaluators that are members now. Raises what the store raises.
    """
    found = defaultdict[int, dict[str, list[Measured]]](dict)
    for one in sorted(await evaluations.read(log, gate.series), key=_said_when):
        if (by := one.header.by) in gate.evaluators and by and one.header.published is not None:
            found[one.header.cut].setdefault(by, []).append(one)
    return dict(found)


def _said_when(one: Measured) -> tuple[float, str]:
    """Return the order of an evaluator's numbers. The time is what the evaluator says: nothing else proves it."""
    return one.header.written_at, one.key


def candidate(gate: PromotionRule, numbers: Mapping[int, Mapping[str, Sequence[Measured]]], after: int) -> int | None:
    """Return the newest version beyond `after` that enough evaluators have measured; None if there is none."""
    return max((v for v, by in numbers.items() if v > after and len(by) >= gate.least), default=None)


def chosen(
    gate: PromotionRule, numbers: Mapping[str, Sequence[Measured]], cut: CutInLog, last: Promotion | None
) -> tuple[list[Measured], list[str]]:
    """Return the numbers of a cut that a promotion can rest on, and why it cannot rest on those of other evaluators.

    If an evaluator has stored different numbers, none of them is returned, since nothing proves which was first.
    """
    good, not_good = list[Measured](), list[str]()
    for name in gate.evaluators:
        stored = numbers.get(name, ())
        own = [one for one in stored if one.header.published == cut.published]
        if not stored:
            not_good.append(f"{name} has no number for it")
        elif not own:
            not_good.append(f"{name}'s number is of other bytes ({stored[-1].key})")
        elif different := evaluations.contested(own):
            not_good.append(
                f"{name} has stored different numbers for it ({', '.join(map(str, different[0].values))}), and nothing "
                f"proves which was first: none counts; {name} can measure a later version"
            )
        elif worse := shortfall(gate, name, own[0].header.value, last):
            not_good.append(worse)
        else:
            good.append(own[0])
    return good, not_good


async def promote(known: Promotions, by: str, version: int, cut: CutInLog, evidence: Sequence[Measured]) -> Promotion:
    """Create the next promotion, signed by the log's signer; return it.

    Raises `InputError` if it would not hold, or if another promoter has created one at the same time.
    """
    log = known.log
    header = PromotionHeader(
        schema=SCHEMA,
        run=log.run.digest,
        number=known.free,
        previous=known.last.digest if known.last else log.run.digest,
        members=log.members.current.version,
        versions=(version,) * len(log.run.layout.fragments),
        published=cut.published,
        evidence=tuple(Evidence(one.key, one.digest) for one in evidence),
        by=by,
        written_at=log.runtime.wall(),
    )
    blob = frame.draft(Kind.PROMOTION, header).blob
    log.seal(blob)
    key = promotion_key(header.number)
    try:
        found = await known.judged(await log.open(blob, key, PromotionHeader))
    except RecordInvalid as error:
        raise InputError(f"the promotion would be invalid: {error.detail}") from None
    if found.fault:
        raise InputError(f"the promotion would not hold: {found.fault}")
    if not await log.store.create(key, blob):
        await known.refresh()
        if not any(promotion.digest == found.digest for promotion in known.sound):
            raise InputError(
                f"{key} was created by another promoter at the same time: look at it (isthmus promote "
                f"{log.run.url} --list), and try again"
            )
    return found


def require_named(members: Members, signer: Signer | None, name: str | None) -> None:
    """Raise `InputError` unless a process may store measurements under a member's name.

    Without a name they may be stored if no gate rests on them.
    """
    if name is not None:
        found = members.current.member(name)
        require_may(members, signer, found.role if found else MemberRole.FOLLOWER, name)
    elif gate := gate_of(members.current):
        raise InputError(
            f"{members.run.url}: the charter of this run has a gate, so a measurement names the member that made it: "
            f"add --name NAME (name=… in Python); the gate counts those of {', '.join(gate.evaluators)}"
        )
