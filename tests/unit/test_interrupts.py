"""Signals are held back until a block of code is done."""

import signal
import threading
from collections.abc import Iterator

import pytest

from isthmus.interrupts import held_back


class Stopped(Exception):
    """The exception that the SIGTERM handler raises."""


def stop(*_: object) -> None:
    raise Stopped


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, stop)
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Stopped)])
def test_what_a_handler_raises_comes_when_the_block_is_done(number: signal.Signals, error: type[BaseException]) -> None:
    before, done = signal.getsignal(number), []
    with pytest.raises(error):  # noqa: SIM117
        with held_back():
            signal.raise_signal(number)
            signal.raise_signal(number)
            done.append("whole")
    assert done == ["whole"]
    assert signal.getsignal(number) is before


def test_without_a_signal_nothing_is_raised_and_handlers_are_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with held_back():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with pytest.raises(KeyError), held_back():
        raise KeyError
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_that_is_ignored_or_ends_the_process_stays_so() -> None:
    for handler in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGINT, handler)
        with held_back():
            assert signal.getsignal(signal.SIGINT) is handler


def test_on_other_threads_there_is_nothing_to_hold_back() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def look() -> None:
        with held_back():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]
