"""If a busy machine closed a round late, `whatif` decides this round and the next one as the log records them."""

from types import SimpleNamespace
from typing import cast

import msgspec

from isthmus.format.records.objects import Seen
from isthmus.format.rules import Pace, Rules
from isthmus.inspect import whatif
from isthmus.log import Commit, Log
from isthmus.rounds.events import ClosedBy
from isthmus.rounds.grace import Terms, adaptive_grace
from support.commits import RUN, committed, given

LEARNERS = ("a", "b", "c", "d")
PACE = Pace(quorum=2, heartbeat_s=1.0, silence_s=4.0)
RULES = Rules(fragments=1, sync_every=4)
TERMS = Terms(fastest_step_s=0.1, slowest_step_s=0.1, sync_s=0.1, cap_s=0.2)
AT_QUORUM_S = 0.02
GRACE_S = adaptive_grace(PACE, RULES.sync_every, TERMS, AT_QUORUM_S).seconds


def round_of(version: int, closed_by: ClosedBy, waited_s: float, *seen: tuple[float, str], **changed: float) -> Commit:
    """Return the commit of a round that saw these updates arrive, each made on the version before."""
    header = committed(version, *(given(learner, version - 1, version) for _, learner in seen))
    waited = msgspec.structs.replace(
        header.waited,
        called_by=seen[0][1],
        closed_by=closed_by.value,
        expected=LEARNERS,
        missing=tuple(name for name in LEARNERS if name not in {learner for _, learner in seen}),
        waited_s=waited_s,
        hold_s=-1.0,
        seen=tuple(Seen(at, "in", learner) for at, learner in seen),
        **changed,
    )
    return Commit(msgspec.structs.replace(header, waited=waited), bytes(32))


def told(*commits: Commit) -> list[list[str]]:
    """Return the learners in each round, decided anew under the recorded pace."""
    log = cast(Log, SimpleNamespace(run=SimpleNamespace(pace=PACE, rules=RULES, digest=RUN)))
    return [[i.learner for i in inputs] for inputs in whatif.decide(log, commits, (), {})]


def test_what_one_round_was_late_by_is_not_taken_off_the_grace_of_the_next() -> None:
    nobody = {"boundary_s": 0.0, "quorum_s": 0.0, "grace_s": 0.0, "fastest_step_s": 0.0, "slowest_step_s": 0.0}
    known = {"boundary_s": 0.0, "quorum_s": AT_QUORUM_S, "grace_s": GRACE_S, "gives_up_s": 2.0}
    known |= {name: getattr(TERMS, name) for name in ("fastest_step_s", "slowest_step_s", "sync_s", "cap_s")}
    late = round_of(1, ClosedBy.DEADLINE, 3.0, (0.01, "a"), gives_up_s=1.0, sync_s=0.0, cap_s=0.0, **nobody)
    in_grace = AT_QUORUM_S + 0.9 * GRACE_S
    seen = (0.01, "a"), (AT_QUORUM_S, "b"), (in_grace, "c")
    assert GRACE_S > 0.0
    after = round_of(2, ClosedBy.GRACE, AT_QUORUM_S + GRACE_S, *seen, **known)
    assert told(late, after) == [["a"], ["a", "b", "c"]]


def test_a_round_that_was_to_be_given_up_when_nobody_looked_takes_what_came_until_somebody_did() -> None:
    known = {"boundary_s": 0.0, "quorum_s": 0.44, "grace_s": 0.0, "gives_up_s": 0.38, "fastest_step_s": 0.0}
    late = round_of(
        1, ClosedBy.GRACE, 0.44, (0.01, "a"), (0.44, "b"), slowest_step_s=0.0, sync_s=0.0, cap_s=0.0, **known
    )
    assert told(late) == [["a", "b"]]
