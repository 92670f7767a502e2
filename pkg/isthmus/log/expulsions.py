"""Which learners the owners have expelled, when, and by which version of the membership."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.format.rules import MemberRole
from isthmus.format.signing.keys import fingerprint
from isthmus.log.commits import Log
from isthmus.log.membership import Members


@dataclass(frozen=True, slots=True)
class Expulsion:
    """A learner that was a member, and is none any more."""

    learner: str
    version: int
    """The version of the membership that removed it."""
    at: float
    """When that version was written, by its author's clock [seconds since 1970]."""

    def __str__(self) -> str:
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.at))
        return f"{self.learner} was expelled by membership {self.version}, at {at}"


def expulsions(members: Members, learners: Iterable[str]) -> list[Expulsion]:
    """Return those of some learners that were expelled, the newest first. A learner that was admitted again is not."""
    found = list[Expulsion]()
    for name in set(learners) if members.signed else ():
        if members.current.member(name) is not None:
            continue
        named = [v.version for v in members.versions if (m := v.member(name)) and m.role == MemberRole.LEARNER]
        if named:
            removed = members.versions[named[-1] + 1]
            found.append(Expulsion(name, removed.version, removed.written_at))
    return sorted(found, key=lambda one: (-one.version, one.learner))


def removed(log: Log, learner: str) -> str:
    """Return since when the newest membership known here does not name this process's learner, or not with its key.

    Empty while it does, and in a run without signatures.
    """
    if why := replaced(log, learner):
        return why
    if not log.members.signed or log.signer is None or log.members.current.member(learner) is not None:
        return ""
    return next(map(str, expulsions(log.members, [learner])), "")


def replaced(log: Log, learner: str) -> str:
    """Return since when the learner has another key than this process, as far as is known here; empty if it has not."""
    now, signer = log.members.current, log.signer
    there = now.member(learner) if log.members.signed else None
    if there is None or signer is None or now.permits(signer.author, (MemberRole.LEARNER,), learner):
        return ""
    mine, given = fingerprint(signer.author), fingerprint(there.key)
    return f"since membership {now.version} the key of {learner} is {given}, and not {mine}"
