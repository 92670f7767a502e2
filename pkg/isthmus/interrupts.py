"""Delay Ctrl-C while something runs that must not be left half done."""

# ruff: noqa: TID251  (threads: only to ask which one this is)
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Delay the handlers of SIGINT and SIGTERM until the block is done.

    Python runs handlers on the main thread, between any two instructions. If a handler raises, the interrupted work is
    left half done. On other threads there is nothing to hold back. A signal without a handler ends the process as
    before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _held(signal.SIGTERM), _held(signal.SIGINT):
        yield


@contextmanager
def _held(number: signal.Signals) -> Iterator[None]:
    handler = signal.getsignal(number)
    if not callable(handler):
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(number, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(number, handler)
        if came:
            handler(number, came[-1])
