"""Check a run's log: missing or damaged commits, fragments that stand still, garbage, and this machine's speed."""

import statistics
from collections.abc import AsyncIterator, Sequence

from isthmus.agent.speed import glance, too_slow
from isthmus.doctor.findings import FAILURE, NOTE, OK, WARNING, Finding, Role, RoleKind
from isthmus.errors import IsthmusError
from isthmus.log import Commit, Log
from isthmus.log.log_health import STANDS, collects, look
from isthmus.log.run import Run
from isthmus.runtime.clock import Runtime, cores
from isthmus.store import EdgeStore

NAMED_MAX = 8
"""The most damaged fragments that get a finding each. One more finding counts the others."""


async def examine_log(run: Run, store: EdgeStore, role: Role, runtime: Runtime) -> AsyncIterator[Finding]:
    """Yield findings about the commits of a run. The objects that they name are not verified: `replay` does that."""
    heal = f"isthmus heal {store.url} says what can be done"
    try:
        log = Log(run, store.at_start, runtime)
        await log.members.refresh(log.store)
        found = await look(log)
    except IsthmusError as error:
        yield Finding("log: commits", FAILURE, f"the log cannot be read: {error}", "see the findings of the store")
        return
    for p, why in list(found.wrong.items())[:NAMED_MAX]:
        yield Finding("log: commits", FAILURE, f"fragment {p}: {why}", heal)
    if len(found.wrong) > NAMED_MAX:
        yield Finding("log: commits", FAILURE, f"{len(found.wrong) - NAMED_MAX} more fragments are damaged", heal)
    if found.standing:
        named = ", ".join(map(str, found.standing))
        said = f"fragment {named} stands still: most others were merged {STANDS} times since it was"
        yield Finding("log: progress", WARNING, said, f"the syncers' logs say why; {heal}")
    if found.uncollected:
        said, _, advice = collects(store.url, found.uncollected).partition(". ")
        yield Finding("log: size", NOTE, said, advice)
    if role.kind in (RoleKind.OPERATOR, RoleKind.SYNCER):
        yield await runtime.offload(_speed, run, [head for head in found.heads if head is not None], runtime)
    if found.wrong:
        return
    commits = sum(head.version for head in found.heads if head is not None)
    if found.whole_log:
        yield Finding("log: commits", OK, f"none of {commits:,} is missing; isthmus replay verifies what they merged")
    else:
        said = f"none since the newest snapshots is missing; this role may not list all {commits:,}"
        yield Finding(
            "log: commits", NOTE, said, "run the doctor as a reader, a syncer or the operator to check all of them"
        )


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
