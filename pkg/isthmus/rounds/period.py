"""The period of a fragment: the steps from one upload to the next, adapted to how long rounds take. No I/O.

The lag is the time from the step at which an update is due until the version with that update is in the models. During
the lag, learners train on a version that will be replaced. That work is overwritten, or is merged later. If the lag is
a large part of the period, a longer period loses less. If a syncer is asked for more than it can do, a longer period
also asks it for less.
"""

LAGS = 3.0
"""The length of a period in lags, if that is more than the rules ask for: at most a third of a period is
overwritten."""


def next_period(period: float, lag: float, least: float, most: float) -> float:
    """Return the next period, from the present period and the lag that was measured in it; all in steps.

    T′ = T + (3·lag − T) / 4, at most doubled, between `least` and `most`. If rounds come every R steps whatever the
    learners want, the lag is R − T, and the period reaches its rest at 3·R/4 in one step. If the lag does not depend on
    the period, the period moves a quarter of the way to its rest at three lags each time. In cases between these two it
    moves further, but never past its rest, so the period does not oscillate (docs/design/rounds.md).
    """
    wanted = period + (LAGS * lag - period) / (1.0 + LAGS)
    return min(max(min(wanted, 2.0 * period), least), most)
