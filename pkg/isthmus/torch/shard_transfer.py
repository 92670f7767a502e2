"""How a model's tensors are cut among the ranks of a learner, and how whole tensors are gathered and scattered.

Every placement of torch (FSDP2 even and uneven, HSDP, tensor parallelism and both) leaves one rectangular block of a
tensor on each rank. If several ranks hold the same block, `gather` takes it from the root, or else from the first.
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
    """A rectangle of a tensor, given by where it begins and by its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that select the block in the whole tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))


class ParameterInfo(msgspec.Struct, frozen=True, array_like=True):
    """How a rank describes one of its parameters to the other ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    block: Block
    checksum: int | None
    """CRC-32 of the values of a tensor that is not a DTensor, if the model has DTensors too; else None. All ranks must
    hold the same values."""


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, as FSDP2 and tensor parallelism make them."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local_of(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor; the result shares the tensor's memory."""
    with torch.no_grad():
        held: torch.Tensor = (tensor.to_local() if is_sharded(tensor) else tensor).detach()
        return held


def block_of(tensor: Any) -> Block:
    """Return the block of the whole tensor that this rank holds."""
    if not is_sharded(tensor):
        return Block((0,) * tensor.dim(), tuple(tensor.shape))
    # This function is private in torch, but no public one handles strided shards. Nothing else here calls it.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Block(tuple(offset), tuple(shape))


def remade(tensor: Any, local: torch.Tensor) -> Any:
    """Return a DTensor with the placement of `tensor`, and `local` as this rank's part."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


Rows = tuple[int, int] | None
"""The first row of a tensor and the end (exclusive); None means all rows."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor, or some rows of it, that is to be gathered or scattered."""

    index: int
    """Number of the parameter that is cut into the same blocks."""
    held: torch.Tensor
    """What this rank holds of the whole tensor."""
    rows: Rows = None

    def cut(self, block: Block) -> tuple[Block, slice | None]:
        """Return where the wanted rows of a block lie among all wanted rows, and which rows of the block they are."""
        if self.rows is None or not block.size:
            return block, None
        first, last = max(self.rows[0], block.offset[0]), min(self.rows[1], block.offset[0] + block.shape[0])
        own = slice(first - block.offset[0], max(first, last) - block.offset[0])
        offset = (first - self.rows[0], *block.offset[1:])
        return Block(offset, (own.stop - own.start, *block.shape[1:])), own

    def part(self, own: slice | None) -> torch.Tensor:
        """Return what this rank holds of the wanted rows; the result shares the memory of `held`."""
        return self.held if own is None else self.held[own]


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """A block of a tensor, and the rank that supplies it."""

    rank: int
    block: Block


class Shards:
    """How the parameters of a model lie on the ranks of its learner."""

    def __init__(self, model: nn.Module, ranks: Ranks, alike: Sequence[str]) -> None:
        """Exchange descriptions with all ranks. `alike`: texts that all ranks must share, such as the learner's name.

        Raises `InputError` on every rank if these texts or the parameters differ, or if blocks do not tile a tensor.
        """
        self.ranks = ranks
        self.named = list(torch_model.named(model))
        """Names and parameters."""
        self.index = {name: i for i, (name, _) in enumerate(self.named)}
        mixed = any(is_sharded(p) for _, p in self.named)
        own = [_said(name, p, mixed and not is_sharded(p)) for name, p in self.named]
        heard = ranks.exchange(msgspec.msgpack.encode((list(alike), own)))
        every = [msgspec.msgpack.decode(words, type=tuple[list[str], list[ParameterInfo]]) for words in heard]
        for rank, (words, said) in enumerate(every):
            _require_alike(rank, (words, said), every[0])
        self._blocks = [[said[i].block for _, said in every] for i in range(len(own))]
        for one, blocks in zip(own, self._blocks, strict=True):
            pieces_of(one.name, one.shape, blocks)  # raises `InputError` if they do not tile the tensor
        self._given: dict[tuple[int, int], tuple[ShardPiece, ...]] = {}
        self._placed = {_placement(p): i for i, (_, p) in enumerate(self.named) if is_sharded(p)}

    def like(self, tensor: Any) -> int | None:
        """Return the number of a parameter with the shape and placement of this DTensor, or None if none has them."""
        return self._placed.get(_placement(tensor))

    def _pieces(self, index: int, root: int) -> tuple[ShardPiece, ...]:
        """Return the distinct blocks of a parameter, each with its supplier for `root`; see `pieces_of`."""
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
        """Gather whole tensors, or rows of them, on the rank `root`. Called by all ranks.

        `into`: on `root`, the tensors to write, of any dtype; not used on other ranks. `through`: where blocks lie
        while they are moved. If that is a device, this thread does not wait for it.
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
        """Write each rank's blocks of whole tensors, or of rows of them, in place. Called by all ranks.

        `whole`: on `root`, the tensors to read; not used on other ranks. `through`: see `gather`.
        """
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
        packed: dict[tuple[Block, ...], torch.Tensor] = {}  # ranks with the same blocks get the same bytes, packed once
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
    """Return the distinct blocks that are not empty, each with the rank that supplies it to `root`.

    That is `root` itself if it holds the block, else the first rank that does.

    Raises `InputError` if the blocks do not tile the tensor.
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
    """Return bytes [n] uint8 as a dtype. They are copied if their offset is no multiple of the dtype's size."""
    if words.storage_offset() % dtype.itemsize:
        words = words.clone()
    return words.view(dtype)


def _bytes(tensor: torch.Tensor, where: torch.device = CPU) -> torch.Tensor:
    return tensor.detach().to(where).contiguous().reshape(-1).view(torch.uint8)
