"""The ranks of a learner that do not speak for it: how they join, and what they hold of the run."""

import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, SupportsFloat, SupportsInt

import msgspec

from isthmus.agent.health import Vitals
from isthmus.agent.ports import Ports
from isthmus.errors import InputError
from isthmus.format.layout import Layout
from isthmus.format.signing import Signer
from isthmus.learner import checkpoint_shards
from isthmus.learner.ranks.client import Peers, RankGroup, RunInfo, interfaces
from isthmus.learner.ranks.server import WrapBackend, local_backend, serve
from isthmus.learner.step_arguments import loss_of, tokens_of
from isthmus.learner.summary import Summary
from isthmus.link.agent_thread import AgentThread, OwnerThread
from isthmus.link.link import Link, rate_of
from isthmus.log.run import Run, heard_run, told_run
from isthmus.runtime.clock import clock, cores
from isthmus.runtime.metrics import LearnerMetrics

if TYPE_CHECKING:
    from isthmus.torch.sharded import Sharded


class Joined(msgspec.Struct, frozen=True):
    """What the first rank says to the others when it has joined."""

    step: int
    tokens_seen: int
    moments: str
    fresh_into_flight: bool
    incarnation: int


class RankLink(Link):
    """What a `Link` is to the ranks of a learner that do not speak for it: they do with it as they are told."""

    def __init__(
        self, sharded: "Sharded", run: Run, joined: Joined, warmup: int, threads: Sequence[OwnerThread]
    ) -> None:
        self._sharded, self._loop = sharded, sharded.loop
        self._loop.mark(clock)
        self._threads = threads
        self._run = run
        self._joined = joined
        self._step, self._tokens_seen = joined.step, joined.tokens_seen
        self._closed = False
        self._warmup = warmup
        self.moments = joined.moments

    @property
    def speaks(self) -> bool:  # noqa: D102
        return False

    @property
    def run(self) -> Run:  # noqa: D102
        return self._run

    @property
    def steps_done(self) -> int:  # noqa: D102
        return self._step

    @property
    def tokens_seen(self) -> int:  # noqa: D102
        return self._tokens_seen

    @property
    def incarnation(self) -> int:  # noqa: D102
        return self._joined.incarnation

    @property
    def rate(self) -> float:  # noqa: D102
        return rate_of(self._joined.fresh_into_flight, self._step - self._joined.step, self._warmup)

    @property
    def metrics(self) -> LearnerMetrics:  # noqa: D102
        raise self._elsewhere("metrics")

    @property
    def vitals(self) -> Vitals:  # noqa: D102
        raise self._elsewhere("vitals")

    @property
    def versions(self) -> list[int]:  # noqa: D102
        raise self._elsewhere("versions")

    @property
    def figures(self) -> Mapping[str, float]:  # noqa: D102
        raise self._elsewhere("figures")

    @property
    def summary(self) -> Summary:  # noqa: D102
        raise self._elsewhere("summary")

    def _elsewhere(self, what: str) -> InputError:
        return InputError(f"link.{what} is with the rank that speaks for the learner: ask where link.speaks is true")

    def step(self, tokens: SupportsInt, *, loss: SupportsFloat | None = None) -> None:  # noqa: D102
        tokens, _ = tokens_of(tokens), loss_of(loss)
        if self._closed:
            raise InputError("the link is closed: join again under the same name to go on")
        self._look_at_model(self._step)
        self._loop.mark(clock)  # before the first rank asks for what it notes
        with self._all_ranks("STEP", self._step + 1, tokens):
            self._step += 1
            self._tokens_seen += tokens

    def let_go(self) -> None:
        """Wait as long as the rank that speaks does."""

    def _leave(self, done: bool, keep: bool, *, orderly: bool = True, wait_s: float = 0.0) -> None:
        if not self._closed:
            self._closed = True
            self._loop.close()
            try:
                if keep:
                    with self._all_ranks("CLOSE", self._step):
                        pass
                    for thread in self._threads:
                        thread.close()
            finally:
                for thread in self._threads:
                    thread.stop()


@asynccontextmanager
async def spread(sharded: "Sharded | None", thread: AgentThread, ports: Ports) -> AsyncIterator[RankGroup | None]:
    """Have all ranks of a learner come to the first one, to keep their share of its arrays (see
    `AgentThread.start`)."""
    if sharded is None:
        yield None
        return
    ranks, found = sharded.ranks, ports.log.run
    owner = ranks.owners(len(found.layout.fragments))
    secret = (ports.runtime.new_id() + ports.runtime.new_id()).encode()
    peers = Peers(range(1, ranks.size), secret)
    alone = len(set(ranks.nodes)) == 1
    host, names = interfaces(alone, os.environ.get("MASTER_ADDR"), socket.gethostname())
    async with peers.listening(host):
        told = RunInfo(told_run(found), owner, [(name, peers.port) for name in names], secret)
        words = msgspec.msgpack.encode(told)
        await thread.on_training_thread(lambda: sharded.place(found.layout, owner, peers, words))
        await peers.complete()
        yield RankGroup(peers, owner, _make_backend(sharded), sharded.device_stream is not None)


def _make_backend(sharded: "Sharded") -> WrapBackend:
    """Return what makes the backend of what this rank owns."""
    from isthmus.torch import device

    return local_backend if sharded.device_stream is None else partial(device.backend, sharded.device_stream)


def follow(sharded: "Sharded", warmup: int, url: str, signer: Signer | None) -> RankLink:
    """Join as a rank that does not speak."""
    run: list[Run] = []
    threads: list[OwnerThread] = []

    def layout_of(words: bytes) -> tuple[Layout, Sequence[int]]:
        told = msgspec.msgpack.decode(words, type=RunInfo)
        run.append(heard_run(told.run))
        rank, nodes = sharded.ranks.order, sharded.ranks.nodes
        compute = max(1, cores() // nodes.count(nodes[rank]))
        serving = partial(
            serve,
            url,
            run[0],
            sharded.array_table,
            _make_backend(sharded),
            rank,
            told.addresses,
            told.secret,
            compute,
            signer=signer,
        )
        thread = OwnerThread(serving)
        threads.append(thread)
        sharded.fetch = lambda *where: thread.ask(lambda log: checkpoint_shards.read(log, *where))
        return run[0].layout, told.owner

    try:
        with sharded.call("JOIN", layout_of=layout_of) as said:
            pass
    except BaseException:
        sharded.loop.close()
        for thread in threads:
            thread.stop()
        raise
    return RankLink(sharded, run[0], msgspec.msgpack.decode(said.words, type=Joined), warmup, threads)
