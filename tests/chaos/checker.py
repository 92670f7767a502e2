"""Check the invariants after every round of chaos, in the store itself, without the proxy."""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from isthmus.agent.ports import open_log
from isthmus.errors import IsthmusError, LogCorrupt
from isthmus.format.records.keys import LEARNERS, values_prefix
from isthmus.inspect.status import read_ledgers
from isthmus.log import Commit, Log, fold
from isthmus.log.listing import checkpoints_in
from isthmus.log.merge import State

T = TypeVar("T")

RECENT, SAMPLED = 50, 20
"""Numbers of commits of each fragment that are read again in each round: the newest, and a sample of all."""


@dataclass
class Checker:
    """Folds the log as it grows, and remembers each commit: no commit may ever change or vanish."""

    url: str
    environment: dict[str, str]
    violations: list[str] = field(default_factory=list)
    commits: dict[tuple[int, int], Commit] = field(default_factory=dict)
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    _at: dict[int, fold.At[State]] = field(default_factory=dict)
    _bases: dict[tuple[int, str], int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of commits checked so far."""
        return len(self.commits)

    def heads(self) -> dict[int, int]:
        """Return the newest version of each fragment, as of the last check."""
        return {p: at.version for p, at in self._at.items()}

    def check(self, when: str) -> None:
        """Fold new commits, and compare old ones with what was seen."""
        before = len(self.violations)
        try:
            self._run(self._check)
        except IsthmusError as error:
            self.violations.append(str(error))
        self.violations[before:] = [f"{when}: {what}" for what in self.violations[before:]]

    def newest(self) -> dict[int, int]:
        """Return the newest version of each fragment now, without a check."""

        async def go(log: Log) -> dict[int, int]:
            found = {}
            for f in log.run.layout.fragments:
                commit = await log.newest(f.index, self._at[f.index].version if f.index in self._at else 0)
                found[f.index] = commit.version if commit else 0
            return found

        return self._run(go)

    def ledgers(self, when: str) -> dict[str, Any]:
        """Check the ledgers in the learners' newest checkpoints, against themselves and against the log."""

        async def go(log: Log) -> dict[str, Any]:
            entries = checkpoints_in(await log.store.list(LEARNERS))
            return await read_ledgers(log, entries)

        found = self._run(go)
        self.check(when)
        for learner, ledger in found.items():
            for row in ledger["fragments"]:
                p = row["fragment"]
                parts = sum(row[part] for part in ("merged", "overwritten", "late", "pending", "rejected", "lost"))
                if parts != ledger["processed"]:
                    self.violations.append(
                        f"{when}: ledger of {learner}, fragment {p}: {row} is not {ledger['processed']}"
                    )
                merged = sum(
                    i.tokens
                    for (q, version), c in self.commits.items()
                    for i in c.header.inputs
                    if q == p and version <= row["settled_to"] and i.learner == learner
                )
                if merged != row["merged"]:
                    self.violations.append(
                        f"{when}: {learner}, fragment {p}: the log merged {merged}, the ledger says {row}"
                    )
        return found

    def overwrite(self, learner: str) -> list[int]:
        """Overwrite a learner's updates that were merged since the newest snapshot, in the first fragment that has any.
        Return that fragment, or nothing."""

        async def go(log: Log) -> list[int]:
            for p, at in self._at.items():
                newest = max((version for version, _ in await log.snapshots(p)), default=0)
                keys = [
                    given.key
                    for version in range(newest + 1, at.version + 1)
                    for given in self.commits[p, version].header.inputs
                    if given.learner == learner
                ]
                for key in keys:
                    await log.store.put(key, b"overwritten")
                if keys:
                    return [p]
            return []

        return self._run(go)

    async def _check(self, log: Log) -> None:
        for f in log.run.layout.fragments:
            await self._fragment(log, f.index)

    async def _fragment(self, log: Log, p: int) -> None:
        carry = fold.Merging(log)
        if p not in self._at:
            self._at[p] = await fold.begin(log, p, carry, at_most=0)
        top = self._at[p].version
        old = {*range(max(1, top - RECENT), top + 1), *self._random.sample(range(1, top + 1), min(top, SAMPLED))}
        for version in sorted(old):
            again = await log.commit(p, version)
            if again is None or again.digest != self.commits[p, version].digest:
                self.violations.append(f"commit {p}/{version} is another than it was, or gone")
        first = self._at[p].version + 1
        try:
            # The fold reads every input and compares its digest. The result must be as recorded.
            async for at in fold.onward(log, p, carry, self._at[p]):
                commit = at.last[-1]
                self.commits[p, at.version] = commit
                for given in commit.header.inputs:
                    if given.base <= self._bases.get((p, given.learner), -1):
                        self.violations.append(
                            f"commit {p}/{at.version} merges base {given.base} of {given.learner} again"
                        )
                    self._bases[p, given.learner] = max(given.base, self._bases.get((p, given.learner), -1))
                self._at[p] = at
        except LogCorrupt as error:
            self.violations.append(str(error))
        stored = {e.key for e in await log.store.list(values_prefix(p))}
        for version in range(first, self._at[p].version + 1):
            if self.commits[p, version].header.value_key not in stored:
                self.violations.append(f"commit {p}/{version} names a value that is not there")

    def _run(self, body: Callable[[Log], Awaitable[T]]) -> T:
        async def go() -> T:
            async with open_log(self.url) as log:
                return await body(log)

        with _environment(self.environment):
            return asyncio.run(go())


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
