"""The charter and the members of a run in words, and how two versions of the membership differ."""

import time
import unicodedata
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from isthmus.format.records.charter import Charter
from isthmus.format.records.objects import MembersHeader, MemberSpec
from isthmus.format.rules import MemberRole
from isthmus.format.signing import fingerprint
from isthmus.log.membership import AS_RUN, Members, Membership
from isthmus.log.run import Run


def in_words(charter: Charter | None) -> list[str]:
    """Return a charter as lines to read."""
    if charter is None:
        return []
    count = len(charter.owners)
    lines = [f"purpose: {_visible(charter.purpose)}"] if charter.purpose else []
    lines += [f"owner {owner.name}: {fingerprint(owner.key)}" for owner in charter.owners]
    for what, least in (
        ("another charter", charter.amend),
        ("a member that is added or changed", charter.admit),
        ("the removal of a member", charter.expel),
    ):
        lines.append(f"{what}: {least} of {count} owners approve")
    for terms in charter.terms:
        said = [f"of the institution {terms.institution}"] if terms.institution else []
        said += [f"its updates' weight times {_exact(terms.factor)}"] if terms.factor != 1.0 else []
        said += [f"at most {_exact(terms.cap)} usual updates of weight in a round"] if terms.cap else []
        said += [f"may train on {', '.join(terms.sources)}"] if terms.sources else []
        lines.append(f"member {terms.member}: {'; '.join(said) or 'as the run has it'}")
    lines.append("only updates with a manifest are merged" if charter.manifests else "manifests are not required")
    gate = charter.gate
    if gate is None:
        lines.append("no gate: nothing can be promoted")
    else:
        limit = f", and not beyond {_exact(gate.limit)}" if gate.limit is not msgspec.UNSET else ""
        lines.append(
            f"gate: {gate.series}, {gate.better} is better, worse by {_exact(gate.tolerance)} at most than what was "
            f"promoted last{limit}; {gate.least} of {', '.join(gate.evaluators)} must have measured it as good enough; "
            f"{' or '.join(gate.promoters)} promotes"
        )
    return lines


def run_in_words(run: Run) -> str:
    """Return, in words, what the creator of a run has fixed: neither a charter nor an owner can change these rules."""
    r = run.rules
    return (
        f"fixed when the run was created: {run.layout.size:,} parameters in {len(run.layout.fragments)} fragments, H "
        f"{r.sync_every}, {r.merge}, {r.codec_up} up, {r.codec_down} down, outer rate {r.outer_lr:g}, outer momentum "
        f"{r.outer_momentum:g} (--json has all rules and bounds); run digest {run.digest.hex()}"
    )


def differences(before: Membership, after: Membership | MembersHeader) -> Iterator[str]:
    """Yield, in words, what a version of the membership, or a proposed one, changes.

    A first charter comes with all members, those of before (`=`) too: nobody has agreed on them yet.
    """
    was, now = in_words(before.charter), in_words(after.charter)
    bare_was, bare_now = [_bare(line) for line in was], [_bare(line) for line in now]
    yield from (f"- {line}" for line in was if _bare(line) not in bare_now)
    yield from (f"+ {line}" for line in now if _bare(line) not in bare_was)
    entries = {m.name: m for m in before.members}
    yield from (f"- {in_word(m)}" for m in before.members if m not in after.members)
    first = before.charter is None and after.charter is not None  # whoever approves it approves all its members
    for m in after.members:
        if first or entries.get(m.name) != m:
            yield f"{'=' if entries.get(m.name) == m else '+'} {in_word(m)}{_without_terms(m, after.charter)}"
    names = {m.name for m in after.members}
    for terms in after.charter.terms if after.charter and after.charter != before.charter else ():
        if terms.member not in names:
            yield f"! {no_member(terms.member)}"


def at_time(at: float) -> str:
    """Return a time [s since 1970] in words."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def made_before(head: int) -> str:
    """Return, in words, what approving a first charter accepts in a run that has versions up to `head`."""
    return (
        f"the run has versions up to {head:,} already, made without a charter: whoever created the run could make them "
        "in any member's name, and they stay"
    )


def in_force(now: Membership) -> str:
    """Return, in words, since when a version of the membership is in force, and when it was proposed if that differs
    by a second or more."""
    since, proposed = at_time(now.written_at), at_time(now.proposed_at)
    return f"in force since {since}" + (f" (proposed {proposed})" if proposed != since else "")


def no_member(name: str) -> str:
    """Return, in words, that the charter has terms for a name that was never a member."""
    return f"{name} is no member: its terms apply to nobody yet"


def gone(members: Members) -> dict[str, str]:
    """Return, in words and by name, what is left of members that were removed, and the charter's terms for nobody."""
    now = members.current
    here, said = {m.name for m in now.members}, dict[str, str]()
    terms = {terms.member for terms in now.charter.terms} if now.charter else set()
    for before, after in pairwise(members.versions):
        for name in sorted({m.name for m in before.members} - {m.name for m in after.members} - here):
            left = "; the charter's terms for it apply to nobody" if name in terms else ""
            said[name] = f"{name} is no member since membership {after.version}{left}"
    return said | {name: no_member(name) for name in sorted(terms - here - said.keys())}


def coming_back(members: Members, header: MembersHeader) -> list[str]:
    """Return, in words, which members a version brings back that were removed before."""
    entries, now = {m.name for m in header.members}, {m.name for m in members.current.members}
    said = list[str]()
    for name in sorted(entries - now):
        removed = [
            after.version
            for before, after in pairwise(members.versions)
            if name in {m.name for m in before.members} and name not in {m.name for m in after.members}
        ]
        if removed:
            said.append(f"{name} comes back: membership {removed[-1]} removed it")
    return said


def until(before: Membership, header: MembersHeader) -> str:
    """Return, in words, how far the membership before a version goes on: approve no more than this."""
    left = {(m.name, m.key) for m in header.members}
    gone = [m.name for m in before.members if m.role == MemberRole.SYNCER and (m.name, m.key) not in left]
    so_long = f": so long {' and '.join(gone)} could go on, with the right to write to the store" if gone else ""
    return (
        "the run goes on while owners approve: commits under the membership before it count up to version "
        f"{max(header.until):,}{so_long}"
    )


def _without_terms(m: MemberSpec, charter: Charter | None) -> str:
    if charter is None or not charter.terms or Membership(0, b"", charter=charter).terms(m.name) is not AS_RUN:
        return ""
    weighs = ": it counts in full, and may train on anything" if m.role == MemberRole.LEARNER else ""
    return f"; the charter says nothing of it{weighs}"


def _bare(line: str) -> str:
    """Return a line with each run of spaces as one: spaces alone are no change."""
    return " ".join(line.split())


def _visible(text: str) -> str:
    """Return a text in one line in which every character can be seen: no two texts that differ look as if they did
    not, but for letters of other scripts."""
    composed = unicodedata.normalize("NFC", _bare(text))
    hidden = (not c.isprintable() or unicodedata.category(c) in ("Mn", "Me") for c in composed)
    return "".join(f"\\u{ord(c):04x}" if hides else c for c, hides in zip(composed, hidden, strict=True))


def _exact(number: float) -> str:
    """Return a number so that no other number is written alike: owners approve what they read."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def in_word(m: MemberSpec) -> str:
    """Return an entry of the membership in words."""
    bucket = f", bucket {m.bucket}" if m.bucket else ""
    vouched = f", may resume from what an earlier key signed ({len(m.vouched)})" if m.vouched else ""
    return f"{m.role} {m.name}: {fingerprint(m.key)}{bucket}{vouched}"
