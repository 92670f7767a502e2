"""What is remembered of live learners from event to event is what would be found by looking at all of them."""

import random
import statistics

from isthmus.format.rules import Pace
from isthmus.rounds.live_learners import FORGET_SILENCES, LiveLearners

NAMES = [f"l{i}" for i in range(6)]


def test_who_is_here_and_what_is_usual_follow_from_all_that_was_heard() -> None:
    draw, pace = random.Random(7), Pace(silence_s=3.0)
    live, now = LiveLearners(pace, 0.0), 0.0
    incarnation, heard = dict.fromkeys(NAMES, 1), dict[str, tuple[float, float]]()
    seen = set()
    for _ in range(4000):
        now += draw.choice((0.0, 0.1, 0.7))
        name = draw.choice(NAMES)
        match draw.randrange(12):
            case 0:
                live.left(name, incarnation[name])
                heard.pop(name, None)
                incarnation[name] += 1
            case 1:
                now += draw.choice((1.0, 4.0, 3.0 * FORGET_SILENCES))
                for gone in live.forget(now):
                    heard.pop(gone, None)
            case _:
                step_s = draw.choice((0.0, 1.0, 2.0, 5.0))
                live.heard(name, incarnation[name], now, step_s=step_s)
                heard[name] = now, step_s or heard.get(name, (0.0, 0.0))[1]
        here = {who for who, (at, _) in heard.items() if at >= now - pace.silence_s}
        assert live.expected((), now) == here
        steps = [step_s for _, step_s in heard.values() if step_s]
        assert live.usual_step_s() == (statistics.median_low(steps) if steps else 0.0)
        seen.add(len(here))
    assert seen == set(range(len(NAMES) + 1))
