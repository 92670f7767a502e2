"""A learner of several processes: all ranks together read and write the model, as the first rank commands.

The first rank runs the agent and the boundary, as a learner of one process does. The other ranks `serve` it. Whole
fragments are gathered on the ranks that own them.
What goes to the store does not depend on the number of ranks, bit for bit. So a learner may come back with another
number of ranks, or with one.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from typing_extensions import override

from isthmus.codecs.kernels import F32, U8
from isthmus.errors import InputError, ObjectMissing, PortError, RankLost, RecordInvalid, known_error
from isthmus.format.digests import digest
from isthmus.format.layout import Layout, Tensor
from isthmus.format.records import tree
from isthmus.format.records.tree import NOWHERE, Leaf, LeafSpec
from isthmus.format.rules import Adoption, FrozenCheck, Hyperparameters
from isthmus.learner.backend import ArrayRef, Arrays, Remote
from isthmus.learner.boundary import Replica
from isthmus.learner.checkpoint import APART_BYTES, Checkpoint, LoopState, Saver
from isthmus.learner.checkpoint_shards import ShardRef, ShardToWrite
from isthmus.learner.ranks.arrays import ArrayTable
from isthmus.log.run import UNTOLD
from isthmus.reasons import Reason
from isthmus.torch import model as torch_model
from isthmus.torch import moments, optimizers
from isthmus.torch.device import DeviceStream
from isthmus.torch.donor_check import GroupCheck, Trial
from isthmus.torch.frozen import digest_of_stored
from isthmus.torch.loop import Loop
from isthmus.torch.ranks import GroupCall, Op, Ranks, known
from isthmus.torch.shard_transfer import Block, Rows, ShardPiece, Shards, Wanted, is_sharded, local_of, remade
from isthmus.torch.sharded_fragments import Mix, ShardedFragments
from isthmus.torch.unmerged_state import local_tensors

logger = logging.getLogger(__name__)

_SHARD = "isthmus: shard of parameter"
"""Marks, in a state that is sent to the ranks, a tensor of which each rank then receives its block."""

_LIES = "isthmus: in the store"
"""Marks, in a state that is sent to the ranks, a tensor of which each rank reads its block from the store."""

SHARED_BYTES = APART_BYTES
"""From this many bytes on, ranks take turns to write a tensor that all of them hold alike, and each rank reads it
itself. The first rank writes and reads smaller ones."""


@dataclass(frozen=True, slots=True)
class InBlocks:
    """A tensor of a checkpoint that ranks write in pieces."""

    spec: LeafSpec
    pieces: tuple[ShardToWrite, ...]


class Lying(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a checkpoint that lies in the store in pieces."""

    spec: LeafSpec
    pieces: tuple[ShardRef, ...]


def _made(leaf: Leaf) -> object:
    return Lying(leaf.spec, tuple(leaf.pieces)) if leaf.pieces else torch_model.make_tensor(leaf)


class Remotes(Protocol):
    """Makes references to arrays of other ranks; see `learner.ranks.client.Peers`."""

    def remote(self, rank: int, number: int | None = None) -> Remote:
        """Return a reference to an array of a rank, under a new number if none is given."""
        ...

    def reserve(self, count: int) -> int:
        """Return the first of `count` consecutive numbers that no array has."""
        ...


Fetch = Callable[[Sequence[ShardRef], int, tuple[int, ...], tuple[int, ...]], U8]
"""Reads a rectangle of an array from the store, given the array's pieces, the itemsize, and the rectangle's offset and
shape; see `checkpoint_shards.read`."""


LayoutOf = Callable[[bytes], tuple[Layout, Sequence[int]]]
"""Returns the run's layout and the rank that owns each fragment, from the bytes that the first rank sends."""


@dataclass(slots=True)
class CallResult:
    """What the first rank sends to the other ranks at the end of a call."""

    words: bytes = b""


class Sharded(Arrays, Replica, Saver):
    """A model and its optimizer on the ranks of one learner."""

    def __init__(
        self,
        loop: Loop,
        ranks: Ranks,
        alike: list[str],
        device_stream: DeviceStream | None = None,
        settings: Hyperparameters = Hyperparameters.RESTORED,
    ) -> None:
        """Exchange descriptions with the other ranks (see `Shards`).

        `device_stream`: the agent's stream on the device where this rank's part of the model lies.
        """
        self.ranks = ranks
        self.loop, self._model, self._optimizer, self._settings = loop, loop.model, loop.optimizer, settings
        where = "a model on the CPU" if device_stream is None else f"a model on {device_stream.device.type}"
        alike = [*alike, f"an optimizer {optimizers.class_of(loop.optimizer)}", loop.described(), where]
        self._shards = Shards(loop.model, ranks, alike)
        self.device_stream = (
            device_stream if device_stream is not None and ranks.meet_on(device_stream.device) else None
        )
        """The agent's stream on the device of this rank's part of the model; None if fragments lie on the host."""
        self._fragments: ShardedFragments
        self._remotes: Remotes
        self._commanded: list[ArrayRef | None] = []
        """Arrays that other ranks were commanded to read, write or mix. They are kept until every rank has done so."""
        self.fetch: Fetch
        """Reads arrays of checkpoints from the store. Training thread."""
        self.array_table = ArrayTable()
        """Arrays that this rank holds for the first rank, by number. Empty on the first rank."""
        self._trial: Trial | None = None
        self._gathering: list[Any] = [
            m for m in loop.model.modules() if any(c.__name__ == "FSDPModule" for c in type(m).__mro__)
        ]

    @contextmanager
    def call(
        self, call: str, number: int = 0, tokens: int = 0, layout_of: LayoutOf | None = None
    ) -> Iterator[CallResult]:
        """Make a call that all ranks make.

        The first rank runs the block, then sends what the block left in `CallResult.words`. The other ranks carry out
        its commands until they receive these bytes, then run the block. The last call, `CLOSE`, also ends the group.

        Raises on all ranks what the first rank failed with, and `InputError` if the ranks are not in step.
        """
        said = CallResult()
        self.ranks.meet(GroupCall[call], number, tokens)
        if self.ranks.leads and self._commanded:
            self.ranks.opened(self._commanded)
            self._commanded = []
        if not self.ranks.leads:
            said.words = self._serve(layout_of)
            yield said
        else:
            with self.ranks.telling():
                yield said
                self.ranks.command(Op.END, blob=said.words)
        if GroupCall[call] == GroupCall.CLOSE:
            self.ranks.close()

    # --- on the first rank --------------------------------------------------------------------------------------------

    def values(self, piece: Tensor) -> F32:
        """Return the values of a piece of a trainable parameter, flat, as float32."""
        found: F32 = self._ask_values(self._shards.index[piece.spec.name], piece.rows, "float32").reshape(-1).numpy()
        return found

    def frozen(self, check: FrozenCheck) -> dict[str, bytes]:
        """Return the digest of each frozen parameter; see `frozen.digests_of`."""
        asked = [(i, name, p) for i, (name, p) in enumerate(self._shards.named) if not p.requires_grad]
        if check == FrozenCheck.TRUSTED:
            return {name: UNTOLD for _, name, _ in asked}
        return {name: digest_of_stored(name, self._whole(i) if is_sharded(p) else p) for i, name, p in asked}

    def _whole(self, index: int) -> torch.Tensor:
        p = self._shards.named[index][1]
        return self._ask_values(index, None, str(p.dtype).removeprefix("torch."))

    def _ask_values(self, index: int, rows: Rows, dtype: str) -> torch.Tensor:
        self.ranks.command(Op.VALUES, index, blob=msgspec.msgpack.encode((rows, dtype)))
        found = self._values(index, rows, dtype)
        assert found is not None, "the first rank has what was gathered"
        return found

    def place(self, layout: Layout, owner: Sequence[int], remotes: Remotes, words: bytes) -> None:
        """Send all ranks the run's layout and which rank owns which fragment.

        `remotes` makes references to arrays of other ranks. `words`: what is sent.
        """
        self.ranks.command(Op.LAYOUT, blob=words)
        self._remotes = remotes
        self._place(layout, owner)

    @override
    def empty(self, fragment: int) -> ArrayRef:
        owner = self._fragments.owner[fragment]
        return self._remotes.remote(owner) if owner else self._fragments.arrays.empty(fragment)

    @override
    def mixed(
        self, fragment: int, adopt: Adoption, local: ArrayRef, values: ArrayRef, base: ArrayRef, since: ArrayRef | None
    ) -> ArrayRef:
        owner = self._fragments.owner[fragment]
        if not owner:
            return self._fragments.arrays.mixed(fragment, adopt, local, values, base, since)
        found = self._remotes.remote(owner)
        sent = 0 if since is None else _number(since)
        mix = Mix(adopt.value, _number(local), _number(values), _number(base), sent)
        self._commanded += [found, local, values, base, since]
        self.ranks.command(Op.MIX, fragment, found.number, msgspec.msgpack.encode(mix))
        return found

    @override
    def read(self, fragment: int, out: ArrayRef) -> None:
        self._commanded.append(out)
        self.ranks.command(Op.READ, fragment, _number(out))
        self._fragments.read(fragment, _number(out), None if isinstance(out, Remote) else out)

    @override
    def write(self, fragment: int, values: ArrayRef) -> None:
        self._commanded.append(values)
        self.ranks.command(Op.WRITE, fragment, _number(values))
        self._write(fragment, _number(values), None if isinstance(values, Remote) else values)

    def mark(self, now: Callable[[], float]) -> None:
        """Note a step boundary on this rank, as each other rank does on its own; see `checkpoint.Saver.mark`."""
        self.loop.mark(now)

    def moved(self, orderly: bool) -> str | None:
        """Return why this rank's state can no longer be saved, or None if it can; see `checkpoint.Saver.moved`."""
        return self.loop.moved(orderly)

    def save(self) -> LoopState:
        """Return copies of the state of all ranks; see `checkpoint.Saver.save`.

        Raises `InputError` if a rank has state that a checkpoint cannot keep.
        """
        count = len(list(_tensors_in(self._optimizer.state_dict()["state"]))) + len(local_tensors(self._model))
        first = self._remotes.reserve(count * self.ranks.size)
        self.ranks.command(Op.SAVE, number=first)
        found = self._save(first)
        if isinstance(found, str):
            raise InputError(found)
        return found

    @override
    def take(self, node: object) -> Leaf | None:
        return Leaf(node.spec, NOWHERE, node.pieces) if isinstance(node, InBlocks) else torch_model.take_tensor(node)

    def tried(self) -> GroupCheck:
        """Take a step with a copy of the optimizer on all ranks; return their combined result.

        See `moments.DonorCheck`. Raises `ValueError` if a rank cannot step.
        """
        self.ranks.command(Op.STEP_COPY)

        def with_moments(saved: dict[str, Any]) -> list[bytes]:
            marked, wholes = self._marked(saved)
            blob = tree.packed(marked, "moments", torch_model.take_tensor)
            self.ranks.command(Op.TRY, blob=blob)
            return self._try(blob, wholes)

        begun = self._step_copy()
        assert self._trial is not None, "it has just begun"
        return GroupCheck(self._trial, begun, with_moments)

    def restore(self, own: Checkpoint | None, donor: Checkpoint | None) -> str:
        """Restore optimizer and data on all ranks; return where the moments came from: `own`, `peer` or `fresh`.

        See `moments.restore`.
        """
        saved: dict[str, Any] | None = None
        alone: list[Any] | None = None
        local: dict[str, Any] = {}
        more: list[torch.Tensor] = []
        if own is not None:
            found = moments.own_state(self._model, self._optimizer, own, _made)
            if isinstance(found, str):
                logger.warning("the optimizer in %s is not used: %s", own.key, found)
            else:
                moments.choose(self._optimizer, found, self._settings)
                saved = found
            alone = moments.alone_of(own, self.ranks.size)
            local, more = self._marked_local(own.local(_made) or {})
        elif donor is not None:
            saved = donor.optimizer(torch_model.make_tensor)
        marked, wholes = self._marked(saved)
        wholes = [*more, *wholes]
        given = {"state": marked, "local": local, "alone": alone, "own": own is not None}
        blob = tree.packed(given, "a checkpoint", torch_model.take_tensor)
        self.ranks.command(Op.LOAD, blob=blob)
        origin = self._load(blob, wholes)
        if donor is not None:
            logger.info("moments of the inner optimizer from %s: %s", donor.key, origin)
        return origin

    # --- on the other ranks -------------------------------------------------------------------------------------------

    def _serve(self, layout_of: LayoutOf | None) -> bytes:
        """Carry out the first rank's commands until the call is over; return the bytes that it sends then.

        Raises what the first rank failed with, and `InputError` if the ranks are not in step.
        """
        while True:
            op, argument, number, blob = self.ranks.hear()
            match op:
                case Op.END:
                    return blob
                case Op.VALUES:
                    self._values(argument, *msgspec.msgpack.decode(blob, type=tuple[Rows, str]))
                case Op.LAYOUT:
                    assert layout_of is not None, "a run is told to those who join"
                    self._place(*layout_of(blob))
                case Op.READ:
                    self._fragments.read(argument, number, None)
                case Op.WRITE:
                    self._write(argument, number, None)
                case Op.MIX:
                    self._fragments.mix(argument, number, blob)
                case Op.SAVE:
                    self._save(number)
                case Op.LOAD:
                    self._load(blob, [])
                case Op.STEP_COPY:
                    self._step_copy()
                case Op.TRY:
                    self._try(blob, [])
                case Op.FAIL:
                    raise AssertionError("raised where it is heard")

    # --- on all ranks -------------------------------------------------------------------------------------------------

    def _values(self, index: int, rows: Rows, dtype: str) -> torch.Tensor | None:
        """Gather a parameter, or rows of it, on the first rank in a dtype; return None on other ranks."""
        p = self._shards.named[index][1]
        shape = tuple(p.shape) if rows is None else (rows[1] - rows[0], *p.shape[1:])
        into = [torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")] if self.ranks.leads else []
        self._shards.gather([Wanted(index, local_of(p), rows)], into)
        return into[0] if into else None

    def _place(self, layout: Layout, owner: Sequence[int]) -> None:
        self._fragments = ShardedFragments(
            self._shards, layout, owner, self.array_table, self.device_stream, self.loop.copies.move_along
        )

    def _write(self, fragment: int, number: int, values: ArrayRef | None) -> None:
        self._fragments.write(fragment, number, values)
        for module in self._gathering:
            module.reshard()  # an evaluation may have left whole parameters with the old values

    def _save(self, first: int) -> "LoopState | str":
        """Copy the state of this rank; return that of all ranks on the first rank, and an empty one on the others.

        If the state of any rank cannot be saved, return the reason, which is the same on all ranks.
        """
        state, local = self._optimizer.state_dict(), self.loop.changed()
        found = [*_tensors_in(state["state"]), *(("model", t) for t in local.values())]
        places = [f"{path} {tuple(t.shape)} {t.dtype}" for path, t in found]
        heard = [
            msgspec.msgpack.decode(said, type=tuple[list[str], list[str]])
            for said in self.ranks.exchange(msgspec.msgpack.encode((places, list(local))))
        ]
        for rank, (theirs, names) in enumerate(heard):
            if (theirs, names) != heard[0]:
                return f"rank {rank} holds other state of the optimizer or the model than rank 0"
        # Buffers may differ between ranks. A rank saves those that differ from the first rank's as its own.
        plain = {name: torch_model.copy_of(t) for name, t in local.items() if not is_sharded(t)}
        digests = {name: digest(torch_model.bits_of(t).numpy().data) for name, t in plain.items()}
        said = [
            msgspec.msgpack.decode(words, type=dict[str, bytes])
            for words in self.ranks.exchange(msgspec.msgpack.encode(digests))
        ]
        own = {name: t for name, t in plain.items() if digests[name] != said[0][name]}
        alone = self._alone(own)
        words = self.ranks.exchange(alone if isinstance(alone, bytes) else b"")
        whys = [why.decode() for why in self.ranks.exchange(b"" if isinstance(alone, bytes) else alone.encode())]
        if any(whys):
            return next(f"rank {rank}: {why}" for rank, why in enumerate(whys) if why)
        copied = {}
        for n, (_, tensor) in enumerate(found):
            kept = self._kept(tensor, n, first + n * self.ranks.size)
            if kept is not None:
                copied[id(tensor)] = kept
        if not self.ranks.leads:
            return LoopState()
        optimizer = self.loop.optimizer_state(wrapped=self.ranks.size == 1, state=state, copied=copied)
        shared = {name: copied.get(id(tensor), plain.get(name)) for name, tensor in local.items()}
        return LoopState(
            optimizer, shared, tuple(np.frombuffer(each, np.uint8) for each in words) if any(words) else ()
        )

    def _alone(self, buffers: dict[str, torch.Tensor]) -> bytes | str:
        """Return the packed state that only this rank has, or the reason why a checkpoint cannot keep it."""
        own = self.loop.own() or {}
        if buffers:
            own["local"] = buffers
        if not own:
            return tree.packed(None, "", torch_model.take_tensor)
        try:
            return tree.packed(own, "", torch_model.take_tensor)
        except InputError as error:
            return str(error)

    def _kept(self, tensor: Any, number: int, first: int) -> InBlocks | None:
        """Copy and keep this rank's pieces of a tensor; return all pieces, or None if it is not written in pieces.

        Only the first rank uses the result. Each rank writes its own shards. The ranks take turns to write large
        tensors that all of them hold alike.
        """
        held, sharded = local_of(tensor), is_sharded(tensor)
        index = self._shards.like(tensor) if sharded else None
        if type(held) is not torch.Tensor or (sharded and index is None):
            return None  # packing the checkpoint raises an error that names its place
        if not sharded and (self.ranks.size == 1 or held.nbytes < SHARED_BYTES):
            return None
        whole = ShardPiece(number % self.ranks.size, Block((0,) * tensor.dim(), tuple(tensor.shape)))
        pieces = []
        for piece in (whole,) if index is None else self._shards.pieces(index):
            kept: Any = None
            if piece.rank == self.ranks.order:
                leaf = torch_model.take_tensor(torch_model.copy_of(held))
                assert leaf is not None, "it is a tensor"
                kept = leaf.data
                if not self.ranks.leads:
                    self.array_table.put(first + piece.rank, kept)
            elif self.ranks.leads:
                kept = self._remotes.remote(piece.rank, first + piece.rank)
            pieces.append(ShardToWrite(piece.rank, kept, piece.block.offset, piece.block.shape))
        size = tensor.numel() * tensor.dtype.itemsize
        dtype = str(tensor.dtype).removeprefix("torch.")
        stride = () if sharded else torch_model.own_order(held)
        spec = LeafSpec(maker="torch", dtype=dtype, shape=tuple(tensor.shape), size=size, stride=stride)
        return InBlocks(spec, tuple(pieces))

    def _step_copy(self) -> list[bytes]:
        self._trial = Trial(self._optimizer)
        return self.ranks.exchange(self._trial.begun())

    def _try(self, blob: bytes, wholes: list[torch.Tensor]) -> list[bytes]:
        assert self._trial is not None, "tried before a copy has stepped"
        try:
            saved = self._unmarked(tree.unpacked(blob, torch_model.make_tensor), iter(wholes))
        except RankLost:
            raise
        except Exception as error:  # moments of another learner; the other ranks wait for this rank's answer
            return self.ranks.exchange(self._trial.failed(error))
        assert saved is not None, "moments are tried, not their absence"
        return self.ranks.exchange(self._trial.tried(saved))

    def _load(self, blob: bytes, wholes: list[torch.Tensor]) -> str:
        self._trial = None  # to free its memory
        given = tree.unpacked(blob, torch_model.make_tensor)
        before = self._optimizer.state_dict()
        failure = "", ""
        try:
            whole = iter(wholes)
            try:
                local = self._unmarked_local(given["local"], whole)
            except (RecordInvalid, ObjectMissing) as error:
                logger.warning("buffers in the checkpoint cannot be read and begin anew: %s", error)
                local = {}
            if given["own"]:
                # Before the moments, which may be missing on a rank: all ranks go on at the same place in the data.
                alone = (given["alone"] or [None] * self.ranks.size)[self.ranks.order] or {}
                self.loop.go_on(alone, local | alone.get("local", {}), self._settings)
            saved = self._unmarked(given["state"], whole)
            if saved is not None:
                optimizers.load(self._optimizer, saved, settings=given["own"])
            self.loop.settle_rates()
        except RankLost:
            raise
        except (RecordInvalid, ObjectMissing, PortError) as error:
            failure = type(error).__name__, str(error)
        except Exception as error:  # raised by the optimizer or the data; the other ranks wait to hear of it
            failure = InputError.__name__, repr(error)
        for rank, words in enumerate(self.ranks.exchange(msgspec.msgpack.encode(failure))):
            kind, why = msgspec.msgpack.decode(words, type=tuple[str, str])
            if not kind:
                continue
            damaged = kind in (RecordInvalid.__name__, ObjectMissing.__name__)
            if given["own"] and not damaged:
                why = f"rank {rank} cannot go on from the checkpoint of this learner: {why}"
                raise known(known_error(kind, why, {}))
            # The moments are another learner's, or the checkpoint is damaged: training starts without them.
            whose = "the optimizer's state in the checkpoint" if given["own"] else "another learner's moments"
            logger.warning("%s cannot be loaded on rank %d: %s", whose, rank, why)
            self._optimizer.load_state_dict(before)
            return "fresh"
        return "fresh" if given["state"] is None else "own" if given["own"] else "peer"

    # --- sending a state to the ranks ---------------------------------------------------------------------------------

    def _marked(self, saved: dict[str, Any] | None) -> tuple[dict[str, Any] | None, list[torch.Tensor]]:
        """Return a state with marks in place of the tensors of which each rank gets its block, and those tensors."""
        if saved is None:
            return None, []
        wholes: list[torch.Tensor] = []
        marked = {key: _mark(entry, self._parameter(key), wholes) for key, entry in saved["state"]["state"].items()}
        return saved | {"state": saved["state"] | {"state": marked}}, wholes

    def _marked_local(self, saved: dict[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Do the same as `_marked` for the model's local tensors, by name."""
        wholes: list[torch.Tensor] = []
        tensors = local_tensors(self._model)
        return {name: _mark(value, tensors.get(name), wholes) for name, value in saved.items()}, wholes

    def _parameter(self, key: Any) -> Any:
        parameters = optimizers.parameters_of(self._optimizer)
        return parameters[key] if isinstance(key, int) and key < len(parameters) else None

    def _unmarked(self, marked: dict[str, Any] | None, wholes: Iterator[torch.Tensor]) -> dict[str, Any] | None:
        """Return the state as this rank holds it. This undoes `_marked`. Called by all ranks."""
        if marked is None:
            return None
        entries = {
            key: self._unmark(entry, self._parameter(key), wholes) for key, entry in marked["state"]["state"].items()
        }
        return marked | {"state": marked["state"] | {"state": entries}}

    def _unmarked_local(self, marked: dict[str, Any], wholes: Iterator[torch.Tensor]) -> dict[str, Any]:
        """Do the same as `_unmarked` for the model's local tensors, by name."""
        tensors = local_tensors(self._model)
        return {name: self._unmark(value, tensors.get(name), wholes) for name, value in marked.items()}

    def _unmark(self, node: Any, like: Any, wholes: Iterator[torch.Tensor]) -> Any:
        if isinstance(node, dict) and _LIES in node:
            return self._fetched(msgspec.msgpack.decode(node[_LIES], type=Lying), like)
        if isinstance(node, dict) and _SHARD in node:
            index = self._shards.like(like)
            assert index is not None, "a parameter lies as itself"
            held = torch.empty_like(local_of(like), dtype=getattr(torch, node[_SHARD]))
            self._shards.scatter([Wanted(index, held)], [next(wholes)] if self.ranks.leads else [])
            return remade(like, held)
        if isinstance(node, dict):
            return {key: self._unmark(value, like, wholes) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(self._unmark(item, like, wholes) for item in node)
        return node

    def _fetched(self, lying: Lying, like: Any) -> Any:
        """Return this rank's part of a tensor in a checkpoint, read from the store. Raises `RecordInvalid`."""
        spec = lying.spec
        dtype = torch_model.dtype_of(spec)
        sharded = is_sharded(like) and tuple(like.shape) == spec.shape
        index = self._shards.like(like) if sharded else None
        block = Block((0,) * len(spec.shape), spec.shape) if index is None else self._shards.block(index)
        data = self.fetch(lying.pieces, dtype.itemsize, block.offset, block.shape) if block.size else NOWHERE.copy()
        stride = spec.stride if index is None else ()
        own = LeafSpec(maker="torch", dtype=spec.dtype, shape=block.shape, size=data.size, stride=stride)
        held = torch_model.make_tensor(Leaf(own, data, shared=False))
        if (why := moments.why_not_finite(held, "state")) is not None:
            raise RecordInvalid(Reason.NON_FINITE, why)
        if index is None:
            return held
        # The state gets the strides of the parameter's shard, since a fused optimizer reads both in the same order.
        return remade(like, torch.empty_like(local_of(like), dtype=held.dtype, device=held.device).copy_(held))


def _number(held: ArrayRef) -> int:
    """Return the number of an array on its owner; 0 for an array of the first rank."""
    return held.number if isinstance(held, Remote) else 0


def _mark(node: Any, like: Any, wholes: list[torch.Tensor]) -> Any:
    """Return an entry with marks in place of the tensors of which each rank gets its block.

    Tensors that are at hand are appended to `wholes`.
    """
    if isinstance(node, Lying):
        return {_LIES: msgspec.msgpack.encode(node)}
    if isinstance(node, torch.Tensor) and is_sharded(like) and node.shape == like.shape:
        wholes.append(node)
        return {_SHARD: str(node.dtype).removeprefix("torch.")}
    if isinstance(node, dict):
        return {key: _mark(value, like, wholes) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(_mark(item, like, wholes) for item in node)
    return node


def _tensors_in(state: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the path and the tensor of each tensor in an optimizer's state, in the order of its keys' `repr`."""

    def walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, torch.Tensor):
            yield path, node
        elif isinstance(node, dict):
            for key, value in node.items():
                yield from walk(value, f"{path}[{key!r}]")
        elif isinstance(node, list | tuple):
            for i, item in enumerate(node):
                yield from walk(item, f"{path}[{i}]")

    for key in sorted(state, key=repr):
        yield from walk(state[key], f"state[{key!r}]")
