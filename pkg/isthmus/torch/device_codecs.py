"""The codecs of fixed size for tensors on any device: the same bytes, bit for bit, as `isthmus.codecs` on a CPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from isthmus.codecs.kernels import BLOCK
from isthmus.format.rules import CodecName


@dataclass(frozen=True, slots=True)
class DeviceCodec:
    """A codec of fixed size. A tensor may be encoded in parts, if each part begins at a multiple of the block size."""

    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """Takes x [n] float32. Returns scales and codes, both uint8, and the values [n] float32 that a decoder gets."""
    bits: int
    """Bits of one code."""
    scaled: bool = False

    def split(self, n: int) -> int:
        """Return the number of bytes of scales that precede the codes of n parameters."""
        return 2 * -(-n // BLOCK) if self.scaled else 0

    def offset(self, start: int) -> int:
        """Return the byte, counted from the first code, at which the codes of the parameters from `start` on begin."""
        return start * self.bits // 8


_SMALLEST = 2.0**-126
"""The inverse of a smaller scale would overflow, so a block with such a scale is coded as zeros."""


def _f32(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _none(x), x.contiguous().view(torch.uint8), x


def _bf16(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode as bfloat16, rounded half to even. Values that would overflow saturate."""
    half = x.to(torch.bfloat16)
    most = torch.full_like(half, torch.finfo(torch.bfloat16).max)
    half = torch.where(torch.isinf(half), torch.copysign(most, half), half)
    return _none(x), half.view(torch.uint8), half.float()


def _int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    levels, scales, said = _levels(x, 127.0)
    return scales.view(torch.uint8), levels.to(torch.int8).view(torch.uint8).reshape(-1)[: x.numel()], said


def _int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode as int4: element i of a block in the low half of byte i, element i + 64 in the high half."""
    levels, scales, said = _levels(x, 7.0)
    codes = (levels + 8.0).to(torch.uint8)
    low, high = codes[:, : BLOCK // 2], codes[:, BLOCK // 2 :]
    return scales.view(torch.uint8), (low | (high << 4)).reshape(-1), said


def _none(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=x.device)


def _levels(x: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return levels [blocks, 128] float32, scales [blocks] bfloat16 and the values they stand for, [n] float32."""
    n = x.numel()
    blocks = -(-n // BLOCK)
    padded = torch.nn.functional.pad(x, (0, blocks * BLOCK - n)).view(blocks, BLOCK)
    largest = padded.abs().amax(dim=1)
    # Divide by a tensor. To divide by a number, some devices multiply by its inverse, which gives other bits.
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
"""Codecs by name. The codecs of any rate are not here: their entropy stage runs on the CPU."""
