"""The ranks of a learner, as `join` uses them: one process that trains by itself, or several that share one model.

Every learner is a group of ranks. The first rank *leads*: it runs the agent and speaks for the learner. The others
follow (`isthmus.link.follower_rank`). Everything here runs on the training thread unless stated otherwise.
"""

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Protocol

import msgspec
from typing_extensions import override

from isthmus.agent.ports import Ports
from isthmus.codecs.kernels import F32
from isthmus.format.layout import Layout, Tensor
from isthmus.format.rules import FrozenCheck, Hyperparameters
from isthmus.learner import LearnerAgent, Replica, checkpoint_shards
from isthmus.learner.backend import Arrays
from isthmus.learner.checkpoint import Checkpoint, Saver
from isthmus.learner.ranks.client import Assembled, Peers, RankGroup, RunInfo, SingleRank, interfaces
from isthmus.learner.ranks.server import WrapBackend, local_backend
from isthmus.link.agent_thread import AgentThread
from isthmus.log.run import told_run
from isthmus.torch import device, moments
from isthmus.torch import model as torch_model
from isthmus.torch.device import DeviceArrays, DeviceStream
from isthmus.torch.frozen import digests_of
from isthmus.torch.loop import Loop
from isthmus.torch.sharded import CallResult, Sharded

Values = list[F32] | Callable[[Tensor], Awaitable[F32]]
"""Flat values of each of a model's tensors, or a function that returns those of a piece; see `Seed`."""


class Group(Protocol):
    """A learner's ranks, at the rank that leads."""

    loop: Loop
    alone: bool
    """Whether this is the only rank."""

    def call(self, call: str, number: int = 0, tokens: int = 0) -> AbstractContextManager[CallResult]:
        """Meet the other ranks, and let them go on when the `with` block is done. See `Sharded.call`."""
        ...

    def sum(self, count: int) -> int:
        """Return the sum of the counts of all ranks. All of them must call this."""
        ...

    def values(self, thread: AgentThread) -> Values:
        """Return the values of the trainable parameters."""
        ...

    def frozen(self, check: FrozenCheck) -> dict[str, bytes]:
        """Return the digest of each frozen parameter; see `frozen.digests_of`."""
        ...

    async def find_donor(self, thread: AgentThread, agent: LearnerAgent) -> Checkpoint | None:
        """Return another learner's checkpoint whose moments this learner can use, or None. Agent's thread."""
        ...

    def assembled(self, thread: AgentThread, ports: Ports) -> AbstractAsyncContextManager[Assembled]:
        """Wait until all ranks have connected, to keep their share of the learner's arrays. Agent's thread."""
        ...

    def placed(self, layout: Layout) -> tuple[Replica, Arrays | None]:
        """Return the model for the boundary, and the maker of its arrays (None: arrays of this process)."""
        ...

    def restore(self, own: Checkpoint | None, thread: AgentThread) -> str:
        """Restore optimizer and data; return where the moments came from; see `moments.restore`."""
        ...

    @property
    def saver(self) -> Saver:
        """What the checkpoints are taken from."""
        ...


def wrap_backend(stream: DeviceStream | None) -> WrapBackend:
    """Return the maker of the backend of a rank's own arrays: on the device that trains, or in memory."""
    return local_backend if stream is None else partial(device.backend, stream)


class OneRank(Group):
    """A learner of one process."""

    alone = True

    def __init__(self, loop: Loop, stream: DeviceStream | None, settings: Hyperparameters) -> None:
        self.loop = loop
        self._stream = stream
        self._settings = settings

    @override
    @contextmanager
    def call(self, call: str, number: int = 0, tokens: int = 0) -> Iterator[CallResult]:
        yield CallResult()

    @override
    def sum(self, count: int) -> int:
        return count

    @override
    def values(self, thread: AgentThread) -> Values:
        return torch_model.values_of(self.loop.model)

    @override
    def frozen(self, check: FrozenCheck) -> dict[str, bytes]:
        return digests_of(self.loop.model, check)

    @override
    async def find_donor(self, thread: AgentThread, agent: LearnerAgent) -> Checkpoint | None:
        check = moments.DonorCheck(self.loop.model, self.loop.optimizer)
        return await agent.donor(check.fits, check.glance)

    @override
    @asynccontextmanager
    async def assembled(self, thread: AgentThread, ports: Ports) -> AsyncIterator[Assembled]:
        yield SingleRank(wrap_backend(self._stream))

    @override
    def placed(self, layout: Layout) -> tuple[Replica, Arrays | None]:
        move_along = self.loop.copies.move_along
        if self._stream is None:
            return torch_model.TorchReplica(self.loop.model, layout, move_along), None
        on_device = DeviceArrays(self.loop.model, layout, self._stream, move_along)
        return on_device, on_device

    @override
    def restore(self, own: Checkpoint | None, thread: AgentThread) -> str:
        return moments.restore(self.loop, own, thread.donor, self._settings)

    @property
    @override
    def saver(self) -> Saver:
        return self.loop


class ManyRanks(Group):
    """The first rank of several that share one model."""

    alone = False

    def __init__(self, sharded: Sharded) -> None:
        self.loop = sharded.loop
        self._sharded = sharded

    @override
    def call(self, call: str, number: int = 0, tokens: int = 0) -> AbstractContextManager[CallResult]:
        return self._sharded.call(call, number, tokens)

    @override
    def sum(self, count: int) -> int:
        return self._sharded.ranks.sum(count)

    @override
    def values(self, thread: AgentThread) -> Values:
        async def gathered(piece: Tensor) -> F32:
            return await thread.on_training_thread(lambda: self._sharded.values(piece))

        return gathered

    @override
    def frozen(self, check: FrozenCheck) -> dict[str, bytes]:
        return self._sharded.frozen(check)

    @override
    async def find_donor(self, thread: AgentThread, agent: LearnerAgent) -> Checkpoint | None:
        # All ranks try a step together, so each question goes through the training thread.
        check = moments.DonorCheck(self.loop.model, self.loop.optimizer, self._sharded.tried)
        return await agent.donor(
            lambda found: thread.ask_training_thread(lambda: check.fits(found)),
            lambda header: thread.ask_training_thread(lambda: check.glance(header)),
        )

    @override
    @asynccontextmanager
    async def assembled(self, thread: AgentThread, ports: Ports) -> AsyncIterator[Assembled]:
        sharded = self._sharded
        ranks, found = sharded.ranks, ports.log.run
        owner = ranks.owners(len(found.layout.fragments))
        secret = (ports.runtime.new_id() + ports.runtime.new_id()).encode()
        peers = Peers(range(1, ranks.size), secret)
        one_machine = len(set(ranks.nodes)) == 1
        host, names = interfaces(one_machine, os.environ.get("MASTER_ADDR"), socket.gethostname())
        async with peers.listening(host):
            told = RunInfo(told_run(found), owner, [(name, peers.port) for name in names], secret)
            words = msgspec.msgpack.encode(told)
            await thread.on_training_thread(lambda: sharded.place(found.layout, owner, peers, words))
            await peers.complete()
            stream = sharded.device_stream
            yield RankGroup(peers, owner, wrap_backend(stream), stream is not None)

    @override
    def placed(self, layout: Layout) -> tuple[Replica, Arrays | None]:
        return self._sharded, self._sharded

    @override
    def restore(self, own: Checkpoint | None, thread: AgentThread) -> str:
        self._sharded.fetch = lambda *where: thread.ask_agent(lambda log: checkpoint_shards.read(log, *where))
        return self._sharded.restore(own, thread.donor)

    @property
    @override
    def saver(self) -> Saver:
        return self._sharded
