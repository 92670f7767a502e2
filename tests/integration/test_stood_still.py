"""A round that was open, or being merged, while its syncer stood still is begun again with newer updates."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from isthmus.format.rules import Pace, Rules
from isthmus.store import Layer
from support.world import commit_of, in_virtual_time, seed_of, serving, train, until, world

T = TypeVar("T")
STOOD_S = 20.0


@pytest.mark.parametrize(
    ("prefix", "nth"),
    [("values/", 1), ("updates/", 1), ("updates/", 2)],
    ids=["while it merges", "while it fetches", "with an update in"],
)
@in_virtual_time
async def test_what_was_begun_before_is_not_committed(
    prefix: str, nth: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    at: list[float] = []
    versions: list[int] = []
    seen = 0

    class Stands(Layer):
        """Lets the syncer stand still in the middle of a request, once."""

        async def _through(self, operation: str, key: str, send: Callable[[], Awaitable[T]]) -> T:
            nonlocal seen
            result = await send()
            seen += key.startswith(prefix) and operation != "list" and syncer.coordinators[0].head >= 3
            if seen == nth and not at:
                await asyncio.sleep(0.005)
                at.append(w.runtime.wall())
                versions.append(syncer.coordinators[0].head + 1)
                syncer._stood_still(STOOD_S)
            return result

    pace = Pace(heartbeat_s=0.5, silence_s=1.5)
    async with world(folder, seed_of(Rules(fragments=1, sync_every=8), pace)) as w:
        async with serving(w.through(Stands).syncer("s1")) as syncer:
            learners = [w.learner(name) for name in "ab"]
            enough = lambda: bool(at) and syncer.coordinators[0].head >= versions[0] + 3  # noqa: E731
            training = [asyncio.ensure_future(train(one, 8, step_s=0.1, enough=enough)) for one in learners]
            await until(lambda: at and syncer.coordinators[0].head >= versions[0], "it goes on")
            await asyncio.gather(*training)
        found = (await commit_of(w, 0, versions[0])).header
        assert found.waited.opened_at >= at[0], "the round was opened anew"
        assert sorted(given.learner for given in found.inputs) == ["a", "b"]
        assert all(given.taken_at > at[0] for given in found.inputs), "by updates of after that"
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []
