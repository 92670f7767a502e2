"""Judge work that was done under a version of the membership after another version had replaced it.

A version leaves room for the time that its owners take to decide (`MembersHeader.until`), so commits under the version
before it are valid up to that bound. An honest syncer reads the membership before each commit, and merges again what
the newest version does not allow. A syncer that is no member any more can go on with a copy of the run that lacks the
newest versions. Only the writers' clocks show this: if they state false times, it stays unnoticed.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from isthmus.format.records.objects import CommitHeader
from isthmus.format.rules import MemberRole as Role
from isthmus.format.signing import fingerprint
from isthmus.log.membership import Members, Membership
from isthmus.log.verify import HEALER, Commit
from isthmus.wording import counted, fragments

AFTER_S = 60.0
"""A commit is outdated if it was written so many seconds after the membership that replaced its own, by the writers'
clocks, which may differ a little."""


def why_not(newer: Membership, under: Membership, writer: str, author: bytes, learners: Collection[str]) -> str:
    """Return what a newer version does not allow of a merge under another version; empty if it allows all of it.

    `author`: the public key [32 bytes] of the syncer, whose name is `writer`. `learners`: those merged.
    """
    if not newer.permits(author, (Role.SYNCER,), None if writer == HEALER else writer):
        return f"names no syncer {writer} with the key {fingerprint(author)}"
    gone, other = set[str](), set[str]()
    for learner in learners:
        before, now = under.member(learner), newer.member(learner)
        if before is not None and (now is None or (now.role, now.key) != (before.role, before.key)):
            gone.add(learner)
        elif under.terms(learner) != newer.terms(learner):
            other.add(learner)
    if gone:
        return f"names no learner {', '.join(sorted(gone))} with the key of these updates"
    return f"has other terms for {', '.join(sorted(other))}" if other else ""


@dataclass(frozen=True, slots=True)
class Outdated:
    """Commits that one writer made, of one fragment, under a replaced version, and the newer one does not allow."""

    fragment: int
    first: int
    """The first version that the commits created."""
    last: int
    count: int
    writer: str
    under: int
    """The version of the membership that the commits name."""
    newer: int
    """The version that had replaced it and would not have allowed these commits."""
    after_s: float
    """How long after `newer` was written the newest of these commits was written, by the writers' clocks [s]."""
    why: str
    """What `newer` does not allow."""

    def __str__(self) -> str:
        which = f"version {self.first}" if self.count == 1 else f"{self.count} of versions {self.first} to {self.last}"
        return (
            f"fragment {self.fragment}, {which}: {self.writer} wrote this under membership {self.under}, up to "
            f"{self.after_s:.0f} s after membership {self.newer} had replaced it; membership {self.newer} {self.why}"
        )


@dataclass(frozen=True, slots=True)
class OutdatedTogether:
    """Outdated commits of one writer, of all fragments, that the same newer version does not allow for one reason."""

    writer: str
    under: int
    newer: int
    why: str
    of: Sequence[Outdated]
    """The commits, by fragment."""

    @property
    def count(self) -> int:
        """How many commits they are."""
        return sum(one.count for one in self.of)

    @property
    def where(self) -> str:
        """How many commits they are, and of which fragments, in words."""
        return f"{counted(self.count, 'commit')} of {fragments(one.fragment for one in self.of)}"

    def __str__(self) -> str:
        return (
            f"{self.where}: {self.writer} wrote this under membership {self.under}, up to "
            f"{max(one.after_s for one in self.of):.0f} s after membership {self.newer} had replaced it; membership "
            f"{self.newer} {self.why}"
        )


def together(found: Iterable[Outdated]) -> list[OutdatedTogether]:
    """Return outdated commits of all fragments together, for each writer and reason."""
    alike = defaultdict[tuple[str, int, int, str], list[Outdated]](list)
    for one in found:
        alike[one.writer, one.under, one.newer, one.why].append(one)
    return [OutdatedTogether(*what, of) for what, of in alike.items()]


class Replaced:
    """Looks through the commits of one fragment, in order of versions."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self.found = list[Outdated]()

    def take(self, commit: Commit) -> None:
        """Note a commit if it is outdated."""
        h, learners = commit.header, {given.learner for given in commit.header.inputs}
        for newer in self._members.versions[h.members + 1 :] if self._members.signed else ():
            after_s = h.written_at - newer.written_at
            under = self._members.judging(h.members)
            if after_s > AFTER_S and (why := why_not(newer, under, h.writer, commit.author, learners)):
                self._add(h, newer, after_s, why)
                return

    def _add(self, h: CommitHeader, newer: Membership, after_s: float, why: str) -> None:
        last = self.found[-1] if self.found else None
        same = (h.writer, h.members, newer.version, why)
        if last is not None and (last.writer, last.under, last.newer, last.why) == same:
            first, count, after_s = last.first, last.count + 1, max(last.after_s, after_s)
            self.found.pop()
        else:
            first, count = h.version, 1
        self.found.append(
            Outdated(h.fragment, first, h.version, count, h.writer, h.members, newer.version, after_s, why)
        )


def outdated(members: Members, commits: Iterable[Commit]) -> list[Outdated]:
    """Return which of some commits, of any fragments and in any order, are outdated."""
    by_fragment = dict[int, Replaced]()
    for commit in sorted(commits, key=lambda c: c.version):
        by_fragment.setdefault(commit.header.fragment, Replaced(members)).take(commit)
    return [found for _, looked in sorted(by_fragment.items()) for found in looked.found]
