"""A warning that comes again and again is written a few times, then once a minute with the number left out."""

import logging

from isthmus.runtime.log_lines import REPEATS, REPEATS_S, Repeats


def record(at: float, *, level: int = logging.WARNING, line: int = 1, learner: str = "a") -> logging.LogRecord:
    found = logging.LogRecord("isthmus.x", level, "x.py", line, "rejected %s", ("u",), None)
    found.created, found.learner = at, learner
    return found


def test_most_of_a_flood_is_left_out_and_counted() -> None:
    repeats = Repeats()
    kept = [one for at in range(300) if repeats.filter(one := record(float(at)))]
    assert [r.getMessage() for r in kept[:REPEATS]] == ["rejected u"] * REPEATS
    assert len(kept) == REPEATS + (300 - REPEATS) // int(REPEATS_S)
    assert {r.getMessage() for r in kept[REPEATS:]} == {f"rejected u ({REPEATS_S - 1:.0f} more like it were left out)"}


def test_other_kinds_learners_and_levels_are_written() -> None:
    repeats = Repeats()
    assert not all(repeats.filter(record(0.0)) for _ in range(9))
    assert repeats.filter(record(0.0, line=2))
    assert repeats.filter(record(0.0, learner="b"))
    assert all(repeats.filter(record(0.0, level=logging.ERROR)) for _ in range(9))
    assert all(repeats.filter(record(0.0, level=logging.INFO)) for _ in range(9))


def test_a_flood_that_had_ended_begins_anew() -> None:
    repeats = Repeats()
    for _ in range(9):
        repeats.filter(record(0.0))
    assert sum(repeats.filter(record(3 * REPEATS_S)) for _ in range(9)) == REPEATS
