"""`isthmus board`: serve a page of a run, live and at any moment of its past; or write that page to one file."""

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from isthmus.agent.ports import bus_answers, open_log, open_ports
from isthmus.bus import default_bus, in_store
from isthmus.errors import InputError, Unavailable
from isthmus.runtime.urls import Place
from isthmus.store import EdgeStore
from isthmus_services.board.accounts import Costs
from isthmus_services.board.api import Api
from isthmus_services.board.feed import Feed, cache_of, following
from isthmus_services.board.server import address_of, is_loopback, served
from isthmus_services.output.progress import progress
from isthmus_services.output.report import require_free
from isthmus_services.process import logs
from isthmus_services.settings import declared, shared
from isthmus_services.settings.prices import prices_of

TOKEN_BYTES = 16


def run(settings: declared.Board) -> int:
    """Serve the board, or write it to a file."""
    logs.quiet()
    host, _ = address_of(settings.http)
    if settings.export is not None:
        require_free(settings.export, "--export", force=settings.force)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_export(settings) if settings.export is not None else _serve(settings, _token(settings, host)))
    return 0


def _token(settings: declared.Board, host: str) -> str | None:
    """Return the token that requests must carry: the chosen one, or a random one if other machines reach the address.

    None: no token, but a browser must address this machine by a loopback name. Raises `InputError`.
    """
    if settings.board_token_file is not None:
        try:
            chosen = Path(settings.board_token_file).read_text().strip()
        except OSError as error:
            raise InputError(f"--board-token-file {settings.board_token_file}: {error.strerror}") from None
        if not chosen:
            raise InputError(f"--board-token-file {settings.board_token_file} is empty")
        return chosen
    if settings.board_token:
        return settings.board_token
    return None if is_loopback(host) or settings.forwarded else secrets.token_urlsafe(TOKEN_BYTES)


async def _serve(settings: declared.Board, token: str | None) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with _feed(settings) as feed, served(feed, Api(feed, _costs(settings)), settings.http, token) as url:
        print(f"board of {feed.log.run.url}: {url}   (read-only; Ctrl-C stops it)", flush=True)
        if not feed.has_bus:
            print("no bus: the page shows only the log (add --bus URL)", flush=True)
        async with following(feed) as running:
            ended = asyncio.ensure_future(stopping.wait())
            waited: list[asyncio.Future[Any]] = [ended, running]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()  # raise its error: no page is better than one that no longer changes
            ended.cancel()


async def _export(settings: declared.Board) -> None:
    from isthmus_services.board.export import LISTEN_S, write

    assert settings.export is not None
    async with _feed(settings) as feed:
        with progress("reading the log") as say:
            reading = asyncio.ensure_future(feed.read_all())
            while not reading.done():
                say(feed.history.read)
                await asyncio.wait([reading], timeout=0.2)
            reading.result()
        if feed.has_bus:
            # Listen for a while to learn which processes take part.
            async with following(feed):
                await asyncio.sleep(LISTEN_S)
        else:
            await feed.save()
        with progress("writing the page") as say:
            size = await write(Path(settings.export), Api(feed, _costs(settings)), say)
    print(
        f"{settings.export}: the board of {feed.log.run.url}, {size / 1e6:.1f} MB; open it in any browser, even offline"
    )


@asynccontextmanager
async def _feed(settings: declared.Board) -> AsyncIterator[Feed]:
    trust, bus, holes = shared.owner_in(settings), _bus(settings), shared.holes_in(settings)
    if bus is None:
        async with open_log(settings.run, trust) as log:
            assert isinstance(log.store, EdgeStore), "opened by us"
            cache = cache_of(settings.run, log.run.digest, settings.cache)
            yield await _begun(Feed(log, log.store, None, cache, holes))
        return
    async with open_ports(settings.run, bus, trust=trust) as ports:
        with contextlib.suppress(Unavailable):
            await bus_answers(ports.bus)
        cache = cache_of(settings.run, ports.log.run.digest, settings.cache)
        yield await _begun(Feed(ports.log, ports.store, ports.bus, cache, holes))


async def _begun(feed: Feed) -> Feed:
    await feed.begin()
    return feed


def _bus(settings: declared.Board) -> str | None:
    """Return the URL of the bus to listen to. None: none is given, and the run's folder has none; none is created."""
    if settings.bus is None:
        beside = default_bus(settings.run)
        if not in_store(beside) and not os.path.exists(Place.of(beside).path):
            return None
    return shared.bus_of(settings, settings.run)


def _costs(settings: declared.Board) -> Costs:
    assumed: list[str] = []
    prices = prices_of(settings.prices, settings.gpu_hour, assumed if settings.learner_gpus else [])
    if settings.learner_gpus is None:
        assumed.append("the cost of GPUs is not known (--learner-gpus N)")
    if prices.egress_gb:
        assumed.append("all learners are outside the store's region, for egress (egress_gb in a file, --prices)")
    return Costs(prices, settings.learner_gpus, "; ".join(assumed))
