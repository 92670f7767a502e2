"""The charter and the members of a run in words, and how two versions of the membership differ."""

from collections.abc import Iterator

from isthmus.format.records.charter import Charter
from isthmus.format.records.objects import MembersHeader, MemberSpec
from isthmus.format.rules import MemberRole
from isthmus.format.signing import fingerprint
from isthmus.log.membership import AS_RUN, Membership


def in_words(charter: Charter | None) -> list[str]:
    """Return a charter as lines to read."""
    if charter is None:
        return []
    count = len(charter.owners)
    lines = [f"purpose: {charter.purpose}"] if charter.purpose else []
    lines += [f"owner {owner.name}: {fingerprint(owner.key)}" for owner in charter.owners]
    for what, least in (
        ("another charter", charter.amend),
        ("a member that is added or changed", charter.admit),
        ("the removal of a member", charter.expel),
    ):
        lines.append(f"{what}: {least} of {count} owners approve")
    for terms in charter.terms:
        said = [f"of the institution {terms.institution}"] if terms.institution else []
        said += [f"its updates' weight times {terms.factor:g}"] if terms.factor != 1.0 else []
        said += [f"at most {terms.cap:g} usual updates of weight in a round"] if terms.cap else []
        said += [f"may train on {', '.join(terms.sources)}"] if terms.sources else []
        lines.append(f"member {terms.member}: {'; '.join(said) or 'as the run has it'}")
    lines.append("only updates with a manifest are merged" if charter.manifests else "manifests are not required")
    gate = charter.gate
    if gate is None:
        lines.append("no gate: nothing can be promoted")
    else:
        lines.append(
            f"gate: {gate.series}, {gate.better} is better, worse by {gate.tolerance:g} at most than what was promoted "
            f"last; {gate.least} of {', '.join(gate.evaluators)} must have measured it; {' or '.join(gate.promoters)} "
            "promotes"
        )
    return lines


def differences(before: Membership, after: Membership | MembersHeader) -> Iterator[str]:
    """Yield, in words, what a version of the membership, or a proposed one, changes."""
    was, now = in_words(before.charter), in_words(after.charter)
    yield from (f"- {line}" for line in was if line not in now)
    yield from (f"+ {line}" for line in now if line not in was)
    entries = {m.name: m for m in before.members}
    yield from (f"- {_entry(m)}" for m in before.members if m not in after.members)
    yield from (f"+ {_entry(m)}{_without_terms(m, after.charter)}" for m in after.members if entries.get(m.name) != m)
    names = {m.name for m in after.members}
    for terms in after.charter.terms if after.charter and after.charter != before.charter else ():
        if terms.member not in names:
            yield f"! {terms.member} is no member: its terms apply to nobody yet"


def until(header: MembersHeader) -> str:
    """Return, in words, how far the membership before a version goes on: approve no more than this."""
    return (
        f"commits under the membership before it count up to version {max(header.until):,}: so long a member that it "
        "removes, if it is a syncer, could go on"
    )


def _without_terms(m: MemberSpec, charter: Charter | None) -> str:
    if charter is None or not charter.terms or m.role != MemberRole.LEARNER:
        return ""
    found = Membership(0, b"", charter=charter).terms(m.name)
    return "; the charter has no terms for it: it counts in full, and may train on anything" if found is AS_RUN else ""


def _entry(m: MemberSpec) -> str:
    return f"{m.role} {m.name}: {fingerprint(m.key)}" + (f", bucket {m.bucket}" if m.bucket else "")
