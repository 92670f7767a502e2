"""Shared by tests of the board: a run, its board over HTTP, and a function to query it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from isthmus.format.rules import Rules
from isthmus.log import Log
from isthmus_services.board.accounts import Costs
from isthmus_services.board.api import Api
from isthmus_services.board.feed import Feed, following
from isthmus_services.board.prices import Prices
from isthmus_services.board.server import served
from isthmus_services.settings.prices import prices_of
from support.world import World, seed_of, serving, train, until, world

ONE = "127.0.0.1:0"


def costs() -> Costs:
    prices: Prices = prices_of(None, None, [])
    return Costs(prices, 8.0, "")


@asynccontextmanager
async def a_board(
    log: Log, w: World | None = None, cache: Path | None = None, token: str | None = None, follow: bool = True
) -> AsyncIterator[tuple[str, Feed]]:
    """Serve the board of a run; with a world, also listen to its bus."""
    feed = Feed(log, log.store, w.bus if w else None, cache)  # type: ignore[arg-type]
    await feed.begin()
    async with served(feed, Api(feed, costs()), ONE, token) as url:
        base = url.split("?")[0].rstrip("/")
        if not follow:
            yield base, feed
            return
        async with following(feed):
            await until(lambda: not feed.reading, "the log was read")
            yield base, feed


@asynccontextmanager
async def a_run(
    place: Path | str, learners: tuple[str, ...] = ("a", "b"), steps: int = 30, bus: str | None = None
) -> AsyncIterator[World]:
    """Create a run whose learners are done."""
    async with world(place, seed_of(Rules(fragments=3, sync_every=3)), bus) as w:
        async with serving(w.syncer("s1")) as syncer:
            await asyncio.gather(
                *(
                    train(w.learner(n), steps, enough=lambda: min(k.head for k in syncer.coordinators) >= 4)
                    for n in learners
                )
            )
        yield w


async def ask(url: str, question: str, status: int = 200, **more: Any) -> Any:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/api/{question}", **more) as answer:
        body = await answer.json()
        assert answer.status == status, body
        return body
