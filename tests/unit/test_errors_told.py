"""No line on a log ends with nothing where its reason should stand."""

from isthmus.errors import Unavailable, told


def test_an_error_that_says_nothing_is_told_by_its_name() -> None:
    assert told(TimeoutError()) == "TimeoutError"
    assert told(Unavailable("the store is away")) == "the store is away"
