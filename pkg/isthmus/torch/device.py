"""Capture, packing and adoption of fragments on the device that holds the parameters, while training goes on.

At a step boundary the training thread queues copies on the stream that training uses: a copy of a fragment within the
device, or a copy into the parameters. It does not wait for them. The agent's threads queue conversions, codecs and
copies between device and host on a separate stream, and wait for those. The same code runs with a CPU as the device.
There, each operation is done when it is queued.
"""

import logging
import threading  # noqa: TID251  (asks only which thread waits)
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from isthmus.codecs import aligned, codec, packed_size
from isthmus.codecs.kernels import F32, U8
from isthmus.format import memory
from isthmus.format.layout import Fragment, Layout, Tensor
from isthmus.format.records import frame
from isthmus.format.records.objects import Part, PartHeader, UpdateHeader
from isthmus.format.rules import Adoption
from isthmus.learner import residuals
from isthmus.learner.backend import (
    BLEND,
    ArrayBackend,
    ArrayRef,
    Arrays,
    LocalBackend,
    OnDevice,
    PackedUpdate,
    local_array,
    local_residual,
)
from isthmus.learner.boundary import Replica
from isthmus.log import Commit
from isthmus.torch import device_codecs
from isthmus.torch.model import MoveAlong, TorchReplica, named, no_copies, rows_of, writable

logger = logging.getLogger(__name__)

STAGED_BYTES, PINNED_MAX = 64 << 20, 4
"""Bytes of one piece that is copied between device and host; the most pinned buffers of this size that are kept."""

CHUNK = 1 << 24
"""Parameters packed at a time. This limits the device memory that packing takes to some 0.4 GB. It is a multiple of the
codecs' block size, so packing in chunks gives the same bits."""


class DeviceStream:
    """The agent's stream on a device, and its order relative to the stream that training uses."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waits: Counter[int] = Counter()
        """How often each thread has waited for the device, by thread identifier."""
        self._module: Any = getattr(torch, device.type, None) if has_lanes(device) else None
        self._stream: Any = self._module.Stream(device=device) if self._module else None
        self._pinned: list[torch.Tensor] = []

    def mark(self) -> Any:
        """Return a mark behind everything that the calling thread has queued on its current stream."""
        return self._module.current_stream(self.device).record_event() if self._module else None

    def after(self, mark: Any) -> None:
        """Delay what the calling thread queues on its current stream from now on until a mark is reached."""
        if self._module and mark is not None:
            self._module.current_stream(self.device).wait_event(mark)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Queue the operations of the block on the agent's stream."""
        if self._module is None:
            with torch.no_grad():
                yield
            return
        with torch.no_grad(), self._module.stream(self._stream):
            yield

    def wait(self) -> None:
        """Block this thread until everything queued on its current stream is done."""
        self.waits[threading.get_ident()] += 1
        if self._module:
            self._module.current_stream(self.device).synchronize()

    def used_aside(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the memory of tensors that training allocated until the agent's stream is done with them."""
        if self._module:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def used_by_training(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the memory of tensors that the agent allocated until training's stream is done with them."""
        if self._module:
            for tensor in tensors:
                tensor.record_stream(self._module.current_stream(self.device))

    def to_host(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Copy a flat tensor through pinned memory into a tensor on the CPU. Waits for the device."""
        with self._staging(tensor) as (through, step):
            for begin in range(0, tensor.numel(), step):
                piece = tensor[begin : begin + step]
                through[: piece.numel()].copy_(piece, non_blocking=True)
                self.wait()
                out[begin : begin + step].copy_(through[: piece.numel()])

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a flat tensor on the device, made through pinned memory. Waits for the device."""
        found = torch.empty_like(tensor, device=self.device)
        with self._staging(tensor) as (through, step):
            for begin in range(0, tensor.numel(), step):
                piece = tensor[begin : begin + step]
                through[: piece.numel()].copy_(piece)
                found[begin : begin + step].copy_(through[: piece.numel()], non_blocking=True)
                self.wait()
        return found

    @contextmanager
    def _staging(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield a pinned buffer as a flat tensor of the same dtype, and its number of elements."""
        try:
            pinned = self._pinned.pop()
        except IndexError:
            pinned = torch.empty(STAGED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self._module is not None)
        yield pinned.view(tensor.dtype), STAGED_BYTES // tensor.itemsize
        if len(self._pinned) < PINNED_MAX:
            self._pinned.append(pinned)


def has_lanes(device: torch.device) -> bool:
    """Return whether a device has streams and events, so that no thread has to wait for what another thread queues."""
    module = getattr(torch, device.type, None)
    return device.type != "cpu" and all(hasattr(module, name) for name in ("Stream", "Event", "current_stream"))


def device_of(model: nn.Module) -> torch.device | None:
    """Return the device of all trained parameters of a model; None if they lie on several, or it has no streams."""
    devices = {p.device for p in model.parameters() if p.requires_grad}
    found = next(iter(devices)) if len(devices) == 1 else None
    return found if found is not None and has_lanes(found) else None


@dataclass(slots=True)
class DeviceBlock(OnDevice):
    """An array of a fragment, as one flat tensor for each of its tensors.

    They lie on the device, or on the host if the device had no room for them.
    """

    tensors: list[torch.Tensor]
    ready: Any = None
    """The mark behind which `tensors` hold their values; None if they already do."""


@dataclass(slots=True)
class Staged(OnDevice):
    """A published value in host memory, and on the device until it is written into the parameters."""

    host: F32
    block: DeviceBlock | None


class Blocks(Arrays):
    """Arrays of fragments on a device. Training thread. Nothing here waits for what is on the device."""

    def __init__(self, layout: Layout, device_stream: DeviceStream) -> None:
        self._layout = layout
        self._device_stream = device_stream

    @override
    def empty(self, fragment: int) -> DeviceBlock:
        return DeviceBlock([])

    @override
    def mixed(
        self, fragment: int, adopt: Adoption, local: ArrayRef, values: ArrayRef, base: ArrayRef, since: ArrayRef | None
    ) -> DeviceBlock:
        mine, new = self.of(fragment, local), self.of(fragment, values)
        before = new if adopt == Adoption.BLEND else self.of(fragment, base if since is None else since)
        for block in (mine, new, before):
            self._device_stream.after(block.ready)
            self._device_stream.used_by_training(block.tensors)
        with torch.no_grad():
            found = []
            for x, v, b in zip(mine.tensors, new.tensors, before.tensors, strict=True):
                if adopt == Adoption.BLEND:
                    found.append(float(BLEND) * x.float() + (1.0 - float(BLEND)) * v)
                else:
                    # What the parameter's dtype cannot hold of the base does not count as local progress.
                    found.append(v + (x.float() - (b.to(x.dtype) if since is None else b).float()))
        used_up(values)
        return DeviceBlock(found, self._device_stream.mark())

    def of(self, fragment: int, held: ArrayRef) -> DeviceBlock:
        """Return an array on the device. If the array lies on the host, copy it and wait for the copy.

        On the host are arrays from joining, the bases of carried work, and arrays that had no room on the device.
        """
        held = at_hand(held)
        if isinstance(held, DeviceBlock):
            if held.tensors[0].device == self._device_stream.device:
                return held
            return DeviceBlock([x.to(self._device_stream.device) for x in held.tensors], self._device_stream.mark())
        host = local_array(held)
        cut = [host[t.start : t.stop] for t in self._layout.fragments[fragment].tensors]
        return DeviceBlock(
            [torch.from_numpy(writable(x)).to(self._device_stream.device) for x in cut], self._device_stream.mark()
        )


def at_hand(held: ArrayRef) -> ArrayRef:
    """Return the copy of a published value on the device, or the copy on the host if there is no other."""
    if not isinstance(held, Staged):
        return held
    block = held.block  # read once, since another thread may clear the attribute
    return held.host if block is None else block


def used_up(held: ArrayRef) -> None:
    """Free the copy of a published value on the device, once it is in the parameters."""
    if isinstance(held, Staged):
        held.block = None


class DeviceArrays(Blocks, Replica):
    """A module's parameters on a device, as the boundary reads and writes them.

    Training thread. It waits only for arrays that lie on the host, or have to go there.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, device_stream: DeviceStream, move_along: MoveAlong = no_copies
    ) -> None:
        super().__init__(layout, device_stream)
        parameters = dict(named(model))
        self._move_along = move_along
        self._from_host = TorchReplica(model, layout, move_along)
        self._places = [[(parameters[t.spec.name], t.rows) for t in f.tensors] for f in layout.fragments]

    @override
    def read(self, fragment: int, out: DeviceBlock) -> None:
        with torch.no_grad():
            held = [rows_of(p, rows) for p, rows in self._places[fragment]]
            try:
                out.tensors = [x.clone().reshape(-1) for x in held]
            except torch.OutOfMemoryError:
                # The device has no room: copy to the host. The training thread waits for this copy.
                out.tensors = [x.to("cpu", copy=True).reshape(-1) for x in held]
                return
        self._device_stream.used_aside(out.tensors)
        out.ready = self._device_stream.mark()

    @override
    def write(self, fragment: int, values: ArrayRef) -> None:
        block = at_hand(values)
        if isinstance(block, np.ndarray):
            self._from_host.write(fragment, local_array(block))  # the training thread waits for this
            return
        block = self.of(fragment, block)
        self._device_stream.after(block.ready)
        with torch.no_grad(), self._move_along(self._places[fragment]):
            for (p, rows), new in zip(self._places[fragment], block.tensors, strict=True):
                held = rows_of(p, rows)
                held.copy_(new.view(held.shape), non_blocking=True)
        self._device_stream.used_by_training(block.tensors)
        used_up(values)


class DeviceBackend(ArrayBackend):
    """A backend for arrays on a device and for arrays in host memory. All its work runs on the agent's threads."""

    divides = False

    def __init__(self, own: LocalBackend, device_stream: DeviceStream) -> None:
        self._own = own
        self._device_stream = device_stream
        rules = own.log.run.rules
        self._codec = device_codecs.CODECS.get(rules.codec_up)
        self._code = codec(rules.codec_up)
        self._fragments = own.log.run.layout.fragments
        # The CPU packs what needs a matrix decomposition (isotropic updates) or an entropy stage (codecs of any rate).
        self._packs_there = self._codec is not None and not rules.isotropic_up

    @override
    async def start(self, fragment: int, version: int, key: str, commit: Commit | None) -> ArrayRef:
        return await self._own.start(fragment, version, key, commit)

    @override
    async def step(self, carried: ArrayRef, commit: Commit) -> ArrayRef:
        return await self._own.step(carried, commit)

    @override
    async def restart(self, commit: Commit) -> ArrayRef:
        return await self._own.restart(commit)

    @override
    async def staged(self, fragment: int, held: ArrayRef) -> ArrayRef:
        host = local_array(held)
        try:
            return Staged(host, await self._own.runtime.offload(self._there, self._fragments[fragment], host))
        except torch.OutOfMemoryError as error:
            logger.warning("fragment %d is adopted through host memory, which delays training: %s", fragment, error)
            return Staged(host, None)

    @override
    async def pack(
        self, header: UpdateHeader, base: ArrayRef, values: ArrayRef, feedback: ArrayRef | None
    ) -> PackedUpdate | None:
        fragment = self._fragments[header.fragment]
        if (
            not self._packs_there
            or not isinstance(values, DeviceBlock)
            or values.tensors[0].device != self._device_stream.device
        ):
            return await self._pack_here(header, base, values, feedback)
        try:
            blob, dropped = await self._own.runtime.offload(self._packed, header, fragment, base, values, feedback)
        except torch.OutOfMemoryError as error:
            logger.warning("fragment %d is packed by the CPU: %s", header.fragment, error)
            return await self._pack_here(header, base, values, feedback)
        if blob is None:
            return None
        found = await self._own.log.sealed_digest(blob)
        return PackedUpdate(found, len(blob), blob, dropped)

    async def _pack_here(
        self, header: UpdateHeader, base: ArrayRef, values: ArrayRef, feedback: ArrayRef | None
    ) -> PackedUpdate | None:
        return await self._own.pack(
            header,
            await self.landed(header.fragment, base),
            await self.landed(header.fragment, values),
            None if feedback is None else await self.landed(header.fragment, feedback),
        )

    @override
    async def store(self, key: str, packed: PackedUpdate) -> None:
        await self._own.store(key, packed)

    @override
    def sum(self, fragment: int, a: ArrayRef, b: ArrayRef) -> ArrayRef:
        return self._own.sum(fragment, a, b)

    @override
    async def home(self, fragment: int, held: ArrayRef) -> ArrayRef:
        return await self._own.home(fragment, held)

    @override
    async def is_finite(self, held: ArrayRef) -> bool:
        if isinstance(held, Staged):
            return await self._own.is_finite(held.host)
        if not isinstance(held, DeviceBlock):
            return await self._own.is_finite(held)
        return await self._own.runtime.offload(self._is_finite, held)

    @override
    async def keep(self, part: PartHeader, held: Sequence[ArrayRef | U8]) -> Part:
        return await self._own.keep(part, held)

    @override
    async def landed(self, fragment: int, held: ArrayRef) -> ArrayRef:
        if isinstance(held, Staged):
            return held.host
        if not isinstance(held, DeviceBlock):
            return held
        return await self._own.runtime.offload(self._landed, self._fragments[fragment], held)

    # --- in threads that may wait -------------------------------------------------------------------------------------

    def _there(self, fragment: Fragment, host: F32) -> DeviceBlock:
        with self._device_stream.aside():
            found = [
                self._device_stream.to_device(torch.from_numpy(writable(host[t.start : t.stop])))
                for t in fragment.tensors
            ]
            return DeviceBlock(found, self._device_stream.mark())

    def _landed(self, fragment: Fragment, block: DeviceBlock) -> F32:
        out = memory.empty(fragment.size)
        with self._device_stream.aside():
            self._device_stream.after(block.ready)
            for t, x in zip(fragment.tensors, block.tensors, strict=True):
                self._device_stream.to_host(x, torch.from_numpy(out[t.start : t.stop]))
        return out

    def _is_finite(self, block: DeviceBlock) -> bool:
        with self._device_stream.aside():
            self._device_stream.after(block.ready)
            found = torch.stack([torch.isfinite(x).all() for x in block.tensors]).all()
            self._device_stream.wait()
            return bool(found)

    def _packed(
        self, header: UpdateHeader, fragment: Fragment, base: ArrayRef, values: DeviceBlock, feedback: ArrayRef | None
    ) -> tuple[frame.Body | None, residuals.Residual | None]:
        """Return the update object and, as a residual, what its codec dropped (None if that is not kept).

        Return (None, None) if the outer gradient is not finite.
        """
        assert self._codec is not None, "asked only where there is one"
        room = memory.room(packed_size(self._code, fragment))
        room.fill(0)
        dropped = memory.empty(fragment.size) if self._own.lossy else None
        at = 0
        with self._device_stream.aside():
            self._device_stream.after(values.ready)
            for number, t in enumerate(fragment.tensors):
                codes = at + self._codec.split(t.size)
                for begin in range(0, t.size, CHUNK):
                    end = min(t.size, begin + CHUNK)
                    gradient = self._gradient(t, number, begin, end, base, values.tensors[number], feedback)
                    # This test and the copies to the host wait for the device, in this thread.
                    if not bool(torch.isfinite(gradient).all()):
                        return None, None
                    scales, packed, said = self._codec.encode(gradient)
                    self._lay(scales, room, at + self._codec.split(begin))
                    self._lay(packed, room, codes + self._codec.offset(begin))
                    if dropped is not None:
                        gradient -= said
                        self._device_stream.to_host(
                            gradient, torch.from_numpy(dropped[t.start + begin : t.start + end])
                        )
                at += aligned(self._code.size(t.size))
        kept = None if dropped is None else residuals.kept(fragment, dropped)
        return frame.written(frame.Kind.UPDATE, header, room), kept

    def _lay(self, what: torch.Tensor, room: U8, at: int) -> None:
        self._device_stream.to_host(what, torch.from_numpy(room[at : at + what.numel()]))

    def _gradient(
        self,
        t: Tensor,
        number: int,
        begin: int,
        end: int,
        base: ArrayRef,
        values: torch.Tensor,
        feedback: ArrayRef | None,
    ) -> torch.Tensor:
        """Return elements [begin, end) of a tensor's outer gradient, with `feedback` added."""
        before = self._part(t, number, begin, end, base)
        if values.dtype != torch.float32:
            # What the parameter's dtype cannot hold of the base does not count as local progress. The conversion to
            # bfloat16 saturates, as the CPU's does.
            if values.dtype == torch.bfloat16:
                most = torch.finfo(values.dtype).max
                before = before.clamp(-most, most)
            before = before.to(values.dtype).float()
        gradient = before - values[begin:end].float()
        return gradient if feedback is None else gradient + self._part(t, number, begin, end, feedback)

    def _part(self, t: Tensor, number: int, begin: int, end: int, held: ArrayRef) -> torch.Tensor:
        """Return elements [begin, end) of a tensor in a fragment's array or residual, on the device, as float32."""
        held = at_hand(held)
        if isinstance(held, DeviceBlock):
            self._device_stream.after(held.ready)
            return held.tensors[number][begin:end].float()
        part = slice(t.start + begin, t.start + end)
        if (halves := local_residual(held)).dtype == np.uint16:
            return (
                self._device_stream.to_device(torch.from_numpy(halves[part].view(np.int16)))
                .view(torch.bfloat16)
                .float()
            )
        return self._device_stream.to_device(torch.from_numpy(writable(local_array(held)[part])))


def backend(device_stream: DeviceStream, own: LocalBackend, *_: object) -> ArrayBackend:
    """Return a backend for arrays on the device, around one for arrays in host memory; see `WrapBackend`."""
    return DeviceBackend(own, device_stream)
