"""How long a fragment's period is: the steps from one upload to the next, adapted to how long rounds take. No I/O.

From the step at which an update is due until the version that has it is in the models, learners train on a version that
will be replaced: the lag. What they do meanwhile is overwritten, or comes later. Where the lag is a large part of the
period, a longer period loses less; where a syncer is asked for more than it can do, it also asks for less.
"""

LAGS = 3.0
"""A period is so many lags, where that is more than the rules say: of a period a third is overwritten at most."""


def next_period(period: float, lag: float, least: float, most: float) -> float:
    """Return the period after one in which the lag was so long; all in steps.

    T′ = T + (3·lag − T) / 4, at most doubled, between `least` and `most`. Where rounds come every R steps whatever
    their learners want, the lag is R − T, and the next period is 3·R/4 at once. Where the lag does not depend on the
    period, the period goes a quarter of the way to three lags each time. Between the two it goes more of the way, and
    never beyond it, so the period does not swing (docs/design/rounds.md).
    """
    wanted = period + (LAGS * lag - period) / (1.0 + LAGS)
    return min(max(min(wanted, 2.0 * period), least), most)
