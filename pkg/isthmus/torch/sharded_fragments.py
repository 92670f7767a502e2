"""Fragments of a model that lies on several ranks: one rank owns each, gathers it, and scatters it.

If the model lies on devices, so do the fragments. Blocks then go from device to device, queued on the stream that
training uses, and no training thread waits for them. If a device has no room, or fragments are not kept on devices,
blocks go through the host's memory.
"""

from collections.abc import Sequence

import msgspec
import torch

from isthmus.codecs.kernels import F32
from isthmus.format.layout import Layout, Tensor
from isthmus.format.rules import Adoption
from isthmus.learner.backend import ArrayRef, Arrays, LocalArrays, local_array
from isthmus.learner.ranks.arrays import ArrayTable
from isthmus.torch import model as torch_model
from isthmus.torch.device import Blocks, DeviceBlock, DeviceStream, Staged, at_hand, used_up
from isthmus.torch.model import MoveAlong, no_copies
from isthmus.torch.ranks import Ranks
from isthmus.torch.shard_transfer import CPU, Shards, Wanted, local_of


class Mix(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of `Arrays.mixed` for a fragment, with its arrays by number; 0 is no array."""

    adopt: str
    local: int
    values: int
    base: int
    since: int


class ShardedFragments:
    """This rank's part in reading, writing and mixing fragments, which all ranks do at the same time."""

    def __init__(
        self,
        shards: Shards,
        layout: Layout,
        owner: Sequence[int],
        array_table: ArrayTable,
        device_stream: DeviceStream | None,
        move_along: MoveAlong = no_copies,
    ) -> None:
        """`owner`: the rank that owns each fragment. `array_table`: where this rank keeps arrays by number.
        `device_stream`: the agent's stream on the device where the model lies; None if fragments lie on the host."""
        self.owner = owner
        self._shards, self._layout, self._array_table, self._device_stream = shards, layout, array_table, device_stream
        self._ranks: Ranks = shards.ranks
        self._move_along = move_along
        self.arrays: Arrays = LocalArrays(layout) if device_stream is None else Blocks(layout, device_stream)
        self._places = [[(shards.index[t.spec.name], t) for t in f.tensors] for f in layout.fragments]

    def read(self, fragment: int, number: int, out: ArrayRef | None) -> None:
        """Gather a fragment on its owner: into `out`, or into a new array of this number if `number` is not 0."""
        owner = self.owner[fragment]
        owns = owner == self._ranks.order
        if number and owns:
            out = self.arrays.empty(fragment)
        if self._device_stream is not None:
            assert out is None or isinstance(out, DeviceBlock), "arrays of a model on a device are there"
            self._read_there(fragment, owner, out)
        else:
            whole = [] if out is None else self._cut(fragment, local_array(out))
            self._shards.gather(self._held(fragment), whole, owner)
        if number and owns:
            self._array_table.put(number, out)

    def write(self, fragment: int, number: int, values: ArrayRef | None) -> None:
        """Give every rank its blocks of `values`, or of the array of this number if `number` is not 0."""
        with self._move_along([(self._shards.named[i][1], None) for i, _ in self._places[fragment]]):
            self._write(fragment, number, values)

    def _write(self, fragment: int, number: int, values: ArrayRef | None) -> None:
        owner = self.owner[fragment]
        if number and owner == self._ranks.order:
            values = self._wait_for(number)
        lies = None if values is None else at_hand(values)
        block = lies if isinstance(lies, DeviceBlock) else None
        there = owner != self._ranks.order or block is not None
        if self._device_stream is not None and self._ranks.all_say(there and self._has_room(fragment, owner)):
            if block is not None:
                self._device_stream.after(block.ready)
            whole = [] if block is None else self._shaped(fragment, block.tensors)
            self._shards.scatter(self._held(fragment), whole, owner, self._device_stream.device)
            if block is not None:
                self._device_stream.used_by_training(block.tensors)
        else:
            flat = self._on_host(fragment, values) if values is not None else None
            whole = [] if flat is None else self._cut(fragment, torch_model.writable(flat))
            self._shards.scatter(self._held(fragment), whole, owner)
        if values is not None:
            used_up(values)

    def mix(self, fragment: int, number: int, words: bytes) -> None:
        """Mix arrays of a fragment on its owner, and keep the result as the array of this number."""
        if self.owner[fragment] != self._ranks.order:
            return
        mix = msgspec.msgpack.decode(words, type=Mix)
        local, values, base = (self._wait_for(n) for n in (mix.local, mix.values, mix.base))
        since = self._wait_for(mix.since) if mix.since else None
        self._array_table.put(number, self.arrays.mixed(fragment, Adoption(mix.adopt), local, values, base, since))

    def _wait_for(self, number: int) -> ArrayRef:
        found: ArrayRef = self._array_table.wait_for(number)
        return found

    def _read_there(self, fragment: int, owner: int, out: DeviceBlock | None) -> None:
        """Read a fragment into a block: on the device, or on the host if the device of any rank has no room for it."""
        assert self._device_stream is not None, "asked only where there is one"
        room = None if out is None else self._room(fragment, self._device_stream.device)
        fits = (out is None or room is not None) and self._has_room(fragment, owner)
        through = self._device_stream.device if self._ranks.all_say(fits) else CPU
        if out is not None and through.type != self._device_stream.device.type:
            room = self._room(fragment, CPU)
            assert room is not None, "the host has room, or ends"
        self._shards.gather(self._held(fragment), room or [], owner, through)
        if out is None or room is None:
            return
        out.tensors = [x.reshape(-1) for x in room]
        if through != CPU:
            self._device_stream.used_aside(out.tensors)
            out.ready = self._device_stream.mark()

    def _has_room(self, fragment: int, owner: int) -> bool:
        """Return whether this rank's device has room for what this rank sends or receives of a fragment.

        The memory is free again when this returns, and the allocator keeps it.
        """
        assert self._device_stream is not None, "asked only where there is one"
        held = self._held(fragment)
        if owner == self._ranks.order:  # the blocks of all other ranks, at most everything
            size = sum(t.size * w.held.itemsize for w, t in zip(held, self._tensors(fragment), strict=True))
        else:
            size = sum(w.held.numel() * w.held.itemsize for w in held)
        try:
            torch.empty(size, dtype=torch.uint8, device=self._device_stream.device)
        except torch.OutOfMemoryError:
            return False
        return True

    def _on_host(self, fragment: int, values: ArrayRef) -> F32:
        """Return an array in the host's memory. If the array is on the device only, wait for a copy of it."""
        if isinstance(values, Staged):
            return values.host
        if isinstance(values, DeviceBlock):
            return torch.cat([x.float().cpu() for x in values.tensors]).numpy()
        return local_array(values)

    def _room(self, fragment: int, where: torch.device) -> list[torch.Tensor] | None:
        """Return empty tensors in the shapes and dtypes of a fragment's parameters; None if the device has no room."""
        try:
            return [
                torch.empty(t.shape, dtype=local_of(self._shards.named[i][1]).dtype, device=where)
                for i, t in self._places[fragment]
            ]
        except torch.OutOfMemoryError:
            return None

    def _held(self, fragment: int) -> list[Wanted]:
        return [Wanted(i, local_of(self._shards.named[i][1]), t.rows) for i, t in self._places[fragment]]

    def _cut(self, fragment: int, flat: F32) -> list[torch.Tensor]:
        return self._shaped(fragment, [torch.from_numpy(flat[t.start : t.stop]) for t in self._tensors(fragment)])

    def _shaped(self, fragment: int, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [x.view(t.shape) for x, t in zip(flat, self._tensors(fragment), strict=True)]

    def _tensors(self, fragment: int) -> tuple[Tensor, ...]:
        return self._layout.fragments[fragment].tensors
