"""The demo from start to end: create the run, start the fleet, watch, kill, judge, report."""

import asyncio
import os
import random
import shlex
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from isthmus import codecs
from isthmus.agent.ports import bus_answers, open_place, open_ports
from isthmus.bus import IN_STORE, default_pace, in_store, open_bus
from isthmus.errors import BucketMissing, InputError, ObjectMissing
from isthmus.format.records.keys import RUN_KEY
from isthmus.inspect.bus_view import BusView, moved
from isthmus.inspect.live import Live
from isthmus.log import Log
from isthmus.log.figures import LogSums, ledger
from isthmus.log.trust import OWNER, Trust, is_near
from isthmus.runtime.urls import Place, redacted
from isthmus.store import EdgeStore
from isthmus_services.commands import init
from isthmus_services.demo import board, consortium, identities, judge, mark, report
from isthmus_services.demo.fleet import Fleet, Worker
from isthmus_services.demo.identities import Identities
from isthmus_services.demo.left import ALONE, DRAWING, JUDGING, LAST, TRAINING, Left
from isthmus_services.demo.watch import Watch
from isthmus_services.output.report import stdout, write_json
from isthmus_services.process import logs
from isthmus_services.processes import isthmus_command
from isthmus_services.servers import redis_server, s3_server
from isthmus_services.settings import declared, shared
from isthmus_services.settings.resolve import public

if TYPE_CHECKING:
    import torch

    from isthmus.demo.text import Corpus

QUIET_S = 1.5
"""Seconds without a commit, after the last learner is done, that end the run."""

QUIET_MAX_S = 15.0
TEND_S = 0.1
CURVE_SHARE, ALONE_SHARE = 0.75, 0.95
"""Shares of the phases `JUDGING` and `ALONE` that their curves take."""

COPIES_AT_ONCE = 8

CHECKPOINT_S = 2.0
"""Seconds between two checkpoints of a learner: few, since so small a model is cheap to store and demos are short."""


def run(settings: declared.Demo) -> int:
    """Run the demo that the settings describe; return the exit status."""
    if settings.consortium:
        return consortium.run(settings)
    _check(settings)
    shared.need("torch", "demo")
    shared.need("matplotlib", "demo")
    logs.quiet()
    out = Path(settings.out)
    store = settings.store or str(out / mark.RUN)
    bus = "" if settings.servers else shared.bus_of(settings, store)
    signed = not settings.servers and not (is_near(store) and is_near(bus))
    if not settings.servers:
        asyncio.run(_require_usable(settings, bus))
    mark.claim(out, _folders(settings, signed))
    started = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(_terminated_as_interrupt())
        if settings.servers:
            store, bus = _servers(out, stack, bucket_only=settings.bucket_only)
        keys = identities.new(out / mark.KEYS, settings.learners) if signed else None
        trust = Trust(keys.owner, keys.fingerprint) if keys else Trust()
        made = init.create(settings, store, default_pace(bus, store), trust, create_bucket=settings.servers)
        codecs.warm(made.rules.codec_up, made.rules.codec_down)  # compiled once, for all processes
        print(
            f"{store}: {made.layout.size:,} parameters in {len(made.layout.fragments)} fragments, "
            f"{settings.learners} learners × {settings.steps} steps, {made.rules.merge}, "
            f"{made.rules.codec_up} up, {made.rules.codec_down} down",
            flush=True,
        )
        if keys:
            print(f"other machines can reach this run: it is signed by its owner {keys.fingerprint}, key {keys.file}")
        # In the environment: on a command line, every user of the machine could read the bus's password.
        place = {"ISTHMUS_RUN": store, "ISTHMUS_BUS": bus} | ({OWNER: keys.fingerprint} if keys else {})
        url = ""
        if settings.board:
            (out / mark.LOGS).mkdir(parents=True, exist_ok=True)
            url = stack.enter_context(board.shown(place, out / mark.LOGS / "board.log"))
            print(f"board {url}", flush=True)
            board.open_in_browser(url)
        status = asyncio.run(_demo(settings, out, place, trust, keys, started))
        if url:
            board.stay(url)
        kept = out / mark.RUN if settings.servers else store
        where = ["--bus", redacted(bus)] if settings.bus else []
        print(f"to see the run at any past moment: {shlex.join(['isthmus', 'board', str(kept), *where])}")
        return status


async def _demo(
    a: declared.Demo, out: Path, place: Mapping[str, str], trust: Trust, keys: Identities | None, started: float
) -> int:
    store = place["ISTHMUS_RUN"]
    async with open_ports(store, place["ISTHMUS_BUS"], trust=trust) as ports:
        await bus_answers(ports.bus)
        log = ports.log
        if keys:
            await keys.admit(log)
        run = Live(log, ports.store, ports.bus, ports.runtime)
        text, held_out = _text(a)
        held_out = judge.judged(held_out, a.steps)
        windows = judge.windows_of(held_out)
        costs = judge.measure(text, (0, a.learners), held_out)
        watch = Watch(store, a.learners, a.steps, run, Left(costs.expected(a, windows)))
        run.on_commit = watch.committed
        fleet = _fleet(a, out, place, keys)
        following = asyncio.ensure_future(run.run())
        train_started = time.monotonic()
        with watch:
            fleet.start()
            watch.enter(TRAINING)
            try:
                told = 0
                while not fleet.finished:
                    fleet.tend(run.hearing)
                    for kill in fleet.kills[told:]:
                        watch.say(
                            f"killed {kill.name}"
                            + (f", last heard at step {kill.step}" if kill.kind == "learner" else "")
                        )
                    told = len(fleet.kills)
                    watch.show(told)
                    if following.done():
                        following.result()
                    await asyncio.sleep(TEND_S)
                await _until_quiet(watch, run)
                fleet.stop(fleet.syncer)
            finally:
                fleet.stop_all()
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            train_s = time.monotonic() - train_started
            summary, sample = await _judge(a, out, log, fleet, run.hearing, watch, text, held_out)
            if a.servers:
                store = await _keep(ports.store, out / mark.RUN)
        summary |= {"wall_s": round(time.monotonic() - started, 1), "train_s": round(train_s, 1)}
        write_json(summary, out / "report.json", a.json)
        console = stdout()
        report.show(summary, console)
        console.print(f"sample of the global model:\n{sample}", highlight=False, markup=False)
        console.print(
            f"report {out / 'report.json'}   picture {out / 'loss.png'}   log of the run {store}", highlight=False
        )
    return 0 if summary["log_intact"] else 1


# --- while it runs ----------------------------------------------------------------------------------------------------


async def _until_quiet(watch: Watch, run: Live) -> None:
    """Wait until no commit was written for `QUIET_S`, but at most `QUIET_MAX_S`."""
    watch.enter(LAST)
    seen, since, until = -1, time.monotonic(), time.monotonic() + QUIET_MAX_S
    while time.monotonic() < until:
        commits = sum(c.version for c in run.commits.values())
        if commits != seen:
            seen, since = commits, time.monotonic()
        elif time.monotonic() - since >= QUIET_S:
            return
        watch.show(0)
        await asyncio.sleep(TEND_S)


# --- afterwards -------------------------------------------------------------------------------------------------------


async def _keep(store: EdgeStore, folder: Path) -> str:
    """Copy the whole run into a folder, where its log can be read after the servers are gone; return the folder."""
    keys = iter([entry.key for entry in await store.list("")])

    async def some(kept: EdgeStore) -> None:
        for key in keys:
            await kept.put(key, await store.get(key))

    async with open_place(str(folder), threads=1) as kept, asyncio.TaskGroup() as tasks:
        for _ in range(COPIES_AT_ONCE):
            tasks.create_task(some(kept))
    return str(folder)


async def _judge(
    a: declared.Demo,
    out: Path,
    log: Log,
    fleet: Fleet,
    hearing: BusView,
    watch: Watch,
    text: "Corpus",
    held_out: "torch.Tensor",
) -> tuple[dict[str, object], str]:
    import torch

    from isthmus.demo.gpt import byte_gpt, held_out_loss, sample

    watch.enter(JUDGING)
    commits = await judge.read_commits(log)
    model = byte_gpt()
    # A phase goes on after its curve: the loss on all windows, and a sample of the global model, are computed then.
    global_points = await judge.global_curve(log, commits, model, held_out, lambda s: watch.done(s * CURVE_SHARE))
    global_loss = held_out_loss(model, held_out)
    words = sample(model, judge.SAMPLE_PROMPT, judge.SAMPLE_BYTES, a.seed)
    watch.enter(ALONE)
    torch.manual_seed(a.seed)
    alone = byte_gpt()
    single_points = judge.single_curve(
        alone, text, (0, a.learners), a.seed, a.steps, held_out, lambda s: watch.done(s * ALONE_SHARE)
    )
    single_loss = held_out_loss(alone, held_out)
    watch.enter(DRAWING)
    title = f"Isthmus demo: {a.learners} learners, {len(commits)} commits, {len(fleet.kills)} kills"
    ends = global_loss, single_loss
    report.plot(out / "loss.png", global_points, single_points, ends, a.learners, title)
    rows = judge.recoveries(fleet.kills, commits)
    per_fragment = [0] * len(log.run.layout.fragments)
    for commit in commits:
        per_fragment[commit.header.fragment] += 1
    sums = LogSums(commit.header for commit in commits)
    beats = [view.heartbeat for view in hearing.learners.values() if view.heartbeat is not None]
    tokens = ledger(beat.ledger for beat in beats)
    traffic = moved(hearing.learners.values())
    return {
        "global_val_loss": round(global_loss, 8),
        "single_val_loss": round(single_loss, 8),
        "held_out_bytes": held_out.numel(),
        "held_out_bytes_in_all": len(text.held_out),
        "ledger": {part: round(count, 3) for part, count in msgspec.to_builtins(tokens).items()},
        "tokens_trained_again": sum(beat.tokens_lost for beat in beats),
        "commits": len(commits),
        "commits_per_fragment": per_fragment,
        "participation": sums.participation or 0.0,
        "updates_merged": sums.merged,
        "updates_clipped": sums.clipped,
        "clips": dict(sums.clips),
        "rejections": judge.rejections(commits),
        "bytes_up": traffic.up,
        "checkpoint_bytes": traffic.checkpoints,
        "bytes_down": traffic.down,
        "kills": len(fleet.kills),
        "recoveries": sum(row["recovery_s"] is not None for row in rows),
        "kills_by_kind": {kind: sum(k.kind == kind for k in fleet.kills) for kind in ("learner", "syncer")},
        "kill_list": rows,
        "log_intact": judge.continuous(commits),
        "global_curve": [[p.tokens, round(p.loss, 5)] for p in global_points],
        "single_curve": [[p.tokens, round(p.loss, 5)] for p in single_points],
        "seed": a.seed,
        "settings": public(a)
        | {"rules": msgspec.to_builtins(log.run.rules), "pace": msgspec.to_builtins(log.run.pace)},
        "run": log.run.url,
    }, words


def _text(a: declared.Demo) -> "tuple[Corpus, torch.Tensor]":
    """Return the text, and the held-out part of it, on which no learner trains: [n] uint8."""
    import torch

    from isthmus.demo.text import corpus

    # With so small a model, torch's threads busy-wait for each other: beside other processes, 50 times slower.
    torch.set_num_threads(1)
    text = corpus(a.data)
    return text, torch.frombuffer(bytearray(text.held_out), dtype=torch.uint8)


# --- before it starts -------------------------------------------------------------------------------------------------


def _check(a: declared.Demo) -> None:
    if a.servers and (a.store or a.bus):
        raise InputError("--servers starts its own store and bus: remove --store and --bus")
    if a.bucket_only and not a.servers:
        raise InputError(
            "--bucket-only is for --servers; elsewhere a run in a bucket uses no Redis unless --bus names one"
        )
    shared.rules_of(a, ())
    from isthmus.demo.text import corpus

    text = corpus(a.data)
    for index in range(a.learners):
        text.shard(index, a.learners)


def _folders(a: declared.Demo, signed: bool) -> tuple[str, ...]:
    """Return the names of the folders of `--out` that this demo writes: the run only if `--store` is not given."""
    written = {mark.LOGS: True, mark.SERVERS: a.servers, mark.RUN: not a.store, mark.KEYS: signed}
    return tuple(name for name, wanted in written.items() if wanted)


def _servers(out: Path, stack: ExitStack, *, bucket_only: bool) -> tuple[str, str]:
    """Start an S3 server and, unless `bucket_only`, a Redis; return the URLs of the run and of its bus."""
    folder = out / mark.SERVERS
    s3 = stack.enter_context(s3_server(folder))
    bus = IN_STORE if bucket_only else stack.enter_context(redis_server(folder)).url
    os.environ.update(s3.environment)
    print(f"S3 server {s3.url}, {'and no other' if bucket_only else bus}", flush=True)
    return "s3://isthmus/demo", bus


async def _require_usable(a: declared.Demo, bus: str) -> None:
    """Raise, before files of an earlier demo are deleted, unless the bus answers and the store has room for a run."""
    if a.bus and not in_store(a.bus):
        async with open_bus(bus, bytes(32), None) as opened:
            await bus_answers(opened)
    if not a.store:
        return
    try:
        async with open_place(a.store, threads=1, make=a.create_bucket) as store:
            await store.at_start.get_range(RUN_KEY, 0, 1)
    except ObjectMissing:
        return
    except BucketMissing as error:
        how = (
            "create it, or add --create-bucket"
            if Place.of(a.store).scheme[:2] == "s3"
            else f"create it: {error.command}"
        )
        raise InputError(f"{error.url}: there is no such bucket: {how}") from None
    raise InputError(f"{a.store} already holds a run: choose another --store (a demo needs a new run)")


def _fleet(a: declared.Demo, out: Path, place: Mapping[str, str], keys: Identities | None) -> Fleet:
    folder = out / mark.LOGS
    folder.mkdir(parents=True, exist_ok=True)
    # The processes share the cores, so each library of a process may use one thread.
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **place}

    def worker(name: str, kind: str, *command: str) -> Worker:
        own = environment | (keys.of(name) if keys else {})
        return Worker(name, kind, isthmus_command(*command), folder / f"{name}.log", own)

    data = ["--data", a.data] if a.data else []
    learners = [
        worker(
            f"learner-{i}",
            "learner",
            *("learner", "--learner", f"learner-{i}", "--steps", str(a.steps)),
            *("--shard", f"{i}/{a.learners}", "--checkpoint", str(CHECKPOINT_S), *data),
        )
        for i in range(a.learners)
    ]
    return Fleet(
        syncer=worker("syncer", "syncer", "syncer"),
        learners=learners,
        steps=a.steps,
        sync_every=a.sync_every,
        random=random.Random(a.seed),
        kill_every=a.kill_every,
        kill_syncer_every=a.kill_syncer_every,
    )


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Make SIGTERM end the demo as Ctrl-C does, so that no process is left behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
