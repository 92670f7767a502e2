"""Number formats of fixed size: bfloat16, and blocks of integers over a scale."""

import numpy as np

from isthmus.kernels.compiled import F32, U8, U16, kernel

BLOCK = 128
"""Elements that share one scale in the blocked codecs."""

_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds a small float32 half to even


@kernel
def _bf16_bits(value: np.float32) -> np.uint16:
    """Round one finite float32 to bfloat16, half to even; values above the largest finite bfloat16 saturate to it."""
    one = np.empty(1, np.float32)
    one[0] = value
    bits = one.view(np.uint32)[0]
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    high = np.uint32(rounded >> np.uint32(16))
    if (high & np.uint32(0x7F80)) == np.uint32(0x7F80) and (bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000):
        high = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000)) | np.uint32(0x7F7F)
    return np.uint16(high)


@kernel
def encode_bf16(x: F32, out: U16) -> None:
    """Round x [n] to bfloat16 [n] half to even; finite values stay finite (saturation)."""
    bits = x.view(np.uint32)
    for i in range(bits.size):
        b = bits[i]
        high = np.uint32(np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
        overflowed = (high & np.uint32(0x7F80)) == np.uint32(0x7F80) and (b & np.uint32(0x7F800000)) != np.uint32(
            0x7F800000
        )
        if overflowed:
            high = np.uint32((b >> np.uint32(16)) & np.uint32(0x8000)) | np.uint32(0x7F7F)
        out[i] = np.uint16(high)


@kernel
def decode_bf16(data: U16, out: F32) -> None:
    """Widen bfloat16 [n] to float32 [n], exactly."""
    bits = out.view(np.uint32)
    for i in range(data.size):
        bits[i] = np.uint32(data[i]) << np.uint32(16)


@kernel
def _block_scale(x: F32, start: int, stop: int, levels: np.float32, scale_bits: U16, block: int) -> np.float32:
    """Write the bfloat16 scale absmax / levels of x[start:stop] and return 1 / scale (0 for a block of zeros)."""
    largest = np.float32(0.0)
    for i in range(start, stop):
        magnitude = abs(x[i])
        largest = max(largest, magnitude)
    bits = _bf16_bits(np.float32(largest / levels))
    scale_bits[block] = bits
    one = np.empty(1, np.uint32)
    one[0] = np.uint32(bits) << np.uint32(16)
    scale = one.view(np.float32)[0]
    # Below 2**-126 the inverse would overflow; such a block is zero for every practical purpose.
    if scale < np.float32(1.1754944e-38):
        scale_bits[block] = np.uint16(0)
        return np.float32(0.0)
    inverse: np.float32 = np.float32(1.0) / scale
    return inverse


@kernel
def encode_int8(x: F32, scales: U16, out: U8) -> None:
    """Quantise x [n] to signed bytes [n], levels −127…127 of a bfloat16 scale per block of 128."""
    n = x.size
    for block in range(scales.size):
        start = block * BLOCK
        stop = min(start + BLOCK, n)
        inverse = _block_scale(x, start, stop, np.float32(127.0), scales, block)
        for i in range(start, stop):
            q = min(max(x[i] * inverse, np.float32(-127.0)), np.float32(127.0))
            out[i] = np.uint8(np.int32((q + _ROUND) - _ROUND) & 0xFF)


@kernel
def decode_int8(scales: U16, data: U8, out: F32) -> None:
    """Undo `encode_int8`: out [n] = level * scale."""
    one = np.empty(1, np.uint32)
    for block in range(scales.size):
        one[0] = np.uint32(scales[block]) << np.uint32(16)
        scale = one.view(np.float32)[0]
        start = block * BLOCK
        for i in range(start, min(start + BLOCK, out.size)):
            out[i] = np.float32(np.int8(data[i])) * scale


@kernel
def encode_int4(x: F32, scales: U16, out: U8) -> None:
    """Quantise x [n] to 4 bits, levels −7…7 of a bfloat16 scale per block of 128, stored as level + 8.

    A block is 64 bytes, the last one padded with zeros: element i in the low half of byte i, element i + 64 in the
    high half, so that both halves of a load are neighbours.
    """
    n = x.size
    half = BLOCK // 2
    seven = np.float32(7.0)
    for block in range(scales.size):
        start = block * BLOCK
        stop = min(start + BLOCK, n)
        inverse = _block_scale(x, start, stop, seven, scales, block)
        base = block * half
        for j in range(half):
            low = np.int32(0)
            high = np.int32(0)
            if start + j < stop:
                q = min(max(x[start + j] * inverse, -seven), seven)
                low = np.int32((q + _ROUND) - _ROUND)
            if start + half + j < stop:
                q = min(max(x[start + half + j] * inverse, -seven), seven)
                high = np.int32((q + _ROUND) - _ROUND)
            out[base + j] = np.uint8((low + 8) | ((high + 8) << 4))


@kernel
def decode_int4(scales: U16, data: U8, out: F32) -> None:
    """Undo `encode_int4`: out [n] = (code − 8) * scale."""
    n = out.size
    half = BLOCK // 2
    one = np.empty(1, np.uint32)
    for block in range(scales.size):
        one[0] = np.uint32(scales[block]) << np.uint32(16)
        scale = one.view(np.float32)[0]
        start = block * BLOCK
        base = block * half
        for j in range(min(half, n - start)):
            out[start + j] = np.float32(np.int32(data[base + j] & 0x0F) - 8) * scale
        for j in range(min(half, max(n - start - half, 0))):
            out[start + half + j] = np.float32(np.int32(data[base + j] >> 4) - 8) * scale
