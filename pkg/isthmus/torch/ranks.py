"""The processes of one learner, in step with each other: the first of them speaks for all, and all of them act.

A learner may be a torchrun job. Every rank of it makes the same calls (`join`, `step`, `close`) at the same places, and
at each of them the first rank says what is done: which fragment is read, which is written, that a checkpoint is taken.
All words between ranks go over a process group of their own, between CPUs, from the training thread; blocks of a model
that lies on devices go over another one, between those.
"""

# ruff: noqa: TID251  (threads: a question to a store that may hang)
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from isthmus.errors import InputError, IsthmusError, RankLost, known_error

logger = logging.getLogger(__name__)

PATIENCE = timedelta(hours=12)
"""Other ranks wait so long for a command of the first rank, which may be waiting for the store or the bus. A rank that
died is known at once, by its connection."""

TELL_S, NAME_S, HUNG_S = 20.0, 45.0, 1800.0
"""A rank that waits for the others to make a call too says so after this many seconds, names those that have not come
after this many, and ends the job after this many: half an hour, as torch's own process groups do."""

LOOK_S = 5.0
"""It looks so often."""

REFUSED = {
    "pp": "pipeline parallelism: a rank has some of the layers only, and they are other ones in each stage",
    "ep": "expert parallelism: ranks have experts of their own",
}
"""Dimensions of device meshes, by the names that are usual for them, along which ranks are not shards of one tensor."""


class GroupCall(IntEnum):
    """What every rank calls."""

    JOIN = 0
    STEP = 1
    CLOSE = 2


class Op(IntEnum):
    """What the first rank has all do within a call."""

    END = 0
    """The call is over; what comes with it is for the callers."""
    FAIL = 1
    """It ends with this error."""
    VALUES = 2
    """A parameter, or rows of it, is gathered with the first rank."""
    LAYOUT = 3
    """This is the run, and these ranks own its fragments."""
    READ = 4
    """A fragment is gathered with its owner, as an array of this number; with the first rank, where it is 0 …"""
    WRITE = 5
    """… and given back."""
    MIX = 6
    """The owner of a fragment mixes some of its arrays."""
    SAVE = 7
    """The inner optimizer's state and the data's are gathered …"""
    LOAD = 8
    """… and given back."""
    STEP_COPY = 9
    """A copy of the optimizer takes a step …"""
    TRY = 10
    """… and another one with these moments."""


class _Failure(msgspec.Struct, frozen=True):
    kind: str
    text: str


class Ranks:
    """The process group of a learner. Raises `RankLost` wherever one of its processes turns out to be gone."""

    def __init__(self, alone: bool) -> None:
        """`alone`: this process is the whole learner, whatever else the job has."""
        self.order = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()
        self._group: Any = None
        self._on_device: Any = None
        self._wait_for_device: Callable[[], None] | None = None
        self._opening: tuple[int, int, int] | None = None
        self._held: object = None
        self.nodes: list[bytes] = []
        """The machine of each rank, by whatever tells machines apart."""
        if self.size > 1:
            with _together():
                self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.nodes = self.exchange(_node())
        self._name = self.exchange(os.urandom(8).hex().encode())[0].decode()

    @property
    def leads(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.order == 0

    def owners(self, fragments: int) -> list[int]:
        """Return the rank that owns each of so many fragments: in turn, each from another machine where there are
        several."""
        before: dict[bytes, int] = {}
        places = []
        for rank, node in enumerate(self.nodes):
            places.append((before.get(node, 0), self.nodes.index(node), rank))
            before[node] = before.get(node, 0) + 1
        turn = [rank for *_, rank in sorted(places)]
        return [turn[p % self.size] for p in range(fragments)]

    def meet_on(self, device: torch.device) -> bool:
        """Make a way between devices of this kind, too; return False where ranks share one. Called by all ranks."""
        module: Any = getattr(torch, device.type, None)
        known = getattr(module.get_device_properties(device), "uuid", None) if device.type == "cuda" else None
        names = self.exchange(f"{self.order if known is None else known}".encode())
        if len(set(names)) < self.size:
            return False
        if self.size > 1:
            with _together():
                self._on_device = dist.new_group(backend=dist.Backend.default_device_backend_map[device.type])
                # Some of them may have nothing to move; the first that is moved is moved by all.
                dist.all_reduce(torch.zeros(1, device=device), group=self._on_device)
            self._wait_for_device = getattr(module, "synchronize", None)
        return True

    def close(self) -> None:
        """Give the process groups back. Called by every rank after its last word.

        Its threads end with it. One that lets go of a tensor while the interpreter ends would take the process with it
        (`terminate called without an active exception`), whatever had been done.
        """
        if self._wait_for_device is not None:
            self._wait_for_device()  # what is queued between devices would be aborted
        groups = self._on_device, self._group
        self._on_device = self._group = None
        for group in groups:
            if group is not None:
                with suppress(ValueError, AssertionError):  # the job has destroyed all of them
                    dist.destroy_process_group(group)

    # --- a call -------------------------------------------------------------------------------------------------------

    def meet(self, call: GroupCall, number: int = 0, tokens: int = 0) -> None:
        """Begin a call that all ranks make: the `number`-th, with as many tokens everywhere.

        They meet with the first command: that is one collective for a call in which nothing is done.
        """
        self._opening = (call, number, tokens)

    def opened(self, held: object) -> None:
        """Keep something until all ranks have made the call that was just begun: what was commanded in the one before
        is done then."""
        self._held = held

    def command(self, op: Op, argument: int = 0, number: int = 0, blob: bytes = b"") -> None:
        """Have all ranks do something with two numbers and some bytes. Of the first rank.

        Raises `InputError`, as it does on every rank, where they have not made the same call.
        """
        head = (op, argument, number, len(blob))
        if self._opening is not None:
            self._agree(head)
        else:
            self._broadcast(torch.tensor(head, dtype=torch.int64, device="cpu"))
        if blob:
            self._broadcast(torch.frombuffer(bytearray(blob), dtype=torch.uint8))

    def hear(self) -> tuple[Op, int, int, bytes]:
        """Return what the first rank commands. Of all others.

        Raises `InputError` as `command` does, and what the first rank failed with.
        """
        if self._opening is not None:
            op, argument, number, size = self._agree((0, 0, 0, 0))
        else:
            head = torch.zeros(4, dtype=torch.int64, device="cpu")
            self._broadcast(head)
            op, argument, number, size = head.tolist()
        blob = torch.empty(size, dtype=torch.uint8, device="cpu")
        if size:
            self._broadcast(blob)
        said = blob.numpy().tobytes()
        if op == Op.FAIL:
            failure = msgspec.msgpack.decode(said, type=_Failure)
            raise known_error(failure.kind, f"the first rank of this learner ended: {failure.text}", {})
        return Op(op), argument, number, said

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Let the other ranks hear what ends this one. Of the first rank; nothing elsewhere."""
        try:
            yield
        except RankLost:
            raise
        except BaseException as error:
            if self.leads and self.size > 1 and not getattr(error, _KNOWN, False):
                words = msgspec.msgpack.encode(_Failure(type(error).__name__, str(error) or type(error).__name__))
                # What ended this rank is said here; it may be that the others have come to another end.
                with suppress(IsthmusError):
                    self.command(Op.FAIL, blob=words)
            raise

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Raise on every rank what the block refuses on one of them. Called by all of them."""
        why = ""
        try:
            yield
        except InputError as error:
            why = str(error)
        for rank, theirs in enumerate(self.exchange(why.encode())):
            if theirs:
                raise known(InputError(f"rank {rank}: {theirs.decode()}"))

    def _agree(self, head: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        opening, self._opening = self._opening, None
        held, self._held = self._held, None
        assert opening is not None, "ranks agree once for each call"
        if self.size == 1:
            return head
        rows = [torch.zeros(7, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        with _together():
            mine = torch.tensor((*opening, *head), dtype=torch.int64, device="cpu")
            self._wait_for_all(dist.all_gather(rows, mine, group=self._group, async_op=True), opening)
        del held
        said = [tuple(row.tolist()) for row in rows]
        for order, theirs in enumerate(said):
            if theirs[:3] != said[0][:3]:
                error = InputError(
                    f"the ranks of this learner are not in step: rank 0 {_spoken(said[0])}, rank {order} "
                    f"{_spoken(theirs)}; every rank calls link.step(tokens) after each optimizer step, with the tokens "
                    "of all ranks together, and link.close() after the same step"
                )
                raise known(error)
        return said[0][3], said[0][4], said[0][5], said[0][6]

    def _wait_for_all(self, work: Any, opening: tuple[int, int, int]) -> None:
        """Wait until every rank has made this call. Name those that do not; raise `RankLost` after `HUNG_S`.

        A rank that hangs keeps its connections: only that it does not come tells it from one that is slow.
        """
        waited, told, named = 0.0, False, False
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError as error:
                if "timed out" not in str(error).lower():
                    raise
            waited += LOOK_S
            if waited >= TELL_S and not told:
                told = True
                _aside(lambda: self._board().set(f"{opening}/{self.order}", b"waits"))
            if waited < NAME_S or (named and waited < HUNG_S):
                continue
            missing = self._missing(opening)
            logger.warning(
                "rank %d has waited %.0f s for %s, which has not called link.%s as the others did: see what it does "
                "there; the job ends after %.0f s of this",
                self.order, waited, missing, GroupCall(opening[0]).name.lower(), HUNG_S,
            )  # fmt: skip
            named = True
            if waited >= HUNG_S:
                raise known(
                    RankLost(f"{missing} has not called link.{GroupCall(opening[0]).name.lower()} for {waited:.0f} s")
                )

    def _missing(self, opening: tuple[int, int, int]) -> str:
        """Return which ranks do not wait in this call."""
        said = _aside(lambda: [self._board().check([f"{opening}/{rank}"]) for rank in range(self.size)])
        if said is None:
            return "rank 0, with which the job's store does not answer either,"
        missing = [str(rank) for rank, waits in enumerate(said) if not waits]
        return f"rank {', '.join(missing)}" if missing else "a rank"

    def _board(self) -> Any:
        """Return where ranks leave words for each other without meeting: the store of the job, which torch has made."""
        return dist.distributed_c10d.PrefixStore(f"isthmus/{self._name}", dist.distributed_c10d._get_default_store())

    # --- words --------------------------------------------------------------------------------------------------------

    def sum(self, count: int) -> int:
        """Return the sum of what every rank has counted. Called by all of them."""
        return sum(
            int.from_bytes(words, "little", signed=True)
            for words in self.exchange(count.to_bytes(8, "little", signed=True))
        )

    def exchange(self, words: bytes) -> list[bytes]:
        """Return what every rank says, in their order. Called by all of them."""
        if self.size == 1:
            return [words]
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        with _together():
            dist.all_gather(sizes, torch.tensor([len(words)], dtype=torch.int64, device="cpu"), group=self._group)
            longest = max(int(size) for size in sizes)
            mine = torch.zeros(longest, dtype=torch.uint8, device="cpu")
            mine[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8) if words else 0
            blobs = [torch.zeros(longest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
            dist.all_gather(blobs, mine, group=self._group)
        return [blob[: int(size)].numpy().tobytes() for blob, size in zip(blobs, sizes, strict=True)]

    def all_say(self, yes: bool) -> bool:
        """Return whether all ranks say yes. Called by all of them."""
        said = torch.tensor([yes], dtype=torch.uint8, device="cpu")
        if self.size > 1:
            with _together():
                dist.all_reduce(said, dist.ReduceOp.MIN, group=self._group)
        return bool(said[0])

    def move(self, out: Sequence[tuple[int, torch.Tensor]], into: Sequence[tuple[int, torch.Tensor]]) -> Sequence[Any]:
        """Begin to send bytes [n] uint8 to ranks, and to receive them from ranks; return what `finish` waits for.

        All of them lie on the CPU, or all on a device. Of a device the stream in use is what waits, not this thread.
        """
        if not (out or into):
            return []
        device = (*out, *into)[0][1].device
        group = self._group if self._on_device is None or device.type == "cpu" else self._on_device
        moves = [dist.P2POp(dist.isend, words, to, group) for to, words in out]
        moves += [dist.P2POp(dist.irecv, room, of, group) for of, room in into]
        with _together():
            works: Sequence[Any] = dist.batch_isend_irecv(moves)
        return works

    def finish(self, works: Sequence[Any]) -> None:
        """Wait until what was begun is through."""
        with _together():
            for work in works:
                work.wait()

    def _broadcast(self, words: torch.Tensor) -> None:
        if self.size > 1:
            with _together():
                dist.broadcast(words, 0, group=self._group)


_KNOWN = "known_to_all_ranks"


def known(error: IsthmusError) -> IsthmusError:
    """Mark an error that every rank raises by itself, from the same words: the first need not tell the others."""
    setattr(error, _KNOWN, True)
    return error


def _aside(work: Callable[[], Any]) -> Any:
    """Return what a question to the job's store comes to; None where it gets no answer in time, or an error."""
    found: list[Any] = []

    def ask() -> None:
        with suppress(Exception):
            found.append(work())

    thread = threading.Thread(target=ask, name="isthmus-ranks", daemon=True)
    thread.start()
    thread.join(LOOK_S)
    return found[0] if found else None


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(str(error)) from error


def _node() -> bytes:
    """Return what is the same for processes that reach each other by loopback, and for no others."""
    try:
        return os.readlink("/proc/self/ns/net").encode() + Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return socket.gethostname().encode()


def _spoken(said: Sequence[int]) -> str:
    call, number, tokens = said[:3]
    if call == GroupCall.STEP:
        return f"is at step {number} with {tokens} tokens"
    return "joins" if call == GroupCall.JOIN else f"closes after step {number}"


# --- which they are ---------------------------------------------------------------------------------------------------


def ranks_of(model: nn.Module) -> Ranks | None:
    """Return the ranks that train this model as one learner, or None where this process does it by itself.

    They are all ranks of the job where the model is sharded over several of them or replicated by
    `DistributedDataParallel`. Called by every rank. Raises `InputError`, naming it, for what is no shard of a tensor.
    """
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise InputError(
                "the model is wrapped by FSDP1 (FullyShardedDataParallel), which keeps flat parameters without the "
                "shapes that other learners have: shard it with torch.distributed.fsdp.fully_shard(model) (FSDP2)"
            )
    if not (dist.is_available() and dist.is_initialized()):
        return None
    meshes: dict[Any, str] = {}
    for name, p in model.named_parameters():
        if hasattr(p, "_local_shards"):
            raise InputError(
                f"parameter {name} is a ShardedTensor: shard it as a DTensor (fully_shard(model)), instead"
            )
        if (mesh := getattr(p, "device_mesh", None)) is not None:
            meshes.setdefault(mesh, name)
    for mesh, name in meshes.items():
        for dimension in _dimensions(mesh):
            if dimension in REFUSED:
                raise InputError(
                    f"parameter {name} lies on a device mesh with a dimension {dimension!r}, as {REFUSED[dimension]}; "
                    "join a model that is sharded by FSDP2 (HSDP and tensor parallelism included) or replicated by DDP"
                )
    copies = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
    several = any(mesh.size() > 1 for mesh in meshes) or any(m.process_group.size() > 1 for m in copies)
    if several and any(m.process_group.size() < dist.get_world_size() for m in copies) and not meshes:
        raise InputError(
            f"the model is shared by {copies[0].process_group.size()} of the job's {dist.get_world_size()} processes "
            "(DistributedDataParallel with a process_group): a learner is a whole job as yet; start one job for each"
        )
    return Ranks(alone=not several) if several or meshes else None


def _dimensions(mesh: Any) -> set[str]:
    """Return the names of the dimensions, longer than 1, of a mesh and of the one that it was sliced from."""
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    found = set()
    for one in (mesh, root):
        for name, size in zip(one.mesh_dim_names or (), one.mesh.shape, strict=False):
            if size > 1:
                found.add(name)
    return found
