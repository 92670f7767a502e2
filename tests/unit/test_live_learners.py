"""What is remembered of live learners from event to event is what would be found by looking at all of them."""

import random
import statistics

import pytest

from isthmus.format.rules import Pace
from isthmus.rounds.live_learners import FORGET_SILENCES, LiveLearners

NAMES = [f"l{i}" for i in range(6)]


def test_who_is_here_and_what_is_usual_follow_from_all_that_was_heard() -> None:
    draw, pace = random.Random(7), Pace(silence_s=3.0)
    live, now, deaf_before = LiveLearners(pace, 0.0), 0.0, 0.0
    incarnation, heard, gone = dict.fromkeys(NAMES, 1), dict[str, tuple[float, float]](), set[str]()
    seen, only_recent = set(), 0
    for _ in range(4000):
        now += draw.choice((0.0, 0.1, 0.7))
        name = draw.choice(NAMES)
        match draw.randrange(14):
            case 0:
                live.left(name, incarnation[name])
                heard.pop(name, None)
                gone.add(name)
                incarnation[name] += 1
            case 1:
                now += draw.choice((1.0, 4.0, 3.0 * FORGET_SILENCES))
                for forgotten in live.forget(now):
                    heard.pop(forgotten, None)
            case 2:  # started again without a word: the durations may be another machine's
                incarnation[name] += 1
                live.heard(name, incarnation[name], now)
                heard[name] = now, 0.0
                gone.discard(name)
            case 3:
                live.gap(now, 0.0)
                deaf_before = now
                assert live.all_heard_at == now + pace.heartbeat_s
            case 4 if name in gone:
                live.heard(name, incarnation[name] - 1, now, step_s=9.0)  # on its way since before it left
            case _:
                step_s = draw.choice((0.0, 1.0, 2.0, 5.0))
                live.heard(name, incarnation[name], now, step_s=step_s)
                heard[name] = now, step_s or heard.get(name, (0.0, 0.0))[1]
                gone.discard(name)
        here = {who for who, (at, _) in heard.items() if at >= now - pace.silence_s}
        assert live.expected((), now) == here
        recent = set(draw.sample(NAMES, draw.randrange(3)))
        silence_proves_nothing = {who for who in recent - gone if deaf_before >= now - pace.silence_s}
        assert live.expected(recent, now) == here | silence_proves_nothing
        steps = [step_s for _, step_s in heard.values() if step_s]
        assert live.usual_step_s() == (statistics.median_low(steps) if steps else 0.0)
        seen.add(len(here))
        only_recent += bool(silence_proves_nothing - here)
    assert seen == set(range(len(NAMES) + 1))
    assert only_recent > 20


@pytest.mark.parametrize(
    ("away_s", "waits_s"),
    [(0.0, None), (0.5, None), (0.6, 3.0), (15.0, 3.0), (60.0, 12.0), (300.0, 30.0), (1e6, 30.0)],
)
def test_after_an_outage_learners_of_the_last_commits_are_waited_for(away_s: float, waits_s: float | None) -> None:
    """Rounds wait for a fifth of an outage, within bounds; a gap of no more than two leads changes nothing."""
    pace = Pace(heartbeat_s=1.0, silence_s=3.0)
    live = LiveLearners(pace, 0.0)
    live.heard("here", 1, 10.0, step_s=0.125, upload_s=0.125)
    live.gap(1000.0, away_s)
    long = waits_s is not None
    assert (live.back_at == 1000.0) == long
    assert live.all_heard_at == 1000.0 + (pace.heartbeat_s if waits_s is None else waits_s)
    until = 1000.0 + (waits_s or pace.silence_s)
    assert live.expected(["gone"], until) == {"gone"}
    assert live.expected(["gone"], until + 0.01) == set()
