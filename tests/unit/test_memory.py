"""The pool keeps freed memory for the next array of its size, and never reuses memory that a view still shows."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from isthmus.format import memory
from isthmus.format.memory import SMALLEST, Pool
from isthmus.format.records import frame
from isthmus.format.records.objects import SCHEMA, SegmentHeader

SIZE = 2 * SMALLEST


def address(x: np.ndarray[Any, Any]) -> int:
    return int(x.__array_interface__["data"][0])


def test_what_is_gone_is_there_for_the_next_of_its_size() -> None:
    pool = Pool(10 * SIZE)
    first = pool.take(SIZE)
    at = address(first)
    assert pool.kept == 0
    del first
    assert pool.kept == SIZE
    other = pool.take(SIZE + 8)
    assert address(other) != at
    again = pool.take(SIZE)
    assert (address(again), pool.kept) == (at, 0)
    assert address(pool.take(SIZE)) != at


def test_nothing_is_given_away_that_a_view_still_shows() -> None:
    pool = Pool(10 * SIZE)
    looks: list[Callable[[Any], Any]] = [
        lambda x: x[5:9],
        lambda x: x.view(np.float32)[1:][2:],
        lambda x: memoryview(x)[3:],
        lambda x: np.frombuffer(x.data, np.uint16)[7:],
        lambda x: x.view(np.float32).reshape(2, -1)[1].T,
    ]
    for look in looks:
        array = pool.take(SIZE)
        at = address(array)
        view = look(array)
        del array
        gc.collect()
        assert pool.kept == 0
        assert address(pool.take(SIZE)) != at
        kept = pool.kept
        del view
        assert pool.kept == kept + SIZE
        pool = Pool(10 * SIZE)


def test_no_more_is_kept_than_may_be() -> None:
    pool = Pool(2 * SIZE)
    held = [pool.take(SIZE) for _ in range(5)]
    del held
    assert pool.kept == 2 * SIZE


def test_what_is_of_other_sizes_makes_way() -> None:
    pool = Pool(4 * SIZE)
    held = [pool.take(SIZE) for _ in range(4)]
    del held
    large = pool.take(3 * SIZE)
    del large
    assert pool.kept == 4 * SIZE
    again = pool.take(3 * SIZE)
    assert pool.kept == SIZE, "the large array was kept, beside one of the others"
    del again
    pool.take(5 * SIZE)
    assert pool.kept <= 4 * SIZE


def test_little_is_left_to_the_allocator() -> None:
    pool = Pool(10 * SIZE)
    pool.take(SMALLEST - 1)
    assert pool.kept == 0


def test_threads_that_take_and_give_never_share() -> None:
    pool, wrong = Pool(100 * SIZE), []

    def work(mark: int) -> None:
        for _ in range(200):
            x = pool.take(SIZE)
            x[:64] = mark
            y = x[:64]
            del x
            if not (y == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_zeros_are_zeros_and_drafts_too_in_memory_that_held_other_things() -> None:
    for n in (10, SIZE):
        x = memory.empty(n)
        x.fill(7.0)
        del x
        assert not memory.zeros(n).any()
    y = memory.room(SIZE)
    y.fill(255)
    size = len(frame.draft(frame.Kind.SEGMENT, frame_header(), 0).blob)
    del y
    out = frame.draft(frame.Kind.SEGMENT, frame_header(), SIZE - size)
    assert len(out.blob) == SIZE
    assert not np.frombuffer(out.payload, np.uint8).any()
    assert bytes(memory.copy(np.arange(5.0))) == bytes(np.arange(5.0))


def frame_header() -> SegmentHeader:
    return SegmentHeader(schema=SCHEMA, run=bytes(32), fragment=0, first=1, sizes=(1,))
