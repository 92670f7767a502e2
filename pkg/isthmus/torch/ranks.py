"""The ranks of one learner, in step with each other: the first rank gives the commands, and all ranks carry them out.

A learner may be a torchrun job. Every rank makes the same calls (`join`, `step`, `close`) at the same places. In each
call the first rank commands what is done: read a fragment, write a fragment, take a checkpoint. All messages between
ranks go from the training thread over a separate process group between CPUs. If the model lies on devices, its blocks
go over a second process group, between the devices.
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
"""How long other ranks wait for a command of the first rank, which may be waiting for the store or the bus. If a rank
dies, its connection breaks, so the others know at once."""

TELL_S, NAME_S, HUNG_S = 20.0, 45.0, 1800.0
"""Seconds after which a rank that waits in a call tells the others so, after which it logs the ranks that are missing,
and after which it raises `RankLost`. Half an hour is also the limit of torch's own process groups."""

LOOK_S = 5.0
"""Seconds between two checks of a rank that waits, and the limit for a question to the job's store."""

REFUSED = {
    "pp": "pipeline parallelism: a rank has some of the layers only, and they are other ones in each stage",
    "ep": "expert parallelism: ranks have experts of their own",
}
"""Dimensions of device meshes, by their usual names, along which ranks do not hold shards of one tensor; and why."""


class GroupCall(IntEnum):
    """The calls that every rank makes."""

    JOIN = 0
    STEP = 1
    CLOSE = 2


class Op(IntEnum):
    """What the first rank commands all ranks to do within a call."""

    END = 0
    """The call is over. The bytes that come with the command are the result for the callers."""
    FAIL = 1
    """The call ends with this error."""
    VALUES = 2
    """Gather a parameter, or rows of it, on the first rank."""
    LAYOUT = 3
    """Take over the run's layout, and which rank owns which fragment."""
    READ = 4
    """Gather a fragment on its owner, as an array of this number. The number is 0 if the first rank owns it."""
    WRITE = 5
    """Write a fragment into the model from the array of this number on its owner; 0 as for `READ`."""
    MIX = 6
    """Mix some arrays of a fragment on its owner."""
    SAVE = 7
    """Copy the state of the inner optimizer, the model's local tensors and the data for a checkpoint."""
    LOAD = 8
    """Load such state from a checkpoint."""
    STEP_COPY = 9
    """Take a step with a copy of the optimizer."""
    TRY = 10
    """Take another step with that copy and the moments that come with the command."""


class _Failure(msgspec.Struct, frozen=True):
    kind: str
    text: str


class Ranks:
    """The process group of a learner. Its methods raise `RankLost` if one of the learner's processes is gone."""

    def __init__(self, alone: bool) -> None:
        """`alone`: this process is the whole learner, even if the job has other processes."""
        self.order = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()
        self._group: Any = None
        self._on_device: Any = None
        self._wait_for_device: Callable[[], None] | None = None
        self._opening: tuple[int, int, int] | None = None
        self._held: object = None
        self.nodes: list[bytes] = []
        """The machine of each rank, as bytes that differ between machines."""
        if self.size > 1:
            with _together():
                self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.nodes = self.exchange(_node())
        self._name = self.exchange(os.urandom(8).hex().encode())[0].decode()

    @property
    def leads(self) -> bool:
        """Whether this is the first rank, which gives the commands."""
        return self.order == 0

    def owners(self, fragments: int) -> list[int]:
        """Return the rank that owns each of this many fragments.

        Ranks take turns, which alternate between machines if there are several.
        """
        before: dict[bytes, int] = {}
        places = []
        for rank, node in enumerate(self.nodes):
            places.append((before.get(node, 0), self.nodes.index(node), rank))
            before[node] = before.get(node, 0) + 1
        turn = [rank for *_, rank in sorted(places)]
        return [turn[p % self.size] for p in range(fragments)]

    def meet_on(self, device: torch.device) -> bool:
        """Create a process group between devices, or return False if ranks share a device. Called by all ranks."""
        module: Any = getattr(torch, device.type, None)
        known = getattr(module.get_device_properties(device), "uuid", None) if device.type == "cuda" else None
        names = self.exchange(f"{self.order if known is None else known}".encode())
        if len(set(names)) < self.size:
            return False
        if self.size > 1:
            with _together():
                self._on_device = dist.new_group(backend=dist.Backend.default_device_backend_map[device.type])
                # A rank may have nothing to move later, so all ranks take part in the first operation of the group.
                dist.all_reduce(torch.zeros(1, device=device), group=self._on_device)
            self._wait_for_device = getattr(module, "synchronize", None)
        return True

    def close(self) -> None:
        """Destroy the process groups. Called by every rank after its last message.

        This ends the threads of the groups. A thread that frees a tensor while the interpreter ends would abort the
        process (`terminate called without an active exception`), even if all work is done.
        """
        if self._wait_for_device is not None:
            self._wait_for_device()  # transfers still queued between devices would be aborted
        groups = self._on_device, self._group
        self._on_device = self._group = None
        for group in groups:
            if group is not None:
                with suppress(ValueError, AssertionError):  # the job has already destroyed all groups
                    dist.destroy_process_group(group)

    # --- a call -------------------------------------------------------------------------------------------------------

    def meet(self, call: GroupCall, number: int = 0, tokens: int = 0) -> None:
        """Begin a call that all ranks make. `number` (the step) and `tokens` must be equal on all ranks.

        The first command of the call also compares them, so a call in which nothing is done costs one collective.
        """
        self._opening = (call, number, tokens)

    def opened(self, held: object) -> None:
        """Keep a reference to `held` until all ranks have made the call that has just begun.

        By then every rank has carried out the commands of the call before.
        """
        self._held = held

    def command(self, op: Op, argument: int = 0, number: int = 0, blob: bytes = b"") -> None:
        """Command all ranks to do something with two numbers and some bytes. Called by the first rank.

        Raises `InputError` on every rank if the ranks have not made the same call.
        """
        head = (op, argument, number, len(blob))
        if self._opening is not None:
            self._agree(head)
        else:
            self._broadcast(torch.tensor(head, dtype=torch.int64, device="cpu"))
        if blob:
            self._broadcast(torch.frombuffer(bytearray(blob), dtype=torch.uint8))

    def hear(self) -> tuple[Op, int, int, bytes]:
        """Return the next command of the first rank. Called by all other ranks.

        Raises `InputError` as `command` does, and the error that the first rank failed with.
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
        """Send an error that the block raises to the other ranks, and raise it. Only the first rank sends errors."""
        try:
            yield
        except RankLost:
            raise
        except BaseException as error:
            if self.leads and self.size > 1 and not getattr(error, _KNOWN, False):
                words = msgspec.msgpack.encode(_Failure(type(error).__name__, str(error) or type(error).__name__))
                # The error of this rank is raised below. Sending can fail too, if the other ranks ended differently.
                with suppress(IsthmusError):
                    self.command(Op.FAIL, blob=words)
            raise

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Raise `InputError` on every rank if the block raises one on any of them. Called by all ranks."""
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
        """Wait until every rank has made this call. Log the ranks that have not; raise `RankLost` after `HUNG_S`.

        A rank that hangs keeps its connections, so only the time tells it from a slow rank.
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
        """Return, as text for a message, the ranks that do not wait in this call."""
        said = _aside(lambda: [self._board().check([f"{opening}/{rank}"]) for rank in range(self.size)])
        if said is None:
            return "rank 0, with which the job's store does not answer either,"
        missing = [str(rank) for rank, waits in enumerate(said) if not waits]
        return f"rank {', '.join(missing)}" if missing else "a rank"

    def _board(self) -> Any:
        """Return the job's store, which torch has made. In it ranks leave notes for each other without a collective."""
        return dist.distributed_c10d.PrefixStore(f"isthmus/{self._name}", dist.distributed_c10d._get_default_store())

    # --- data between ranks -------------------------------------------------------------------------------------------

    def sum(self, count: int) -> int:
        """Return the sum of `count` over all ranks. Called by all ranks."""
        return sum(
            int.from_bytes(words, "little", signed=True)
            for words in self.exchange(count.to_bytes(8, "little", signed=True))
        )

    def exchange(self, words: bytes) -> list[bytes]:
        """Return the bytes that each rank passes, in the order of the ranks. Called by all ranks."""
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
        """Return whether all ranks pass True. Called by all ranks."""
        said = torch.tensor([yes], dtype=torch.uint8, device="cpu")
        if self.size > 1:
            with _together():
                dist.all_reduce(said, dist.ReduceOp.MIN, group=self._group)
        return bool(said[0])

    def move(self, out: Sequence[tuple[int, torch.Tensor]], into: Sequence[tuple[int, torch.Tensor]]) -> Sequence[Any]:
        """Begin to send bytes [n] uint8 to ranks and to receive them from ranks; return the transfers for `finish`.

        All bytes lie on the CPU, or all lie on a device.
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
        """Wait until transfers are done. Transfers between devices make the current stream wait, not this thread."""
        with _together():
            for work in works:
                work.wait()

    def _broadcast(self, words: torch.Tensor) -> None:
        if self.size > 1:
            with _together():
                dist.broadcast(words, 0, group=self._group)


_KNOWN = "known_to_all_ranks"


def known(error: IsthmusError) -> IsthmusError:
    """Mark an error that every rank raises by itself, so the first rank does not send it; return the error."""
    setattr(error, _KNOWN, True)
    return error


def _aside(work: Callable[[], Any]) -> Any:
    """Return the answer to a question to the job's store; None if it takes longer than `LOOK_S` or raises an error."""
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
    """Return bytes that are equal for processes that reach each other by loopback, and different for all others."""
    try:
        return os.readlink("/proc/self/ns/net").encode() + Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return socket.gethostname().encode()


def _spoken(said: Sequence[int]) -> str:
    call, number, tokens = said[:3]
    if call == GroupCall.STEP:
        return f"is at step {number} with {tokens} tokens"
    return "joins" if call == GroupCall.JOIN else f"closes after step {number}"


# --- finding the ranks ------------------------------------------------------------------------------------------------


def ranks_of(model: nn.Module) -> Ranks | None:
    """Return the ranks that train this model as one learner, or None if a single process trains a plain model.

    They are all ranks of the job if the model is sharded over several ranks or replicated by
    `DistributedDataParallel`. They are this process alone if its DTensors lie on meshes of size 1. Called by every
    rank. Raises `InputError` for a model that cannot be joined, and names the parameter or the wrapper.
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
    """Return the names of the dimensions longer than 1 of a mesh and of the mesh that it was sliced from."""
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    found = set()
    for one in (mesh, root):
        for name, size in zip(one.mesh_dim_names or (), one.mesh.shape, strict=False):
            if size > 1:
                found.add(name)
    return found
