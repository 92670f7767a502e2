"""`isthmus learner`: run a trainer. After SIGTERM it finishes its step, completes its uploads and leaves."""

import asyncio
import functools
import hashlib
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus import codecs
from isthmus.agent.ports import open_log
from isthmus.errors import InputError, told
from isthmus.format.records.fields import require_name
from isthmus.link import Link
from isthmus.log.run import Run
from isthmus.sinks import TensorBoard
from isthmus.wording import an
from isthmus_services.process import logs
from isthmus_services.process.health_server import HealthServer, shown
from isthmus_services.process.minutes import Diary
from isthmus_services.settings import declared, shared
from isthmus_services.settings.resolve import host_name

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("isthmus.services.learner")

NEVER_MERGED = 3
"""Exit code of a learner that completed its steps, but none of its work was merged."""


def run(settings: declared.Learner) -> int:
    """Train, and return the exit code: 0, `NEVER_MERGED`, or 128 + the number of the signal that ended it early."""
    name = host_name(settings.learner)
    require_name("--learner", name)
    shared.need("torch", "torch")
    logs.configure(settings.log_format, settings.log_level, service="learner", run=settings.run, learner=name)
    board = HealthServer("learner")
    with shown(board, settings.http):
        return _train(settings, name, board)


def _train(settings: declared.Learner, name: str, board: HealthServer) -> int:
    from isthmus.demo.trainer import Task

    train = shared.callable_of(settings.train, "--train")
    shard, order = _shard(settings.shard, name)
    bus = shared.bus_of(settings, settings.run)
    sink = TensorBoard(str(Path(settings.tensorboard) / name)) if settings.tensorboard else None
    made = asyncio.run(_read(settings))
    part = f"part {shard[0]} of {shard[1]}" if settings.shard else "all"
    logger.info("%s starts: %s, %d steps in all, %s of the data", name, made.url, settings.steps, part)
    stop: list[int] = []
    links: list[Link] = []
    diary = Diary(logger, name)

    def ask(number: int, _: object) -> None:
        if number == signal.SIGINT and stop:
            raise KeyboardInterrupt  # Ctrl-C after an earlier signal ends the process at once
        stop.append(number)
        # The same signal may kill the workers of a DataLoader. Torch's handler then raises anywhere in this thread.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        diary.asked(number)
        board.stops()
        for link in links:
            link.let_go()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)

    def joined(link: Link) -> None:
        links.append(link)
        link.wait = settings.wait_at_end
        board.serves(link.vitals, link.metrics)
        logs.serving()
        diary.joined(settings.steps, link)

    codecs.warm(made.rules.codec_up, made.rules.codec_down)
    try:
        train(
            Task(
                run=settings.run,
                bus=bus,
                learner=name,
                model=functools.partial(_model, settings, made),
                steps=settings.steps,
                seed=made.header.seed if settings.seed is None else settings.seed,
                data=settings.data,
                shard=shard,
                adopt=settings.adopt,
                should_stop=lambda: bool(stop),
                checkpoint_s=settings.checkpoint,
                order=order,
                sink=sink,
                joined=joined,
                key=settings.key,
                owner=settings.owner,
                run_digest=settings.run_digest,
                insecure=settings.insecure,
                manifest=settings.manifest,
                takeover=settings.takeover,
            )
        )
    except Exception as error:
        # A signal to the whole process group also ends the workers of a DataLoader. The DataLoader then raises here.
        if not stop:
            raise
        logger.warning("%s was asked to stop, and its trainer ended with an error: %s", name, told(error))
        for link in links:
            link.__exit__(type(error), error, error.__traceback__)  # does nothing if the trainer has closed the link
    finally:
        diary.close()  # the link logs the summary
    if stop and not (links and links[-1].steps_done >= settings.steps):
        # Not 0, which would tell a supervisor that nothing is left to do.
        return 128 + stop[-1]
    return NEVER_MERGED if links and links[-1].summary.never_merged else 0


def _makes(settings: declared.Learner, made: Run) -> Callable[[], object]:
    """Return the function that makes the run's model. Raises `InputError` that says what to do.

    Anyone who can write to the store may have chosen the name. So other code than Isthmus's own runs only if the
    operator asks for it.
    """
    named = made.header.model
    if settings.model:
        return shared.callable_of(settings.model, "--model")
    if not named:
        raise InputError(
            f"{made.url} was created from a module in a script: train it in that script, with isthmus.join"
        )
    if (ours := shared.built_in(named)) is not None:
        return ours
    if settings.model_of_run:
        return shared.callable_of(named, "model of the run")
    if not shared.CALLABLE.fullmatch(named):
        raise InputError(
            f"{made.url} names {named[:80]!a} as its model function, which is not PACKAGE.MODULE:FUNCTION: use --model"
        )
    raise InputError(
        f"{made.url} names {named} as its model function; code that a "
        f"run names is not run by default: add --model {named}, or --model-of-run if you trust "
        "the creator of the run"
    )


def _model(settings: declared.Learner, made: Run) -> "torch.nn.Module":
    """Return the run's model with its initial values; joining brings it to the newest ones."""
    import torch

    makes = _makes(settings, made)
    torch.manual_seed(made.header.seed)
    model = makes()
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"the model function returned {an(type(model).__name__)}, not a torch.nn.Module")
    return model


async def _read(settings: declared.Learner) -> Run:
    async with open_log(settings.run, shared.trust_in(settings)) as log:
        return log.run


def _shard(text: str | None, name: str) -> tuple[tuple[int, int], int]:
    """Return the shard (index, count) and the order in it. Without one: all data, in an order drawn from the name."""
    if text is None:
        return (0, 1), int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise InputError(f"--shard {text}: write it as I/M with I from 0 to M − 1")
    return (int(index), int(count)), int(index)
