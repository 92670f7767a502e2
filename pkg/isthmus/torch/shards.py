"""Where a model's tensors are cut among the ranks of a learner, and how whole ones are gathered and given back.

Every placement of torch (FSDP2 even and uneven, HSDP, tensor parallelism and both) leaves one rectangular block of a
tensor on each rank. What replicas hold alike is taken from the first of them.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from isthmus.errors import InputError
from isthmus.torch import model as torch_model
from isthmus.torch.ranks import Ranks

CPU = torch.device("cpu")


class Block(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of a tensor: it begins at `offset` and is of `shape`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it is, for indexing the whole tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))


class ParameterInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of one of its parameters."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    block: Block
    checksum: int | None
    """Of a tensor that is no DTensor beside others that are: all ranks must hold the same."""


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, as FSDP2 and tensor parallelism leave them."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local_of(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor; it shares its memory."""
    with torch.no_grad():
        held: torch.Tensor = (tensor.to_local() if is_sharded(tensor) else tensor).detach()
        return held


def block_of(tensor: Any) -> Block:
    """Return where what this rank holds lies in the whole tensor."""
    if not is_sharded(tensor):
        return Block((0,) * tensor.dim(), tuple(tensor.shape))
    # Private in torch, and the only thing there that knows of strided shards; this is its one place here.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Block(tuple(offset), tuple(shape))


def remade(tensor: Any, local: torch.Tensor) -> Any:
    """Return a DTensor placed as another one, with what this rank is to hold of it."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


Rows = tuple[int, int] | None
"""From which row of a tensor on, up to which; None: all of it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be gathered or scattered."""

    index: int
    """Of the parameter whose blocks cut it."""
    held: torch.Tensor
    """What this rank holds of it."""
    rows: Rows = None

    def cut(self, block: Block) -> tuple[Block, slice | None]:
        """Return where the wanted rows of a block lie in what is wanted, and which of the block's own they are."""
        if self.rows is None or not block.size:
            return block, None
        first, last = max(self.rows[0], block.offset[0]), min(self.rows[1], block.offset[0] + block.shape[0])
        own = slice(first - block.offset[0], max(first, last) - block.offset[0])
        offset = (first - self.rows[0], *block.offset[1:])
        return Block(offset, (own.stop - own.start, *block.shape[1:])), own

    def part(self, own: slice | None) -> torch.Tensor:
        """Return what this rank holds of the wanted rows; it shares the memory."""
        return self.held if own is None else self.held[own]


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """A block that one rank gives to the whole tensor."""

    rank: int
    block: Block


class Shards:
    """How the parameters of a model lie on the ranks of its learner."""

    def __init__(self, model: nn.Module, ranks: Ranks, alike: Sequence[str]) -> None:
        """Ask all ranks. `alike`: words that must be the same on all of them, such as the learner's name.

        Raises `InputError`, on every rank, where they differ, or where the blocks do not tile a tensor.
        """
        self.ranks = ranks
        self.named = list(torch_model.named(model))
        """Parameters with their names."""
        self.index = {name: i for i, (name, _) in enumerate(self.named)}
        mixed = any(is_sharded(p) for _, p in self.named)
        own = [_said(name, p, mixed and not is_sharded(p)) for name, p in self.named]
        heard = ranks.exchange(msgspec.msgpack.encode((list(alike), own)))
        every = [msgspec.msgpack.decode(words, type=tuple[list[str], list[ParameterInfo]]) for words in heard]
        for rank, (words, said) in enumerate(every):
            _require_alike(rank, (words, said), every[0])
        self._blocks = [[said[i].block for _, said in every] for i in range(len(own))]
        for one, blocks in zip(own, self._blocks, strict=True):
            pieces_of(one.name, one.shape, blocks)  # says where they are none
        self._given: dict[tuple[int, int], tuple[ShardPiece, ...]] = {}
        self._placed = {_placement(p): i for i, (_, p) in enumerate(self.named) if is_sharded(p)}

    def like(self, tensor: Any) -> int | None:
        """Return the number of a parameter that lies on the ranks as this DTensor does; None where none does."""
        return self._placed.get(_placement(tensor))

    def _pieces(self, index: int, root: int) -> tuple[ShardPiece, ...]:
        """Return the distinct blocks of a parameter, each with who gives it to `root`: itself, where it can."""
        found = self._given.get((index, root))
        if found is None:
            name, p = self.named[index]
            found = self._given[index, root] = pieces_of(name, tuple(p.shape), self._blocks[index], root)
        return found

    def pieces(self, index: int) -> tuple[ShardPiece, ...]:
        """Return the distinct blocks of a parameter, each with the first rank that holds it."""
        return self._pieces(index, 0)

    def block(self, index: int) -> Block:
        """Return the block of a parameter that this rank holds."""
        return self._blocks[index][self.ranks.order]

    def gather(
        self, wanted: Sequence[Wanted], into: Sequence[torch.Tensor], root: int = 0, through: torch.device = CPU
    ) -> None:
        """Bring whole tensors, or rows of them, together on a rank. Called by all ranks.

        `into`: on that rank, where they go, of any dtype; elsewhere nothing is written. `through`: where blocks are
        when they are moved. Where that is a device, nothing here waits for it.
        """
        if self.ranks.order != root:
            parts = []
            for w in wanted:
                if any(piece.rank == self.ranks.order for piece in self._pieces(w.index, root)):
                    _, own = w.cut(self._blocks[w.index][self.ranks.order])
                    parts.append(_bytes(w.part(own), through))
            if sum(part.numel() for part in parts):
                self.ranks.finish(self.ranks.move([(root, torch.cat(parts))], []))
            return
        given = [(w, whole, p.rank, w.cut(p.block)) for w, whole in zip(wanted, into, strict=True)
                 for p in self._pieces(w.index, root)]  # fmt: skip
        buffers = {}
        for rank in self._others(root):
            size = sum(block.size * w.held.itemsize for w, _, of, (block, _) in given if of == rank)
            if size:
                buffers[rank] = torch.empty(size, dtype=torch.uint8, device=through)
        works = self.ranks.move([], [*buffers.items()])
        for w, whole, rank, (block, own) in given:
            if rank == root and block.size:
                whole[block.slices].copy_(w.part(own).reshape(block.shape))
        self.ranks.finish(works)
        at = dict.fromkeys(buffers, 0)
        for w, whole, rank, (block, _) in given:
            if rank != root and block.size:
                begin = at[rank]
                at[rank] = end = begin + block.size * w.held.itemsize
                whole[block.slices].copy_(_as(buffers[rank][begin:end], w.held.dtype).view(block.shape))

    def scatter(
        self, wanted: Sequence[Wanted], whole: Sequence[torch.Tensor], root: int = 0, through: torch.device = CPU
    ) -> None:
        """Give every rank its blocks of whole tensors, or of rows of them, in place. Called by all ranks; the arguments
        as for `gather`."""
        if self.ranks.order != root:
            mine = [w.part(w.cut(self._blocks[w.index][self.ranks.order])[1]) for w in wanted]
            size = sum(held.numel() * held.itemsize for held in mine)
            if size:
                buffer = torch.empty(size, dtype=torch.uint8, device=through)
                self.ranks.finish(self.ranks.move([], [(root, buffer)]))
                at = 0
                for held in mine:
                    end = at + held.numel() * held.itemsize
                    if held.numel():
                        held.copy_(_as(buffer[at:end], held.dtype).view(held.shape))
                    at = end
            return
        packed: dict[tuple[Block, ...], torch.Tensor] = {}  # replicas get the same
        sent = []
        for rank in self._others(root):
            blocks = tuple(w.cut(self._blocks[w.index][rank])[0] for w in wanted)
            if not any(block.size for block in blocks):
                continue
            if blocks not in packed:
                packed[blocks] = torch.cat(
                    [
                        _bytes(tensor[block.slices].to(w.held.dtype), through)
                        for w, tensor, block in zip(wanted, whole, blocks, strict=True)
                    ]
                )
            sent.append((rank, packed[blocks]))
        works = self.ranks.move(sent, [])
        for w, tensor in zip(wanted, whole, strict=True):
            block, own = w.cut(self._blocks[w.index][root])
            if block.size:
                held = w.part(own)
                held.copy_(tensor[block.slices].reshape(held.shape))
        self.ranks.finish(works)

    def _others(self, root: int) -> list[int]:
        return [rank for rank in range(self.ranks.size) if rank != root]


def _said(name: str, p: torch.Tensor, summed: bool) -> ParameterInfo:
    checksum = zlib.crc32(_bytes(p).numpy().data) if summed else None
    dtype = str(p.dtype).removeprefix("torch.")
    return ParameterInfo(name, tuple(p.shape), dtype, p.requires_grad, block_of(p), checksum)


def _require_alike(
    rank: int, theirs: tuple[list[str], list[ParameterInfo]], ours: tuple[list[str], list[ParameterInfo]]
) -> None:
    for a, b in zip(theirs[0], ours[0], strict=False):
        if a != b:
            raise InputError(f"the ranks of a learner join alike, but rank {rank} joins {a} and rank 0 {b}")
    for x, y in zip(theirs[1], ours[1], strict=False):
        for what in ("name", "shape", "dtype", "trained"):
            if getattr(x, what) != getattr(y, what):
                raise InputError(
                    f"the ranks of a learner train one model, but parameter {y.name!r} of rank 0 has {what} "
                    f"{getattr(y, what)}, and rank {rank} has {x.name!r} with {getattr(x, what)}: models that differ "
                    "between ranks (pipeline stages, local experts) are not one learner's"
                )
        if x.checksum != y.checksum:
            raise InputError(
                f"parameter {x.name!r} is whole on every rank, but rank {rank} holds other values than rank 0: give "
                "all ranks the same ones (one seed, or a broadcast); local experts cannot be merged"
            )
    if len(theirs[1]) != len(ours[1]):
        raise InputError(f"rank {rank} has {len(theirs[1])} parameters, rank 0 has {len(ours[1])}")


def pieces_of(name: str, shape: tuple[int, ...], blocks: Sequence[Block], root: int = 0) -> tuple[ShardPiece, ...]:
    """Return distinct blocks, each with who gives it to `root`: itself where it can, else the first rank that holds it.

    Raises `InputError` where they do not tile the tensor.
    """
    first: dict[Block, int] = {}
    for rank in (root, *range(len(blocks))) if blocks else ():
        if blocks[rank].size:
            first.setdefault(blocks[rank], rank)
    found = tuple(ShardPiece(rank, block) for block, rank in first.items())
    begin = np.array([p.block.offset for p in found], np.int64).reshape(len(found), len(shape))
    end = begin + np.array([p.block.shape for p in found], np.int64).reshape(len(found), len(shape))
    meet = np.minimum(end[:, None], end[None]) > np.maximum(begin[:, None], begin[None])
    apart = not (meet.all(axis=2) & ~np.eye(len(found), dtype=bool)).any()
    inside = (begin >= 0).all() and (end <= np.array(shape, np.int64)).all()
    if not (apart and inside and sum(p.block.size for p in found) == prod(shape)):
        raise InputError(
            f"the blocks of {name} on the ranks, {', '.join(f'{b.shape} at {b.offset}' for b in blocks)}, do not make "
            f"up a tensor of shape {shape}: this placement is not known"
        )
    return found


def _placement(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements)


def _as(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes [n] uint8 as a dtype; they are moved where one of another size lies before them."""
    if words.storage_offset() % dtype.itemsize:
        words = words.clone()
    return words.view(dtype)


def _bytes(tensor: torch.Tensor, where: torch.device = CPU) -> torch.Tensor:
    return tensor.detach().to(where).contiguous().reshape(-1).view(torch.uint8)
