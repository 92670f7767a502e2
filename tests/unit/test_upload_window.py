"""A link carries as many uploads at once as make it faster. The window learns their number from their durations."""

import itertools

import pytest

from isthmus.learner.upload_window import LIMIT_MAX, TRIES_MAX, Window

SIZE = 1000


class Link:
    """A link with a bandwidth that all bodies on it share, and a round trip that each body takes besides."""

    def __init__(self, bytes_s: float, round_trip_s: float = 0.0) -> None:
        self.bytes_s, self.round_trip_s = bytes_s, round_trip_s
        self.window = Window()
        self.now = 0.0
        self.limits: list[int] = []

    def alone(self) -> None:
        """Send one body by itself, as the first one is sent."""
        number = self.window.began(SIZE, self.now)
        self.now += self.round_trip_s + SIZE / self.bytes_s
        self.window.ended(number, self.now, stored=True)

    def batch(self) -> None:
        """Send as many bodies at once as the window allows; each takes as long as all of them together."""
        numbers = [self.window.began(SIZE, self.now) for _ in range(self.window.limit)]
        self.now += self.round_trip_s + len(numbers) * SIZE / self.bytes_s
        for number in numbers:
            self.window.ended(number, self.now, stored=True)
        self.limits.append(self.window.limit)


def test_on_a_thin_link_bodies_go_one_after_another() -> None:
    link = Link(bytes_s=100.0)
    link.alone()
    for _ in range(30):
        link.batch()
    assert link.limits[-1] == 1
    assert set(link.limits[-10:]) <= {1, 2}, "a second upload is tried now and then"


def test_where_round_trips_take_the_time_more_go_at_once() -> None:
    link = Link(bytes_s=1e9, round_trip_s=1.0)
    link.window.limit = 1
    for _ in range(30):
        link.batch()
    assert link.limits[-1] == LIMIT_MAX


def test_what_was_too_much_is_tried_again_ever_more_seldom_but_for_ever() -> None:
    link = Link(bytes_s=100.0)
    link.alone()
    for _ in range(1000):
        link.batch()
    tries = [i for i, limit in enumerate(link.limits) if limit == 2]
    between = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert 10 < tries[0] < between[0]
    assert set(between) == {TRIES_MAX}


def test_an_upload_that_came_to_nothing_says_nothing_of_the_link() -> None:
    window = Window()
    number = window.began(SIZE, 0.0)
    window.ended(number, 1.0, stored=True)
    for _ in range(20):
        number = window.began(SIZE, 10.0)
        window.ended(number, 1000.0, stored=False)
    assert (window.upload_s, window.limit) == (1.0, LIMIT_MAX)
    assert not window.full


def test_bodies_that_came_in_beside_one_count_as_much_as_those_that_were_there() -> None:
    """The first of four uploads was alone when it began. It took four times as long because of the others."""
    window = Window()
    number = window.began(SIZE, 0.0)
    window.ended(number, 1.0, stored=True)
    first, *others = [window.began(SIZE, 10.0) for _ in range(4)]
    window.ended(first, 14.0, stored=True)
    assert window.limit == LIMIT_MAX - 1
    del others


def test_the_wire_is_free_when_the_first_of_those_on_it_is_through() -> None:
    window = Window()
    number = window.began(SIZE, 0.0)
    window.ended(number, 2.0, stored=True)
    window.limit = 2
    window.began(SIZE, 10.0)
    assert window.free_at == 0.0, "the window has room"
    window.began(SIZE, 11.0)
    assert window.free_at == 12.0


@pytest.mark.parametrize(
    ("in_hand", "free_at", "wanted"),
    [(1, 0.0, True), (2, 105.0, True), (2, 105.1, False), (2, 200.0, False), (3, 0.0, False)],
)
def test_one_more_is_captured_than_fits_where_the_wire_is_free_before_the_next_step(
    in_hand: int, free_at: float, wanted: bool
) -> None:
    window = Window()
    window.limit, window.free_at = 2, free_at
    assert window.room(in_hand, 100.0, 5.0) is wanted
