"""Check a run's log: missing or damaged commits, fragments that stand still, garbage, and this machine's speed."""

import asyncio
import statistics
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from isthmus.agent.speed import glance, too_slow
from isthmus.doctor.advice import advice_for, what_to_do
from isthmus.doctor.findings import FAILURE, NOTE, OK, WARNING, Finding, Role, RoleKind
from isthmus.errors import Denied, IsthmusError, LogCorrupt
from isthmus.format.records.keys import commit_in, commit_key
from isthmus.log import Commit, Log, fold
from isthmus.log.heal import Lost, Noting, lost_after, newest_starts
from isthmus.log.holes import GOES_ON, HOLE, Holes, ask_heal, ask_to_accept, spans, with_advice
from isthmus.log.log_health import LogState, collects, look, restores, stands
from isthmus.log.run import Run
from isthmus.runtime.clock import Runtime, cores
from isthmus.store import EdgeStore
from isthmus.wording import agreeing, counted, fragments

NAMED_MAX = 8
"""The most damaged fragments that get a finding each. One more finding counts the others."""


FOLDED_MOST = 64 << 20
"""The most bytes that are read to fold fragments to their ends."""


async def examine_log(
    run: Run, store: EdgeStore, role: Role, runtime: Runtime, accepted: Holes | None = None
) -> AsyncIterator[Finding]:
    """Yield findings about the commits of a run, and what a new syncer would read. `replay` verifies everything.

    `accepted`: holes that are only noted if the run goes on without them.
    """
    signed = run.header.owner is not None
    heal = ask_heal(store.url, signed=signed)
    try:
        log = Log(run, store.at_start, runtime)
        await log.members.refresh(log.store)
        found = await look(log, accepted=accepted)
        sample = [(p, v) for p, v in _sample(found, runtime) if v not in (accepted or {}).get(p, ())]
        wrong = {**await _damaged(log, sample, accepted or {}), **found.wrong}
    except IsthmusError as error:
        words = advice_for(store.url)
        refused, away = words.reading.format(url=store.url), words.away.format(url=store.url)
        if isinstance(error, LogCorrupt):
            away = f"restore {error.key} from a backup: nobody can tell without it who may write to this run"
        more = what_to_do(error, store.url, refused, away, signed=signed)
        yield Finding("log: commits", FAILURE, f"the log cannot be read: {error}", more)
        return
    alike = dict[str, list[int]]()  # a missing membership is missing for all fragments
    for p, why in sorted(wrong.items()):
        alike.setdefault(why, []).append(p)
    damaged = [(why, of) for why, of in alike.items() if GOES_ON not in why]
    for why, of in damaged[:NAMED_MAX]:
        yield Finding("log: commits", FAILURE, f"{fragments(of)}: {why}", heal)
    if others := sum(len(of) for _, of in damaged[NAMED_MAX:]):
        are = agreeing(others, "is", "are")
        yield Finding("log: commits", FAILURE, f"{counted(others, 'more fragment')} {are} damaged", heal)
    if role.kind in (RoleKind.OPERATOR, RoleKind.SYNCER, RoleKind.READER):
        stopped = {p: why for p, why in wrong.items() if GOES_ON not in why}
        async for folded in _folded(log, [p for p, head in enumerate(found.heads) if head and p not in stopped], heal):
            yield folded
        lost = await _lost(log, found, stopped)
        for p, newer in lost[:NAMED_MAX]:
            yield Finding("log: commits", FAILURE, newer.said, restores(p, newer.head, store.url))
        if others := len(lost[NAMED_MAX:]):
            said = f"{counted(others, 'more fragment')} {agreeing(others, 'lacks', 'lack')} versions that learners have"
            yield Finding("log: commits", FAILURE, said, heal)
        wrong |= {p: newer.said for p, newer in lost}
    if found.standing:
        yield Finding("log: progress", WARNING, stands(found.standing), f"the syncers' logs say why; {heal}")
    if found.uncollected:
        said, _, advice = collects(store.url, found.uncollected, accepted, signed=signed).partition(". ")
        yield Finding("log: size", NOTE, said, advice)
    if role.kind in (RoleKind.OPERATOR, RoleKind.SYNCER):
        yield await runtime.offload(_speed, run, [head for head in found.heads if head is not None], runtime)
    newest = max((head for head in found.heads if head is not None), key=_written_at, default=None)
    if newest is not None and (skewed := await _clock(newest, log, runtime)) is not None:
        yield skewed
    for hole in _holes(
        {why: of for why, of in alike.items() if GOES_ON in why}, accepted or {}, ask_to_accept(store.url)
    ):
        yield hole
    if wrong:
        return
    if newest is None:
        yield Finding("log: commits", OK, "there is none yet")
        return
    commits = sum(head.version for head in found.heads if head is not None)
    if found.whole_log:
        said = f"none of {commits:,} is missing, by their names; the newest and {len(sample)} older ones at random"
        more = f"isthmus heal {store.url} reads all that syncers need, isthmus replay all that is in the store"
        yield Finding("log: commits", OK, f"{said} were read; {more}")
    else:
        said = f"none since the newest snapshots is missing; this role may not list all {commits:,}"
        more = "run the doctor with a reader's or a syncer's credentials to check all of them"
        yield Finding("log: commits", NOTE, said, more)


def _holes(known: Mapping[str, Sequence[int]], accepted: Holes, advice: str) -> Iterator[Finding]:
    """Yield findings about holes in the history, which the run does not need: no failure, and said last.

    `known`: by what is wrong, the fragments. `accepted`: versions that are lost for good, and were not looked for.
    """
    for why, of in list(known.items())[:NAMED_MAX]:
        yield Finding("log: commits", WARNING, f"{fragments(of, 'each of ')} has {HOLE}: {why}", advice)
    if others := sum(map(len, list(known.values())[NAMED_MAX:])):
        has = agreeing(others, "has", "have")
        yield Finding("log: commits", WARNING, f"{counted(others, 'more fragment')} {has} such a hole, too", advice)
    if holes := [f"{p}/{span}" for p, versions in sorted(accepted.items()) for span in spans(versions)]:
        said = f"accepted as lost: {', '.join(holes)}, where the run goes on without them"
        yield Finding("log: holes", NOTE, said, "without --accept-hole the doctor looks for them again")


async def _lost(log: Log, found: LogState, wrong: Mapping[int, str]) -> list[tuple[int, Lost]]:
    """Return the fragments of which learners have versions that the log lacks, and nothing else is wrong with them."""
    try:
        starts, lost = await newest_starts(log), list[tuple[int, Lost]]()
        for p, head in enumerate(found.heads):
            newer = None if p in wrong else await lost_after(log, p, head.version if head is not None else 0, starts)
            lost += [(p, newer)] if newer is not None else []
    except IsthmusError:
        return []  # other findings say that the store is away
    return lost


async def _folded(log: Log, of: Sequence[int], heal: str) -> AsyncIterator[Finding]:
    """Yield findings about whether a new syncer could start with these fragments, as far as they are small."""
    left, done, large = FOLDED_MOST, 0, 0
    for p in of:
        try:
            size = await _reads(log, p)
            if size > left:
                large += 1
                continue
            left, done = left - size, done + 1
            carry = Noting(log)
            await fold.fold(log, p, carry)
            if carry.told:
                said, _, advice = carry.told.partition(". ")
                yield Finding("log: fold", WARNING, f"fragment {p}: {said}", advice)
        except LogCorrupt as error:
            if error.refused:
                yield Finding("log: fold", FAILURE, f"fragment {p} cannot be folded here: {error}", REFUSED)
            else:
                yield Finding("log: fold", FAILURE, f"no syncer can start with fragment {p}: {error}", heal)
        except Denied as error:
            yield Finding("log: fold", FAILURE, f"fragment {p} cannot be folded here: {error}", REFUSED)
        except IsthmusError:
            return  # other findings say that the store is away
    if large:
        said = f"{done} of {len(of)} fragments were folded to their ends; the others were not read"
        more = f"the doctor reads {FOLDED_MOST >> 20} MiB for this"
        yield Finding("log: fold", NOTE, f"{said}: {more}", f"isthmus heal {log.run.url} says it of all of them")
    elif done:
        yield Finding(
            "log: fold",
            OK,
            f"the log of {counted(done, 'fragment')} was read, from its newest snapshot on, and folded",
        )


REFUSED = (
    "nothing is known to be damaged: in a folder, let this user read it, by the command that the message names; else "
    "run this with a reader's or a syncer's credentials"
)


async def _reads(log: Log, p: int) -> int:
    """Return about how many bytes are read to fold a fragment to its end."""
    begin = next((version for version, _ in await log.snapshots(p)), 0)
    size = 12 * log.run.layout.fragments[p].size  # value, master and momentum
    async for commit in log.commits(p, begin):
        size += sum(given.bytes for given in commit.header.inputs)
    return size


SAMPLED = 32
"""Older commits that are read, so that one which was overwritten is found sooner or later."""

READ_AT_ONCE = 8


def _sample(found: LogState, runtime: Runtime) -> list[tuple[int, int]]:
    """Return (fragment, version) of random commits, of fragments in which nothing is known to be wrong."""
    heads = [(p, head.version) for p, head in enumerate(found.heads) if head is not None and p not in found.wrong]
    total = sum(head - 1 for _, head in heads)  # the newest one has no successor that names it
    chosen, drawn = list[tuple[int, int]](), sorted(runtime.random.sample(range(total), min(SAMPLED, total)))
    for p, head in heads:
        chosen += [(p, 1 + number) for number in drawn if 0 <= number < head - 1]
        drawn = [number - (head - 1) for number in drawn]
    return chosen


async def _damaged(log: Log, sample: Sequence[tuple[int, int]], accepted: Holes) -> dict[int, str]:
    """Return, by fragment, which of these commits is damaged, or is not the one that its successor names.

    `accepted`: versions that may be damaged, as the successor of one of these, where the run goes on without them.
    """
    slots, found = asyncio.Semaphore(READ_AT_ONCE), dict[int, str]()

    async def read(p: int, version: int) -> None:
        key = commit_key(p, version)
        async with slots:
            try:
                commit, following = await log.commit(p, version), await log.commit(p, version + 1)
                if commit is not None and following is not None and following.header.previous != commit.digest:
                    said = f"is not the commit that {commit_key(p, version + 1)} names as the one before it"
                    raise LogCorrupt(key, said)
            except LogCorrupt as error:
                advised = await with_advice(log, p, commit_in(error.key) or version, error)
                if GOES_ON not in advised.detail or commit_in(error.key) not in accepted.get(p, ()):
                    found[p] = str(advised)

    await asyncio.gather(*(read(p, version) for p, version in sample))
    return found


def _written_at(commit: Commit) -> float:
    return commit.header.written_at


DATED = 5
"""From so many commits the clock of their syncer is estimated: a single one may have been sent long after its date."""

NEW_S = 600.0
"""How old a commit may be, by the store's date, to be compared [s]."""

DATED_S = 30.0
"""The largest difference between a commit's date and the store's that is no sign of a wrong clock [s]."""


COPIED_S = 0.5
"""The least time between the first and the newest commit that shows whether the store dates them alike [s]."""


async def _clock(newest: Commit, log: Log, runtime: Runtime) -> Finding | None:
    """Return the finding about the clock of the syncer that wrote the newest commit; None if it seems to be right.

    The store dates commits as well, at their creation or when they were copied: only new ones are compared, unless all
    have one date, as in a copy. A role that may not list them can only tell that a commit is of the future.
    """
    p, writer = newest.header.fragment, newest.header.writer
    behind = [runtime.wall() - newest.header.written_at] if newest.header.written_at > runtime.wall() else []
    try:
        dated = {e.key: e.modified for e in await log.store.list(commit_key(p, 0).rpartition("/")[0] + "/")}
        for version in range(newest.version, max(0, newest.version - DATED), -1):
            commit = await log.commit(p, version)
            if commit is None or commit.in_segment or commit.header.writer != writer:
                break
            if (at := dated[commit_key(p, version)]) > runtime.wall() - NEW_S:
                behind.append(at - commit.header.written_at)
        if behind and await _copied(log, p, newest, dated):
            return None
    except (IsthmusError, KeyError):
        pass  # this role may not list commits, or one is damaged, which other findings say
    if not behind or abs(off := statistics.median(behind)) <= DATED_S:
        return None
    said = f"the syncer {writer} dates its commits {abs(off):,.0f} s {'too early' if off > 0 else 'in the future'}"
    return Finding("log: clock", WARNING, said, f"run an NTP client (chrony) on the machine of {writer}")


async def _copied(log: Log, p: int, newest: Commit, dated: Mapping[str, float]) -> bool:
    """Return whether the store's dates are those of a copy: all of a moment, though the commits are not."""
    first = await log.commit(p, min(map(commit_in, dated)))
    if first is None or first.in_segment:
        return False
    written_s = newest.header.written_at - first.header.written_at
    dated_s = dated[commit_key(p, newest.version)] - dated[commit_key(p, first.version)]
    return written_s > COPIED_S and dated_s < written_s / 10.0


def _speed(run: Run, heads: Sequence[Commit], runtime: Runtime) -> Finding:
    """Return the finding about whether this machine merges fast enough for the learners' speed in the newest rounds."""
    check, speeds = "machine: merging", glance(runtime.now, run.rules)
    waited = [head.header.waited for head in heads]
    learners = max((len(w.expected) for w in waited), default=1)
    steps = [w.fastest_step_s for w in waited if w.fastest_step_s > 0.0]
    step_s = statistics.median(steps) if steps else 0.0
    slow = too_slow(speeds, run.layout, run.rules, learners=learners, step_s=step_s, cores=cores())
    if slow is not None:
        said, _, advice = slow.partition(". ")
        return Finding(check, WARNING, said, advice)
    takes_s = speeds.merge_s(run.layout, run.rules, learners)
    return Finding(check, OK, f"merging every fragment once takes {takes_s:.2g} s of a core here ({speeds})")
