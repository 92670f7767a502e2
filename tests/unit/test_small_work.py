"""Small work is done on the event loop, but not before the kernels that it calls were loaded in a thread."""

import threading

import pytest

from isthmus.runtime.clock import SmallWork, threaded


async def test_small_work_is_done_on_the_loop_once_it_has_been_done_in_a_thread() -> None:
    loop, seen = threading.get_ident(), []

    def work(fails: bool) -> int:
        seen.append(threading.get_ident() == loop)
        return 1 // (not fails)

    with threaded(2) as runtime:
        small, large = SmallWork(runtime, small=True), SmallWork(runtime, small=False)
        for fails in (True, False, False, True):
            if fails:
                with pytest.raises(ZeroDivisionError):
                    await small(work, fails)
            else:
                assert await small(work, fails) == 1
        assert seen == [False, False, True, True]
        for _ in range(2):
            await large(work, False)
        assert seen[4:] == [False, False]
