"""`isthmus learner`: hand a trainer its task. SIGTERM finishes the step, announces what is under way and leaves."""

import argparse
import asyncio
import functools
import logging
import signal

import torch

from isthmus import kernels
from isthmus.demo.trainer import Task
from isthmus.errors import InputError
from isthmus.run import Run, read_run
from isthmus.runtime import threaded
from isthmus.store import AT_START, open_store
from isthmus_services import logs, options

logger = logging.getLogger("isthmus.services.learner")


def run(arguments: argparse.Namespace) -> int:
    """Train."""
    logs.configure()
    logger.info("%s starts", arguments.learner)
    train = options.callable_of(arguments.train, "--train")
    if arguments.steps < 1:
        raise InputError(f"--steps {arguments.steps}: at least one")
    if not arguments.checkpoint > 0:
        raise InputError(f"--checkpoint {arguments.checkpoint:g}: seconds, more than none")
    shard = _shard(arguments.shard)
    made = asyncio.run(_read(arguments.run))
    stop: list[int] = []

    def ask(number: int, _: object) -> None:
        if number == signal.SIGINT and stop:
            raise KeyboardInterrupt  # asked twice: now
        stop.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    kernels.warm()
    train(
        Task(
            run=arguments.run,
            bus=options.bus_of(arguments, arguments.run),
            learner=arguments.learner,
            model=functools.partial(_model, made),
            steps=arguments.steps,
            seed=made.header.seed if arguments.seed is None else arguments.seed,
            data=arguments.data,
            shard=shard,
            adopt=arguments.adopt,
            should_stop=lambda: bool(stop),
            checkpoint_s=arguments.checkpoint,
        )
    )
    return 130 if signal.SIGINT in stop else 0


def _model(made: Run) -> torch.nn.Module:
    """Return the run's model with its initial values; joining brings it to the newest ones."""
    if not made.header.model:
        raise InputError(f"{made.url} was created from a module in a script: train it from there with isthmus.join")
    torch.manual_seed(made.header.seed)
    model = options.callable_of(made.header.model, "model of the run")()
    assert isinstance(model, torch.nn.Module), "init checked this"
    return model


async def _read(url: str) -> Run:
    runtime, pool = threaded(2)
    try:
        async with open_store(url, runtime) as store:
            store.patience = AT_START
            return await read_run(store)
    finally:
        pool.shutdown(wait=False)


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise InputError(f"--shard {text}: write it as I/M with I from 0 to M − 1")
    return int(index), int(count)
