"""A learner of several processes: what its first rank reads and writes of the model, all ranks do together.

The first rank has the agent and the boundary, as a learner of one process has; the others `serve` it. Whole fragments
come together on the ranks that own them.
What goes to the store is the same, bit for bit: a learner may come back with another number of ranks, or with one.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import nn

from isthmus.errors import InputError, ObjectMissing, PortError, RankLost, RecordInvalid, known_error
from isthmus.kernels import F32, U8
from isthmus.layout import Layout, Tensor
from isthmus.learner.checkpoint import Checkpoint, Stateful
from isthmus.learner.parts import Away, Lies
from isthmus.learner.steward import Held, Remote
from isthmus.log.run import UNTOLD
from isthmus.owners.shelf import Shelf
from isthmus.pytorch import model as torch_model
from isthmus.pytorch import moments, optimizers
from isthmus.pytorch.device import Lane
from isthmus.pytorch.frozen import digest_of_stored
from isthmus.pytorch.gathered import Fragments, Mix
from isthmus.pytorch.ranks import Call, Op, Ranks, known
from isthmus.pytorch.shards import Block, Rows, Shards, Wanted, is_sharded, local_of, remade
from isthmus.pytorch.trial import Together, Trial
from isthmus.reasons import Reason
from isthmus.records import tree
from isthmus.records.tree import NOWHERE, Leaf, LeafSpec
from isthmus.rules import Adoption, FrozenCheck

logger = logging.getLogger(__name__)

_SHARD = "isthmus: shard of parameter"
"""Marks, in a state on its way to the ranks, a tensor that is given to each of them by its blocks …"""

_LIES = "isthmus: in the store"
"""… and one of which each of them reads its block."""


@dataclass(frozen=True, slots=True)
class InBlocks:
    """A tensor of a checkpoint of which each rank writes its block."""

    spec: LeafSpec
    pieces: tuple[Away, ...]


class Lying(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a checkpoint that lies in the store, in pieces."""

    spec: LeafSpec
    pieces: tuple[Lies, ...]


def _made(leaf: Leaf) -> object:
    return Lying(leaf.spec, tuple(leaf.pieces)) if leaf.pieces else torch_model.make_tensor(leaf)


class Remotes(Protocol):
    """Makes what stands for arrays of other ranks; see `owners.asked.Peers`."""

    def remote(self, rank: int, number: int | None = None) -> Remote:
        """Return what stands for an array of a rank, by a new number where none is given."""
        ...

    def reserve(self, count: int) -> int:
        """Return the first of so many numbers that nothing has."""
        ...


Fetch = Callable[[Sequence[Lies], int, tuple[int, ...], tuple[int, ...]], U8]
"""Reads a rectangle of an array from the store: its pieces, itemsize, offset and shape; see `parts.read`."""


LayoutOf = Callable[[bytes], tuple[Layout, Sequence[int]]]
"""Returns how the run cuts the model and who owns what, from what the first rank tells."""


@dataclass(slots=True)
class Said:
    """What the first rank says to the others when a call is over."""

    words: bytes = b""


class Sharded:
    """A model and its optimizer on the ranks of one learner."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Stateful | None,
        ranks: Ranks,
        alike: list[str],
        lane: Lane | None = None,
    ) -> None:
        """Meet the other ranks (see `Shards`). `lane`: the agent's, on the device where this rank's part of the model
        lies."""
        self.ranks = ranks
        self._model, self._optimizer, self._data = model, optimizer, data
        kept = "without data=" if data is None else "with data="
        where = "a model on the CPU" if lane is None else f"a model on {lane.device.type}"
        self._shards = Shards(model, ranks, [*alike, f"an optimizer {optimizers.class_of(optimizer)}", kept, where])
        self.lane = lane if lane is not None and ranks.meet_on(lane.device) else None
        """The agent's, on the device where this rank's part of the model lies, if fragments are kept there."""
        self._fragments: Fragments
        self._remotes: Remotes
        self._commanded: list[Held | None] = []
        """What other ranks were told to read, write or mix: they may not have come to it yet."""
        self.fetch: Fetch
        """Reads what lies in the store. Training thread."""
        self.shelf = Shelf()
        """What this rank holds of the fragments that it owns; of the first rank, nothing."""
        self._trial: Trial | None = None
        self._gathering: list[Any] = [
            m for m in model.modules() if any(c.__name__ == "FSDPModule" for c in type(m).__mro__)
        ]

    @contextmanager
    def call(self, call: str, number: int = 0, tokens: int = 0, layout_of: LayoutOf | None = None) -> Iterator[Said]:
        """Make a call that all ranks make. The first does what is inside, and says what it leaves in `Said.words`; the
        others serve it and hear that, and then do what is inside. With the last one, `CLOSE`, their group ends.

        Raises on all of them what the first one failed with, and `InputError` where they are not in step.
        """
        said = Said()
        self.ranks.meet(Call[call], number, tokens)
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
        if Call[call] == Call.CLOSE:
            self.ranks.close()

    # --- of the first rank --------------------------------------------------------------------------------------------

    def values(self, piece: Tensor) -> F32:
        """Return the values of a trainable parameter's piece, flat, as float32."""
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
        """Tell all ranks how the run cuts the model, and which of them owns which fragment.

        `remotes` makes what stands for arrays of others.
        """
        self.ranks.command(Op.LAYOUT, blob=words)
        self._remotes = remotes
        self._place(layout, owner)

    def empty(self, fragment: int) -> Held:
        """See `Arrays.empty`."""
        owner = self._fragments.owner[fragment]
        return self._remotes.remote(owner) if owner else self._fragments.arrays.empty(fragment)

    def mixed(self, fragment: int, adopt: Adoption, local: Held, values: Held, base: Held, since: Held | None) -> Held:
        """See `Arrays.mixed`."""
        owner = self._fragments.owner[fragment]
        if not owner:
            return self._fragments.arrays.mixed(fragment, adopt, local, values, base, since)
        found = self._remotes.remote(owner)
        sent = 0 if since is None else _number(since)
        mix = Mix(adopt.value, _number(local), _number(values), _number(base), sent)
        self._commanded += [found, local, values, base, since]
        self.ranks.command(Op.MIX, fragment, found.number, msgspec.msgpack.encode(mix))
        return found

    def read(self, fragment: int, out: Held) -> None:
        """See `Replica.read`."""
        self._commanded.append(out)
        self.ranks.command(Op.READ, fragment, _number(out))
        self._fragments.read(fragment, _number(out), None if isinstance(out, Remote) else out)

    def write(self, fragment: int, values: Held) -> None:
        """See `Replica.write`."""
        self._commanded.append(values)
        self.ranks.command(Op.WRITE, fragment, _number(values))
        self._write(fragment, _number(values), None if isinstance(values, Remote) else values)

    def save(self) -> tuple[object, object]:
        """See `checkpoint.Saver.save`."""
        count = len(list(_shards_in(self._optimizer.state_dict()["state"])))
        first = self._remotes.reserve(count * self.ranks.size)
        self.ranks.command(Op.SAVE, number=first)
        found = self._save(first)
        assert found is not None, "the first rank has what was saved"
        return found

    def take(self, node: object) -> Leaf | None:
        """See `checkpoint.Saver.take`."""
        return Leaf(node.spec, NOWHERE, node.pieces) if isinstance(node, InBlocks) else torch_model.take_tensor(node)

    def tried(self) -> Together:
        """Have a copy of the optimizer take a step on all ranks; see `moments.Judge`. Raises `ValueError`."""
        self.ranks.command(Op.STEP_COPY)

        def with_moments(saved: dict[str, Any]) -> list[bytes]:
            marked, wholes = self._marked(saved)
            blob = tree.packed(marked, "moments", torch_model.take_tensor)
            self.ranks.command(Op.TRY, blob=blob)
            return self._try(blob, wholes)

        begun = self._step_copy()
        assert self._trial is not None, "it has just begun"
        return Together(self._trial, begun, with_moments)

    def restore(self, own: Checkpoint | None, donor: Checkpoint | None) -> str:
        """Bring optimizer and data of all ranks to where they were; return where the moments came from: `own`, `peer`
        or `fresh`. See `moments.restore`."""
        saved, places = None, None
        if own is not None:
            found = moments.own_state(self._model, self._optimizer, own, _made)
            if isinstance(found, str):
                logger.warning("the optimizer in %s is not used: %s", own.key, found)
            else:
                saved = found
            places = None if self._data is None else moments.places_of(own, self.ranks.size)
        elif donor is not None:
            saved = donor.optimizer(torch_model.make_tensor)
        marked, wholes = self._marked(saved)
        given = {"state": marked, "data": places, "own": own is not None}
        blob = tree.packed(given, "a checkpoint", torch_model.take_tensor)
        self.ranks.command(Op.LOAD, blob=blob)
        origin = self._load(blob, wholes)
        if donor is not None:
            logger.info("moments of the inner optimizer from %s: %s", donor.key, origin)
        return origin

    # --- of the others ------------------------------------------------------------------------------------------------

    def _serve(self, layout_of: LayoutOf | None) -> bytes:
        """Do what the first rank has all do, until the call is over; return what it says then.

        Raises what it failed with, and `InputError` where the ranks are not in step.
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

    # --- of all -------------------------------------------------------------------------------------------------------

    def _values(self, index: int, rows: Rows, dtype: str) -> torch.Tensor | None:
        """Bring a parameter, or rows of it, to the first rank, in a dtype."""
        p = self._shards.named[index][1]
        shape = tuple(p.shape) if rows is None else (rows[1] - rows[0], *p.shape[1:])
        into = [torch.empty(shape, dtype=getattr(torch, dtype))] if self.ranks.leads else []
        self._shards.gather([Wanted(index, local_of(p), rows)], into)
        return into[0] if into else None

    def _place(self, layout: Layout, owner: Sequence[int]) -> None:
        self._fragments = Fragments(self._shards, layout, owner, self.shelf, self.lane)

    def _write(self, fragment: int, number: int, values: Held | None) -> None:
        self._fragments.write(fragment, number, values)
        for module in self._gathering:
            module.reshard()  # an evaluation may have left whole parameters behind, of the old values

    def _save(self, first: int) -> tuple[object, object] | None:
        state = self._optimizer.state_dict()
        found = list(_shards_in(state["state"]))
        places = [f"{path} {tuple(t.shape)} {t.dtype}" for path, t in found]
        data = b"" if self._data is None else self._data_words()
        heard = self.ranks.exchange(tree.packed((places, data), "checkpoint", torch_model.take_tensor))
        said = [tree.unpacked(words, torch_model.make_tensor) for words in heard]
        for rank, (theirs, words) in enumerate(said):
            if isinstance(words, str):
                raise known(InputError(f"rank {rank}: {words}"))
            if theirs != said[0][0]:
                raise known(InputError(f"the optimizer of rank {rank} holds other state than that of rank 0"))
        copied = {}
        for n, (_, tensor) in enumerate(found):
            held = local_of(tensor)
            index = self._shards.like(tensor)
            if index is None or type(held) is not torch.Tensor:
                continue  # refused by its place when the checkpoint is packed
            copied[id(tensor)] = self._kept(tensor, held, index, first + n * self.ranks.size)
        if not self.ranks.leads:
            return None
        optimizer = optimizers.state_of(
            self._model, self._optimizer, wrapped=self.ranks.size == 1, state=state, copied=copied
        )
        words = [words for _, words in said]
        if not any(words):
            return optimizer, None
        return optimizer, {moments.BY_RANK: [np.frombuffer(each, np.uint8) for each in words]}

    def _kept(self, tensor: torch.Tensor, held: torch.Tensor, index: int, first: int) -> InBlocks:
        """Copy what this rank is to write of a tensor, and keep it; on the first rank, return who has what."""
        pieces = []
        for piece in self._shards.pieces(index):
            kept: Any = None
            if piece.rank == self.ranks.order:
                leaf = torch_model.take_tensor(torch_model.copy_of(held))
                assert leaf is not None, "it is a tensor"
                kept = leaf.data
                if not self.ranks.leads:
                    self.shelf.put(first + piece.rank, kept)
            elif self.ranks.leads:
                kept = self._remotes.remote(piece.rank, first + piece.rank)
            pieces.append(Away(piece.rank, kept, piece.block.offset, piece.block.shape))
        size = tensor.numel() * tensor.dtype.itemsize
        dtype = str(tensor.dtype).removeprefix("torch.")
        return InBlocks(LeafSpec(maker="torch", dtype=dtype, shape=tuple(tensor.shape), size=size), tuple(pieces))

    def _data_words(self) -> bytes | str:
        assert self._data is not None, "asked only where there is data"
        try:
            return tree.packed(self._data.state_dict(), "data.state_dict()", torch_model.take_tensor)
        except InputError as error:
            return str(error)

    def _step_copy(self) -> list[bytes]:
        self._trial = Trial(self._optimizer)
        return self.ranks.exchange(self._trial.begun())

    def _try(self, blob: bytes, wholes: list[torch.Tensor]) -> list[bytes]:
        assert self._trial is not None, "tried before a copy has stepped"
        try:
            saved = self._unmarked(tree.unpacked(blob, torch_model.make_tensor), iter(wholes))
        except RankLost:
            raise
        except Exception as error:  # a stranger's moments: the others wait to hear of it
            return self.ranks.exchange(self._trial.failed(error))
        assert saved is not None, "moments are tried, not their absence"
        return self.ranks.exchange(self._trial.tried(saved))

    def _load(self, blob: bytes, wholes: list[torch.Tensor]) -> str:
        self._trial = None  # its memory is wanted
        given = tree.unpacked(blob, torch_model.make_tensor)
        before = self._optimizer.state_dict()
        failure = "", ""
        try:
            # Whether all ranks find their moments or not: they go on at one place.
            if self._data is not None and given["data"] is not None:
                self._data.load_state_dict(given["data"][self.ranks.order])
            saved = self._unmarked(given["state"], iter(wholes))
            if saved is not None:
                optimizers.load(self._optimizer, saved, settings=given["own"])
        except RankLost:
            raise
        except (RecordInvalid, ObjectMissing, PortError) as error:
            failure = type(error).__name__, str(error)
        except Exception as error:  # the optimizer's own, or the data's: the others wait to hear of it
            failure = InputError.__name__, repr(error)
        for rank, words in enumerate(self.ranks.exchange(msgspec.msgpack.encode(failure))):
            kind, why = msgspec.msgpack.decode(words, type=tuple[str, str])
            if not kind:
                continue
            damaged = kind in (RecordInvalid.__name__, ObjectMissing.__name__)
            if given["own"] and not damaged:
                why = f"rank {rank} cannot go on from the checkpoint of this learner: {why}"
                raise known(known_error(kind, why, {}))
            # A stranger's, or no longer what was written: training starts without.
            whose = "the optimizer's state in the checkpoint" if given["own"] else "another learner's moments"
            logger.warning("%s cannot be loaded on rank %d: %s", whose, rank, why)
            self._optimizer.load_state_dict(before)
            return "fresh"
        return "fresh" if given["state"] is None else "own" if given["own"] else "peer"

    # --- a state on its way to the ranks ------------------------------------------------------------------------------

    def _marked(self, saved: dict[str, Any] | None) -> tuple[dict[str, Any] | None, list[torch.Tensor]]:
        """Return a whole state with marks where each rank gets its blocks, and the tensors that were there."""
        if saved is None:
            return None, []
        parameters = optimizers.parameters_of(self._optimizer)
        wholes: list[torch.Tensor] = []

        def walk(node: Any, like: Any) -> Any:
            if isinstance(node, Lying):
                return {_LIES: msgspec.msgpack.encode(node)}
            if isinstance(node, torch.Tensor) and is_sharded(like) and node.shape == like.shape:
                wholes.append(node)
                return {_SHARD: str(node.dtype).removeprefix("torch.")}
            if isinstance(node, dict):
                return {key: walk(value, like) for key, value in node.items()}
            if isinstance(node, list | tuple):
                return type(node)(walk(item, like) for item in node)
            return node

        entries = saved["state"]["state"]
        marked = {
            key: walk(entry, parameters[key] if isinstance(key, int) and key < len(parameters) else None)
            for key, entry in entries.items()
        }
        return saved | {"state": saved["state"] | {"state": marked}}, wholes

    def _unmarked(self, marked: dict[str, Any] | None, wholes: Iterator[torch.Tensor]) -> dict[str, Any] | None:
        """Return the state as this rank holds it: undo `_marked`, together with all ranks."""
        if marked is None:
            return None
        parameters = optimizers.parameters_of(self._optimizer)

        def walk(node: Any, like: Any) -> Any:
            if isinstance(node, dict) and _LIES in node:
                return self._fetched(msgspec.msgpack.decode(node[_LIES], type=Lying), like)
            if isinstance(node, dict) and _SHARD in node:
                index = self._shards.like(like)
                assert index is not None, "a parameter lies as itself"
                held = torch.empty_like(local_of(like), dtype=getattr(torch, node[_SHARD]))
                self._shards.scatter([Wanted(index, held)], [next(wholes)] if self.ranks.leads else [])
                return remade(like, held)
            if isinstance(node, dict):
                return {key: walk(value, like) for key, value in node.items()}
            if isinstance(node, list | tuple):
                return type(node)(walk(item, like) for item in node)
            return node

        entries = {
            key: walk(entry, parameters[key] if isinstance(key, int) and key < len(parameters) else None)
            for key, entry in marked["state"]["state"].items()
        }
        return marked | {"state": marked["state"] | {"state": entries}}

    def _fetched(self, lying: Lying, like: Any) -> Any:
        """Return a tensor of a checkpoint as this rank holds it, from the store. Raises `RecordInvalid`."""
        spec = lying.spec
        dtype = torch_model.dtype_of(spec)
        sharded = is_sharded(like) and tuple(like.shape) == spec.shape
        index = self._shards.like(like) if sharded else None
        block = Block((0,) * len(spec.shape), spec.shape) if index is None else self._shards.block(index)
        data = self.fetch(lying.pieces, dtype.itemsize, block.offset, block.shape) if block.size else NOWHERE.copy()
        own = LeafSpec(maker="torch", dtype=spec.dtype, shape=block.shape, size=data.size)
        held = torch_model.make_tensor(Leaf(own, data))
        if (why := moments.why_not_finite(held, "state")) is not None:
            raise RecordInvalid(Reason.NON_FINITE, why)
        return held if index is None else remade(like, held)


def _number(held: Held) -> int:
    """Return the number of an array with its owner; 0 with the first rank."""
    return held.number if isinstance(held, Remote) else 0


def _shards_in(state: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the DTensors in an optimizer's state, by the numbers of their parameters, with where they are."""

    def walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
        if is_sharded(node):
            yield path, node
        elif isinstance(node, dict):
            for key, value in node.items():
                yield from walk(value, f"{path}[{key!r}]")
        elif isinstance(node, list | tuple):
            for i, item in enumerate(node):
                yield from walk(item, f"{path}[{i}]")

    for key in sorted(state, key=repr):
        yield from walk(state[key], f"state[{key!r}]")
