"""Number formats of fixed size: bfloat16, and blocks of integers with one scale each."""

from typing import Any

import numpy as np

from isthmus.codecs.kernels.compiled import F32, U8, U16, kernel

BLOCK = 128
"""Elements that share one scale in the blocked codecs."""

# A loop whose index could be negative is not vectorised, so the indices here are unsigned.
_U64: Any = np.uint64

_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding a small float32 rounds it half to even, into the last bits.
_ROUND_BITS = np.uint32(0x4B400000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)  # Finite magnitudes have the order of these bits.
_INFINITE = np.uint32(0x7F800000)
_EIGHT = np.uint32(8)


@kernel
def encode_bf16(x: F32, out: U16) -> None:
    """Round x [n] to bfloat16 [n], half to even. Finite values stay finite (saturation)."""
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
def _bits_of(value: np.float32) -> np.uint32:
    return np.float32(value).view(np.uint32)


@kernel
def _float_of(bits: np.uint32) -> np.float32:
    return np.uint32(bits).view(np.float32)


@kernel
def _scale_of(largest: np.uint32, levels: np.float32) -> np.uint32:
    """Return magnitude / levels as bfloat16, rounded half to even, given the bits of a block's largest magnitude."""
    bits = _bits_of(np.float32(_float_of(largest) / levels))
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    high = np.uint32(rounded >> np.uint32(16))
    # Below 2**-126 the inverse would overflow; such a block is zero for every practical purpose.
    return np.uint32(0) if high < np.uint32(0x0080) else high


@kernel
def _inverse(scale: np.uint32) -> np.float32:
    one = np.float32(1.0)
    return np.float32(0.0) if scale == np.uint32(0) else np.float32(one / _float_of(np.uint32(scale << np.uint32(16))))


@kernel
def _level(value: np.float32, levels: np.float32) -> np.uint32:
    """Return the integer within ±levels nearest to value, half to even, in two's complement: the sum's last bits."""
    return np.uint32(_bits_of(np.float32(min(max(value, -levels), levels) + _ROUND)) - _ROUND_BITS)


@kernel
def encode_int8(x: F32, scales: U16, out: U8) -> None:
    """Quantise x [n] to signed bytes [n], levels −127…127, with a bfloat16 scale per block of 128."""
    bits, levels = x.view(np.uint32), np.float32(127.0)
    for block in range(_U64(scales.size)):
        start = block * _U64(BLOCK)
        size = min(_U64(BLOCK), _U64(x.size) - start)
        largest = np.uint32(0)
        for i in range(size):
            largest = max(largest, np.uint32(bits[start + i] & _MAGNITUDE))
        scale = _scale_of(largest, levels)
        inverse = _inverse(scale)
        scales[block] = np.uint16(scale)
        for i in range(size):
            out[start + i] = np.uint8(_level(np.float32(x[start + i] * inverse), levels))


@kernel
def decode_int8(scales: U16, data: U8, out: F32) -> None:
    """Undo `encode_int8`: out [n] = level * scale."""
    levels = data.view(np.int8)
    for block in range(_U64(scales.size)):
        scale = _float_of(np.uint32(np.uint32(scales[block]) << np.uint32(16)))
        start = block * _U64(BLOCK)
        for i in range(min(_U64(BLOCK), _U64(out.size) - start)):
            out[start + i] = np.float32(levels[start + i]) * scale


@kernel
def encode_int4(x: F32, scales: U16, out: U8) -> None:
    """Quantise x [n] to 4 bits, levels −7…7, stored as level + 8, with a bfloat16 scale per block of 128.

    A block takes 64 bytes; the last one is padded with level 0. Byte i holds element i in its low half and element
    i + 64 in its high half, so the low halves of neighbouring bytes are neighbours, and so are the high halves.
    """
    bits, levels, half = x.view(np.uint32), np.float32(7.0), _U64(BLOCK // 2)
    for block in range(_U64(scales.size)):
        start, base = block * _U64(BLOCK), block * half
        size = min(_U64(BLOCK), _U64(x.size) - start)
        largest = np.uint32(0)
        for i in range(size):
            largest = max(largest, np.uint32(bits[start + i] & _MAGNITUDE))
        scale = _scale_of(largest, levels)
        inverse = _inverse(scale)
        scales[block] = np.uint16(scale)
        if size == _U64(BLOCK):
            for j in range(half):
                low = np.uint32(_level(np.float32(x[start + j] * inverse), levels) + _EIGHT)
                high = np.uint32(_level(np.float32(x[start + half + j] * inverse), levels) + _EIGHT)
                out[base + j] = np.uint8(low | (high << np.uint32(4)))
        else:
            for j in range(half):
                low = high = _EIGHT
                if j < size:
                    low = np.uint32(_level(np.float32(x[start + j] * inverse), levels) + _EIGHT)
                if half + j < size:
                    high = np.uint32(_level(np.float32(x[start + half + j] * inverse), levels) + _EIGHT)
                out[base + j] = np.uint8(low | (high << np.uint32(4)))


@kernel
def decode_int4(scales: U16, data: U8, out: F32) -> None:
    """Undo `encode_int4`: out [n] = (code − 8) * scale."""
    half, eight = _U64(BLOCK // 2), np.int32(8)
    for block in range(_U64(scales.size)):
        scale = _float_of(np.uint32(np.uint32(scales[block]) << np.uint32(16)))
        start, base = block * _U64(BLOCK), block * half
        size = min(_U64(BLOCK), _U64(out.size) - start)
        for j in range(min(half, size)):
            out[start + j] = np.float32(np.int32(data[base + j] & np.uint8(0x0F)) - eight) * scale
        if size > half:
            for j in range(size - half):
                out[start + half + j] = np.float32(np.int32(data[base + j] >> np.uint8(4)) - eight) * scale


@kernel
def accumulate_int8(scales: U16, data: U8, coefficient: float, total: F32) -> None:
    """Do what `decode_int8` followed by `accumulate` does, without storing the decoded values."""
    levels = data.view(np.int8)
    for block in range(_U64(scales.size)):
        scale = _float_of(np.uint32(np.uint32(scales[block]) << np.uint32(16)))
        start = block * _U64(BLOCK)
        for i in range(min(_U64(BLOCK), _U64(total.size) - start)):
            x = np.float32(levels[start + i]) * scale
            total[start + i] = np.float32(np.float64(total[start + i]) + coefficient * np.float64(x))


@kernel
def accumulate_int4(scales: U16, data: U8, coefficient: float, total: F32) -> None:
    """Do what `decode_int4` followed by `accumulate` does, without storing the decoded values."""
    half, eight = _U64(BLOCK // 2), np.int32(8)
    for block in range(_U64(scales.size)):
        scale = _float_of(np.uint32(np.uint32(scales[block]) << np.uint32(16)))
        start, base = block * _U64(BLOCK), block * half
        size = min(_U64(BLOCK), _U64(total.size) - start)
        for j in range(min(half, size)):
            x = np.float32(np.int32(data[base + j] & np.uint8(0x0F)) - eight) * scale
            total[start + j] = np.float32(np.float64(total[start + j]) + coefficient * np.float64(x))
        if size > half:
            for j in range(size - half):
                x = np.float32(np.int32(data[base + j] >> np.uint8(4)) - eight) * scale
                total[start + half + j] = np.float32(np.float64(total[start + half + j]) + coefficient * np.float64(x))


# --- the outer step and the packing of what it changes, in one pass ---------------------------------------------------


@kernel
def _step(
    start: Any,
    size: Any,
    total: F32,
    scale: float,
    rate: np.float32,
    mu: np.float32,
    master: F32,
    buffer: F32,
    published: F32,
    new_master: F32,
    new_buffer: F32,
    difference: F32,
) -> np.uint32:
    """Do what `outer_step` and `subtract` do, for one block of `size` elements from `start` on.

    Write new master − published to `difference` [BLOCK], with zeros after it. Return the bits of its largest magnitude.
    """
    for i in range(size):
        difference[i] = np.float32(scale * np.float64(total[start + i]))
    for i in range(size):
        new_buffer[start + i] = mu * buffer[start + i] + difference[i]
    for i in range(size):
        new_master[start + i] = master[start + i] - rate * (difference[i] + mu * new_buffer[start + i])
    for i in range(size):
        difference[i] = new_master[start + i] - published[start + i]
    for i in range(size, _U64(BLOCK)):
        difference[i] = np.float32(0.0)
    bits, largest = difference.view(np.uint32), np.uint32(0)
    for i in range(_U64(BLOCK)):
        largest = max(largest, np.uint32(bits[i] & _MAGNITUDE))
    return largest


@kernel
def _publish(start: Any, size: Any, published: F32, change: F32, new_published: F32) -> np.uint32:
    """Write published + change to new_published, for one block; return the bits of the result's largest magnitude."""
    for i in range(size):
        new_published[start + i] = published[start + i] + change[i]
    bits, largest = new_published.view(np.uint32), np.uint32(0)
    for i in range(size):
        largest = max(largest, np.uint32(bits[start + i] & _MAGNITUDE))
    return largest


@kernel
def advance_int4(
    total: F32,
    scale: float,
    learning_rate: float,
    momentum: float,
    master: F32,
    buffer: F32,
    published: F32,
    new_master: F32,
    new_buffer: F32,
    new_published: F32,
    scales: U16,
    codes: U8,
) -> bool:
    """Take the outer step, pack what it changes as `encode_int4` does, and publish: the bits of `outer_step`,
    `subtract`, `encode_int4` and `accumulate_int4` one after the other.

    Arrays are [n] float32, but scales and codes are as in `encode_int4`. Return whether all results are finite.
    """
    rate, mu, levels, half = np.float32(learning_rate), np.float32(momentum), np.float32(7.0), _U64(BLOCK // 2)
    change, worst = np.empty(BLOCK, np.float32), np.uint32(0)
    for block in range(_U64(scales.size)):
        start, base = block * _U64(BLOCK), block * half
        size = min(_U64(BLOCK), _U64(total.size) - start)
        largest = _step(start, size, total, scale, rate, mu, master, buffer, published, new_master, new_buffer, change)
        worst = max(worst, largest)
        bits = _scale_of(largest, levels)
        inverse = _inverse(bits)
        scales[block] = np.uint16(bits)
        for j in range(half):
            low = np.uint32(_level(np.float32(change[j] * inverse), levels) + _EIGHT)
            high = np.uint32(_level(np.float32(change[half + j] * inverse), levels) + _EIGHT)
            codes[base + j] = np.uint8(low | (high << np.uint32(4)))
        factor, eight = _float_of(np.uint32(bits << np.uint32(16))), np.int32(8)
        for j in range(half):
            change[j] = np.float32(np.int32(codes[base + j] & np.uint8(0x0F)) - eight) * factor
        for j in range(half):
            change[half + j] = np.float32(np.int32(codes[base + j] >> np.uint8(4)) - eight) * factor
        worst = max(worst, _publish(start, size, published, change, new_published))
    return bool(worst < _INFINITE)


@kernel
def advance_int8(
    total: F32,
    scale: float,
    learning_rate: float,
    momentum: float,
    master: F32,
    buffer: F32,
    published: F32,
    new_master: F32,
    new_buffer: F32,
    new_published: F32,
    scales: U16,
    codes: U8,
) -> bool:
    """Do what `advance_int4` does, with the bits of `encode_int8` and `accumulate_int8`."""
    rate, mu, levels = np.float32(learning_rate), np.float32(momentum), np.float32(127.0)
    change, worst, signed = np.empty(BLOCK, np.float32), np.uint32(0), codes.view(np.int8)
    for block in range(_U64(scales.size)):
        start = block * _U64(BLOCK)
        size = min(_U64(BLOCK), _U64(total.size) - start)
        largest = _step(start, size, total, scale, rate, mu, master, buffer, published, new_master, new_buffer, change)
        worst = max(worst, largest)
        bits = _scale_of(largest, levels)
        inverse = _inverse(bits)
        scales[block] = np.uint16(bits)
        for i in range(size):
            codes[start + i] = np.uint8(_level(np.float32(change[i] * inverse), levels))
        factor = _float_of(np.uint32(bits << np.uint32(16)))
        for i in range(size):
            change[i] = np.float32(signed[start + i]) * factor
        worst = max(worst, _publish(start, size, published, change, new_published))
    return bool(worst < _INFINITE)
