"""`isthmus syncer`: fold the log, then serve until told to stop. SIGTERM finishes the merges under way."""

import argparse
import asyncio
import logging
import signal

from isthmus import kernels
from isthmus.records.fields import require_name
from isthmus.runtime import random_id
from isthmus.store import require_create_only
from isthmus.syncer import Syncer
from isthmus_services import logs, options
from isthmus_services.ports import open_ports

logger = logging.getLogger("isthmus.services.syncer")

DRAIN_S = 20.0
"""Merges under way get this long after SIGTERM; after that they are left to the next syncer."""


def run(arguments: argparse.Namespace) -> int:
    """Serve a run."""
    logs.configure()
    name = arguments.name or f"syncer-{random_id()[:6]}"
    require_name("--name", name)
    kernels.warm()
    asyncio.run(_serve(arguments, name))
    return 0


async def _serve(arguments: argparse.Namespace, name: str) -> None:
    stopping = asyncio.Event()
    async with open_ports(arguments.run, options.bus_of(arguments, arguments.run)) as ports:
        await require_create_only(ports.store, ports.runtime)
        pace = options.pace_of(arguments, ports.log.run.pace)
        syncer = Syncer(ports.log, ports.store, ports.bus, ports.runtime, name, pace)
        started = ports.runtime.now()
        await syncer.recover()
        heads = [keeper.head for keeper in syncer.keepers]
        logger.info(
            "%s serves %s: %d fragments, versions %d to %d, folded in %.2f s",
            name,
            ports.log.run.url,
            len(heads),
            min(heads),
            max(heads),
            ports.runtime.now() - started,
        )
        loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(syncer.run(stopping))

        def stop() -> None:
            logger.info("%s stops: merges under way are finished", name)
            stopping.set()
            loop.call_later(DRAIN_S, serving.cancel)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        try:
            await serving
        except asyncio.CancelledError:
            if not stopping.is_set():
                raise
            logger.warning("%s: not through after %g s, the next syncer goes on from the log", name, DRAIN_S)
        logger.info("%s made %d commits, lost %d races", name, syncer.tallies.commits, syncer.tallies.commits_lost)
