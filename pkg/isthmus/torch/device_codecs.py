"""The codecs of fixed size on tensors of any device: the same bytes, bit for bit, as `isthmus.codecs` on a CPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from isthmus.codecs.kernels import BLOCK
from isthmus.format.rules import CodecName


@dataclass(frozen=True, slots=True)
class DeviceCodec:
    """A codec of fixed size. What it makes of a tensor may be made in parts that begin at multiples of a block."""

    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """Takes x [n] float32; returns scales and codes, uint8, and what a decoder makes of them, [n] float32."""
    bits: int
    """Of a code."""
    scaled: bool = False

    def split(self, n: int) -> int:
        """Return how many bytes of scales n parameters have, before their codes."""
        return 2 * -(-n // BLOCK) if self.scaled else 0

    def offset(self, start: int) -> int:
        """Return from which byte of the codes on parameters from `start` lie."""
        return start * self.bits // 8


_SMALLEST = 2.0**-126
"""Below this the inverse of a scale would overflow: such a block is zero."""


def _f32(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _none(x), x.contiguous().view(torch.uint8), x


def _bf16(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Half to even, and saturated instead of overflowing."""
    half = x.to(torch.bfloat16)
    most = torch.full_like(half, torch.finfo(torch.bfloat16).max)
    half = torch.where(torch.isinf(half), torch.copysign(most, half), half)
    return _none(x), half.view(torch.uint8), half.float()


def _int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    levels, scales, said = _levels(x, 127.0)
    return scales.view(torch.uint8), levels.to(torch.int8).view(torch.uint8).reshape(-1)[: x.numel()], said


def _int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Element i of a block in the low half of byte i, element i + 64 in the high half."""
    levels, scales, said = _levels(x, 7.0)
    codes = (levels + 8.0).to(torch.uint8)
    low, high = codes[:, : BLOCK // 2], codes[:, BLOCK // 2 :]
    return scales.view(torch.uint8), (low | (high << 4)).reshape(-1), said


def _none(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device)


def _levels(x: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return levels [blocks, 128] float32, scales [blocks] bfloat16 and what they say, [n] float32."""
    n = x.numel()
    blocks = -(-n // BLOCK)
    padded = torch.nn.functional.pad(x, (0, blocks * BLOCK - n)).view(blocks, BLOCK)
    largest = padded.abs().amax(dim=1)
    # Division by a tensor: by a number, some devices multiply with its inverse instead, which is another number.
    scales = (largest / torch.full_like(largest, most)).to(torch.bfloat16)
    scales = torch.where(scales.float() < _SMALLEST, torch.zeros_like(scales), scales)
    scale = scales.float()
    inverse = torch.where(scale > 0.0, torch.ones_like(scale) / scale, torch.zeros_like(scale))
    levels = torch.round((padded * inverse[:, None]).clamp(-most, most))  # half to even
    return levels, scales, (levels * scale[:, None]).reshape(-1)[:n]


CODECS = {
    CodecName.F32.value: DeviceCodec(_f32, 32),
    CodecName.BF16.value: DeviceCodec(_bf16, 16),
    CodecName.INT8.value: DeviceCodec(_int8, 8, scaled=True),
    CodecName.INT4.value: DeviceCodec(_int4, 4, scaled=True),
}
"""By name; any rate needs an entropy stage, which is the CPU's."""
