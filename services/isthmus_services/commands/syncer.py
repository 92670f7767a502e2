"""`isthmus syncer`: check the store, read the log, and merge until stopped. SIGTERM finishes the merges under way."""

import asyncio
import gc
import logging
import math
import os
import platform
import shutil
import signal
from collections.abc import Awaitable, Callable

from isthmus import codecs
from isthmus.agent.ports import bus_answers, known_run, open_place, open_ports, patiently
from isthmus.agent.speed import Speeds, glance, too_slow
from isthmus.bus import open_bus
from isthmus.errors import IsthmusError
from isthmus.format.records.fields import require_name
from isthmus.format.rules import MemberRole, Rules
from isthmus.log import Log
from isthmus.log import gc as garbage
from isthmus.log.holes import Holes
from isthmus.log.log_health import collects, uncollected
from isthmus.log.membership import require_may
from isthmus.log.polar import require_gpu
from isthmus.log.trust import Trust
from isthmus.runtime.clock import Runtime, cores, random_id
from isthmus.runtime.urls import Place
from isthmus.store import require_create_only
from isthmus.syncer import Syncer
from isthmus.wording import key_flag
from isthmus_services.commands.gc import line_of
from isthmus_services.process import logs
from isthmus_services.process.health_server import HealthServer, shown
from isthmus_services.process.minutes import EVERY_S, SyncerMinute
from isthmus_services.settings import declared, shared
from isthmus_services.settings.resolve import host_name

logger = logging.getLogger("isthmus.services.syncer")

HOUR_S = 3600.0
SPACE_S, DAY_S = 600.0, 86400.0
"""Seconds between checks of the free space, and between warnings about a run whose garbage is never collected."""

SPACE_LEAST = 0.1
"""Share of the disk that should be free."""

DRAIN_S = 20.0
"""Seconds that merges under way may take after SIGTERM; after that, they are left to the next syncer."""


def run(settings: declared.Syncer) -> int:
    """Serve a run until told to stop."""
    name = host_name(settings.name) if settings.name else f"syncer-{random_id()[:6]}"
    require_name("--name", name)
    logs.configure(settings.log_format, settings.log_level, service="syncer", run=settings.run, syncer=name)
    if settings.gpu:
        logger.info("%s computes the matrices of isotropic merges on a GPU: %s", name, require_gpu())
    board = HealthServer("syncer")
    with shown(board, settings.http):
        asyncio.run(_serve(settings, name, board))
    return 0


def _own_name(log: Log) -> str | None:
    """Return the name of the one syncer that this process's key is for; None if it is for several, or for a pattern."""
    names = log.members.current.names_of(log.signer.author, MemberRole.SYNCER) if log.signer is not None else []
    return names[0] if len(names) == 1 and not names[0].endswith("*") else None


async def _serve(settings: declared.Syncer, name: str, board: HealthServer) -> None:
    stopping = asyncio.Event()
    bus = shared.bus_of(settings, settings.run)
    trust = shared.trust_in(settings)
    if settings.wait and not await _there(settings.run, bus, name, board, trust):
        return
    async with open_ports(settings.run, bus, trust=trust, compute=settings.threads, gpu=settings.gpu) as ports:
        if not settings.name and ports.log.members.signed:
            require_may(ports.log.members, ports.log.signer, MemberRole.SYNCER)
            name = _own_name(ports.log) or name
            logs.configure(settings.log_format, settings.log_level, service="syncer", run=settings.run, syncer=name)
        trust.take_part(ports.log.run, ports.log.members, bus, MemberRole.SYNCER, name)
        if settings.collect is not None:
            require_may(ports.log.members, ports.log.signer, MemberRole.COLLECTOR)
        await bus_answers(ports.bus)
        pace = shared.pace_of(settings, ports.log.run.pace)
        if differs := [
            f"{f} {getattr(pace, f)} instead of {of_run}"
            for f in pace.__struct_fields__
            if getattr(pace, f) != (of_run := getattr(ports.log.run.pace, f))
        ]:
            logger.warning(
                "%s serves at another pace than the run's (%s): give all its syncers these settings, since any of them "
                "may open the next round of a fragment", name, ", ".join(differs),
            )  # fmt: skip
        holes = shared.holes_in(settings)
        syncer = Syncer(ports.log, ports.store, ports.bus, ports.runtime, name, pace, accepted=holes)
        started = ports.runtime.now()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(require_create_only(ports.store, ports.runtime))
            tasks.create_task(syncer.recover())
        heads = [coordinator.head for coordinator in syncer.coordinators]
        logger.info(
            "%s serves %s: %d fragments, versions %d to %d, read in %.2f s, as process %d on %s",
            name,
            ports.log.run.url,
            len(heads),
            min(heads),
            max(heads),
            ports.runtime.now() - started,
            os.getpid(),
            platform.node(),
        )
        loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(syncer.run(stopping))
        board.serves(syncer.vitals, syncer.metrics)

        def stop(number: signal.Signals) -> None:
            logger.info("%s was asked to stop by %s: merges under way are finished", name, number.name)
            board.stops()
            stopping.set()
            loop.call_later(DRAIN_S, serving.cancel)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        logs.serving()
        # Load compiled kernels before the first merge needs them, but not before the syncer has started to serve.
        warming = asyncio.ensure_future(_warm(syncer, ports.log))
        minutes = asyncio.ensure_future(_minutes(SyncerMinute(name, syncer.metrics)))
        collecting = asyncio.ensure_future(_collect(ports.log, settings.collect, holes))
        growing = asyncio.ensure_future(_watch_space(syncer, ports.log))
        try:
            await serving
        except asyncio.CancelledError:
            if not stopping.is_set():
                raise
            logger.warning("%s: did not finish within %g s; the next syncer continues from the log", name, DRAIN_S)
        finally:
            for task in (minutes, warming, collecting, growing):
                task.cancel()
            await asyncio.gather(minutes, warming, collecting, growing, return_exceptions=True)
        logger.info("%s ends: %d commits, %d races lost", name, syncer.tallies.commits, syncer.tallies.races_lost)


async def _warm(syncer: Syncer, log: Log) -> None:
    """Load the kernels; then log a warning, at most once an hour, while this machine merges too slowly."""
    try:
        speeds = await log.runtime.offload(_settle, log.run.rules, log.runtime)
    except Exception:
        logger.warning("the kernels cannot be loaded ahead of the first merge, which will try again", exc_info=True)
        return
    said = -math.inf
    while True:
        await asyncio.sleep(EVERY_S)
        # `too_slow` takes the cores of all syncers. This syncer holds a share of the fragments, so scale its cores up.
        share = len(syncer.held) / len(syncer.coordinators)
        step_s, learners = syncer.heard_of
        slow = share and too_slow(
            speeds, log.run.layout, log.run.rules, learners=learners, step_s=step_s, cores=cores() / share
        )
        if slow and log.runtime.now() - said >= HOUR_S:
            logger.warning("%s", slow)
            said = log.runtime.now()


def _settle(rules: Rules, runtime: Runtime) -> Speeds:
    """Load the kernels and time them; then exempt all objects that exist from Python's garbage collection.

    A full collection that includes the compiler's objects would stop the event loop for 70 ms now and then.
    """
    codecs.warm(rules.codec_up, rules.codec_down)
    speeds = glance(runtime.now, rules, runtime.compute)
    logger.info("this machine merges %s", speeds)
    gc.collect()
    gc.freeze()
    return speeds


async def _minutes(minute: SyncerMinute) -> None:
    """Log the syncer's progress once a minute until cancelled."""
    while True:
        await asyncio.sleep(EVERY_S)
        line, facts = minute.say()
        logger.info("%s", line, extra=facts)


async def _watch_space(syncer: Syncer, log: Log) -> None:
    """Log a warning while the run's disk is nearly full, and once a day if the run's garbage is never collected."""
    said = -math.inf
    while True:
        await asyncio.sleep(SPACE_S)
        try:
            free = await log.runtime.offload(_share_free, log.run.url)
            versions = await uncollected(log, syncer.coordinators[0].head)
        except (IsthmusError, OSError) as error:
            logger.debug("cannot determine the free space: %s", error)
            continue
        if free < SPACE_LEAST:
            logger.warning(
                "only %.0f %% of the disk of %s is free: isthmus gc %s lists what can be deleted, and "
                "--apply%s deletes it",
                100 * free, log.run.url, log.run.url, key_flag("collector", signed=log.members.signed),
            )  # fmt: skip
        elif versions and log.runtime.now() - said >= DAY_S:
            logger.warning("%s", collects(log.run.url, versions, signed=log.members.signed))
            said = log.runtime.now()


def _share_free(url: str) -> float:
    """Return the free share of the disk that holds a run's folder; 1 for a run in a bucket."""
    folder = Place.of(url).folder
    if folder is None:
        return 1.0
    usage = shutil.disk_usage(folder)
    return usage.free / max(1, usage.total)


async def _collect(log: Log, every_s: float | None, accepted: Holes) -> None:
    """Collect garbage every `every_s` seconds until cancelled; do nothing if it is None."""
    while every_s is not None:
        await asyncio.sleep(every_s)

        async def once() -> garbage.Garbage:
            plan = await garbage.plan(log, accepted=accepted)
            await garbage.apply(log, plan)
            return plan

        logger.info("collecting: %s", await line_of(once()))


async def _there(url: str, bus_url: str, name: str, board: HealthServer, trust: Trust) -> bool:
    """Wait for the run and then for its bus. Return True when both are there, False after SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    before = board.phase
    # The first process of a container does not end on a signal without a handler.
    for number in signals:
        loop.add_signal_handler(number, stopping.set)

    async def waited(what: str, ask: Callable[[], Awaitable[object]], runtime: Runtime) -> bool:
        def say(error: IsthmusError) -> None:
            logger.warning("%s waits for the %s: %s", name, what, error)

        board.phase = f"waiting for the {what}"
        if await patiently(ask, runtime, stopping, say):
            return True
        logger.info("%s stops: it found no %s", name, what)
        return False

    try:
        async with open_place(url, threads=1) as store:
            if not await waited("run", lambda: known_run(store, trust), store.runtime):
                return False
            async with open_bus(bus_url, (await known_run(store, trust)).digest, store) as bus:
                if not await waited("bus", lambda: bus_answers(bus), store.runtime):
                    return False
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
    board.phase = before
    return True
