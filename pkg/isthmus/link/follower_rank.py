"""The following ranks of a learner: how they join, and what they hold of the run."""

from collections.abc import Sequence
from functools import partial

import msgspec
from typing_extensions import override

from isthmus.errors import InputError
from isthmus.format.layout import Layout
from isthmus.format.signing import Signer
from isthmus.learner import LearnerAgent, checkpoint_shards
from isthmus.learner.ranks.client import RunInfo
from isthmus.learner.ranks.server import serve
from isthmus.link.agent_thread import OwnerThread
from isthmus.link.group import wrap_backend
from isthmus.link.leader import Joined
from isthmus.link.link import Side
from isthmus.log.run import Run, heard_run
from isthmus.runtime.clock import clock, cores
from isthmus.torch.sharded import Sharded


class Follower(Side):
    """A rank that follows the leading rank. It keeps its share of the learner's arrays."""

    leads = False

    def __init__(self, sharded: Sharded, run: Run, joined: Joined, threads: Sequence[OwnerThread]) -> None:
        self._sharded = sharded
        self._run = run
        self._joined = joined
        self._threads = threads
        self._step, self._tokens_seen = joined.step, joined.tokens_seen
        self.loop = sharded.loop
        self.loop.mark(clock)
        self.moments = joined.moments
        self.first_step = joined.step
        self.fresh_into_flight = joined.fresh_into_flight

    @property
    @override
    def run(self) -> Run:
        return self._run

    @property
    @override
    def steps_done(self) -> int:
        return self._step

    @property
    @override
    def tokens_seen(self) -> int:
        return self._tokens_seen

    @property
    @override
    def incarnation(self) -> int:
        return self._joined.incarnation

    @override
    def agent(self, what: str) -> LearnerAgent:
        raise InputError(
            f"link.{what} exists only on the rank that speaks for the learner: use it where link.speaks is true"
        )

    @override
    def step(self, tokens: int, loss: float | None) -> None:
        self.loop.mark(clock)  # first, since the leading rank may ask for the state that this notes
        with self._sharded.call("STEP", self._step + 1, tokens):
            self._step += 1
            self._tokens_seen += tokens
        self.loop.see_parameters()  # versions were adopted meanwhile

    @override
    def sum(self, count: int) -> int:
        return self._sharded.ranks.sum(count)

    @override
    def let_go(self) -> None:
        """Do nothing: this rank waits as long as the leading rank does."""

    @override
    def drop(self) -> None:
        """Do nothing: the leading rank lets go of the run."""

    @override
    def leave(self, done: bool, well: bool, wait_s: float | None) -> None:
        self.loop.close()
        try:
            if well:
                with self._sharded.call("CLOSE", self._step):
                    pass
                for thread in self._threads:
                    thread.close()
        finally:
            for thread in self._threads:
                thread.stop()


def follow(sharded: Sharded, url: str, signer: Signer | None) -> Follower:
    """Join as a following rank."""
    run: list[Run] = []
    threads: list[OwnerThread] = []

    def layout_of(words: bytes) -> tuple[Layout, Sequence[int]]:
        told = msgspec.msgpack.decode(words, type=RunInfo)
        run.append(heard_run(told.run))
        rank, nodes = sharded.ranks.order, sharded.ranks.nodes
        serving = partial(
            serve, url, run[0], sharded.array_table, wrap_backend(sharded.device_stream), rank, told.addresses,
            told.secret, max(1, cores() // nodes.count(nodes[rank])), signer=signer,
        )  # fmt: skip
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
    return Follower(sharded, run[0], msgspec.msgpack.decode(said.words, type=Joined), threads)
