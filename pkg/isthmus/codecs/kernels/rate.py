"""A uniform quantiser with a dead zone and centroids, followed by an entropy stage, for a stated rate.

A value x becomes the level sign(x) · ⌊|x| / step + `ROUNDING`⌋. A level decodes to the mean of the values that became
it. Levels are symbols (0, +1, −1, +2, −2, …) of a range asymmetric numeral system (J. Duda, arXiv 1311.2540) with one
table of `TOTAL` per tensor. `LANES` states of 31 bits take turns, so that they do not wait for one another, and share
one stream of 16-bit words. The decoder reads words in the opposite order to that of writing.
"""

import math
from typing import Any

import numpy as np

from isthmus.codecs.kernels.compiled import F32, F64, I64, U8, U16, kernel

ROUNDING = np.float32(0.45)
"""Added before rounding down. Less than a half widens the dead zone, whose symbol costs the fewest bits."""

LEVELS = 127
"""The largest magnitude of a level."""

TABLE_BITS = 12
TOTAL = 1 << TABLE_BITS
"""The sum of the frequencies in a table."""

LANES = 4
_LOW = 1 << 15  # A state is at least this and below 2³¹; writing or reading one word brings it back into that range.

_MAGNITUDE = np.int32(0x7FFFFFFF)
_U64: Any = np.uint64  # A loop whose index could be negative is not vectorised.

_STEPS, _ROOT = 32, 1.0218971486541166  # Candidate steps in an octave, and the ratio of two neighbours.
_OCTAVES = (-6, 5)  # The range of candidate steps: exponents of two, times the root mean square.
_STEP_MAX, _SMALLEST = 8e37, 1e-36

OK, SHORT, HEADER, TABLE, LENGTHS, STREAM = range(6)
"""Result of a check: valid, too few bytes, invalid header, invalid table, lengths that do not fit, damaged stream."""


@kernel
def _log2(v: float) -> float:
    """Return the binary logarithm of v ≥ 1, to 1e-9, by arithmetic alone, which has the same bits on every machine."""
    whole = 0.0
    while v >= 2.0:
        v *= 0.5
        whole += 1.0
    # ln m = 2 artanh((m − 1) / (m + 1)), with m = v / √2
    z = (v - 1.4142135623730951) / (v + 1.4142135623730951)
    square = z * z
    series = 1.0 + square * (
        0.3333333333333333 + square * (0.2 + square * (0.14285714285714285 + square * 0.1111111111111111))
    )
    return whole + 0.5 + 2.8853900817779268 * z * series


@kernel
def largest(x: F32) -> float:
    """Return the largest magnitude in finite x [n]."""
    bits = x.view(np.int32)
    top = np.int32(0)
    for i in range(_U64(bits.size)):  # Without their signs, numbers have the order of their bits.
        magnitude = bits[i] & _MAGNITUDE
        top = magnitude if magnitude > top else top
    found = np.empty(1, np.int32)
    found[0] = top
    return np.float64(found.view(np.float32)[0])


@kernel
def _entropy(x: F32, block: int, every: int, inverse: np.float32, counts: I64) -> tuple[float, int]:
    """Return the bits per parameter that the levels of blocks 0, every, 2 every, … of x take, and the largest level."""
    # Four tables take turns, so that additions to the same level do not wait for one another.
    tables = np.zeros((4, LEVELS + 1), np.int64)
    n = 0
    for start in range(0, x.size, block * every):
        stop = min(start + block, x.size)
        for i in range(_U64(start), _U64(stop)):
            tables[i & _U64(3), min(int(abs(x[i]) * inverse + ROUNDING), LEVELS)] += 1
        n += stop - start
    counts[:] = tables[0] + tables[1] + tables[2] + tables[3]
    bits = 0.0
    top = 0
    for level in range(LEVELS + 1):
        c = counts[level]
        if c > 0:
            top = level
            bits -= c * _log2(np.float64(c))
    total = np.float64(n)
    # Each level other than zero takes one more bit for its sign.
    return (bits + total * _log2(total) + (total - counts[0])) / total, top


@kernel
def choose_step(x: F32, rms: float, largest: float, bits: float, block: int, every: int, pieces: int) -> float:
    """Return the smallest step at which blocks 0, every, … of x take at most `bits` bits a parameter, tables included.

    Returns 0 if x is so small that every parameter becomes zero. At the step returned no level is beyond `LEVELS`.
    """
    if largest < _SMALLEST:
        return 0.0
    counts = np.empty(LEVELS + 1, np.int64)
    least = largest / LEVELS
    low, high = _OCTAVES[0] * _STEPS, _OCTAVES[1] * _STEPS
    while low < high:
        middle = (low + high) // 2
        step = min(max(rms * _power(middle), least), _STEP_MAX)
        found, top = _entropy(x, block, every, np.float32(1.0 / step), counts)
        overhead = 8.0 * (12 + 8 * top + (4 + 4 * LANES) * pieces) / x.size
        if found + overhead <= bits:
            high = middle
        else:
            low = middle + 1
    return min(max(rms * _power(low), least), _STEP_MAX)


@kernel
def _power(k: int) -> float:
    """Return 2^(k / `_STEPS`)."""
    octave = k // _STEPS
    found = 1.0
    for _ in range(k - _STEPS * octave):
        found *= _ROOT
    while octave > 0:
        found *= 2.0
        octave -= 1
    while octave < 0:
        found *= 0.5
        octave += 1
    return found


@kernel
def quantise(x: F32, inverse: np.float32, symbols: U8) -> None:
    """Write the symbols [n] of x [n], quantised in steps of 1 / inverse."""
    for i in range(x.size):
        level = min(np.int32(abs(x[i]) * inverse + ROUNDING), np.int32(LEVELS))
        symbols[i] = np.uint8(2 * level - np.int32((x[i] > np.float32(0.0)) & (level > 0)))


@kernel
def count(x: F32, symbols: U8, counts: I64, sums: F64) -> None:
    """Write the number of times each symbol occurs to counts [s], and the sum of the x that became it to sums [s].

    Four pairs of tables take turns, so that additions to the same symbol do not wait for one another.
    """
    a, b, c, d = np.zeros(256, np.int64), np.zeros(256, np.int64), np.zeros(256, np.int64), np.zeros(256, np.int64)
    p, q, r, t = np.zeros(256), np.zeros(256), np.zeros(256), np.zeros(256)
    whole = x.size // 4 * 4
    for k in range(_U64(whole // 4)):
        i = k * _U64(4)
        s = _U64(symbols[i])
        a[s] += 1
        p[s] += np.float64(x[i])
        s = _U64(symbols[i + _U64(1)])
        b[s] += 1
        q[s] += np.float64(x[i + _U64(1)])
        s = _U64(symbols[i + _U64(2)])
        c[s] += 1
        r[s] += np.float64(x[i + _U64(2)])
        s = _U64(symbols[i + _U64(3)])
        d[s] += 1
        t[s] += np.float64(x[i + _U64(3)])
    for i in range(whole, x.size):
        s = _U64(symbols[i])
        if i == whole:
            a[s] += 1
            p[s] += np.float64(x[i])
        elif i == whole + 1:
            b[s] += 1
            q[s] += np.float64(x[i])
        else:
            c[s] += 1
            r[s] += np.float64(x[i])
    for s in range(counts.size):
        counts[s] = (a[s] + b[s]) + (c[s] + d[s])
        sums[s] = (p[s] + q[s]) + (r[s] + t[s])


@kernel
def frequencies(counts: I64, out: I64) -> None:
    """Scale counts [s] to frequencies [s] that add up to `TOTAL`, of at least 1 for each symbol that occurs."""
    n = counts.sum()
    rest = TOTAL
    for s in range(counts.size):
        out[s] = 0
        if counts[s] > 0:
            out[s] = max(1, counts[s] * TOTAL // n)
            rest -= out[s]
    while rest != 0:
        most = 0
        for s in range(counts.size):
            if out[s] > out[most]:
                most = s
        by = rest if rest > 0 else -1
        out[most] += by
        rest -= by


@kernel
def encode(symbols: U8, table: I64, out: U16) -> int:
    """Code symbols [n] with a table [s] into the end of out; return where the stream begins: states, then words.

    `out` must hold 3 n / 4 + 2 `LANES` + 1 words. A symbol of frequency f, before which frequencies add up to c, turns
    a state x into ⌊x / f⌋ · TOTAL + c + x mod f. ⌊x / f⌋ is computed as a product, which is exact for 31 bits (Granlund
    and Montgomery, 1994). The low word of the state is written for every symbol, and kept only if the state was too
    large: this avoids a branch that the processor cannot predict. The four states are variables, as in `decode`.
    """
    size = table.size
    inverse, shift, start = np.empty(size, np.uint64), np.empty(size, np.uint64), np.empty(size, np.uint64)
    limit, rest = np.empty(size, np.uint64), np.empty(size, np.uint64)
    total = 0
    for s in range(size):
        start[s] = total
        total += table[s]
        bits = 0
        while (1 << bits) < table[s]:
            bits += 1
        shift[s] = 31 + bits
        inverse[s] = ((1 << (31 + bits)) + table[s] - 1) // max(1, table[s])
        limit[s] = table[s] << (31 - TABLE_BITS)
        rest[s] = TOTAL - table[s]
    one, word = _U64(1), _U64(16)
    a = b = c = d = _U64(_LOW)
    at = _U64(out.size)
    whole = symbols.size // LANES * LANES
    for i in range(symbols.size - 1, whole - 1, -1):
        s = _U64(symbols[i])
        x = a if i == whole else b if i == whole + 1 else c
        full = _U64(x >= limit[s])
        out[at - one] = np.uint16(x)
        at -= full
        x >>= word * full
        x += start[s] + ((x * inverse[s]) >> shift[s]) * rest[s]
        a, b, c = x if i == whole else a, x if i == whole + 1 else b, x if i == whole + 2 else c
    for k in range(_U64(whole // LANES)):
        i = _U64(whole) - _U64(LANES) * (k + one)
        s = _U64(symbols[i + _U64(3)])
        full = _U64(d >= limit[s])
        out[at - one] = np.uint16(d)
        at -= full
        d >>= word * full
        d += start[s] + ((d * inverse[s]) >> shift[s]) * rest[s]
        s = _U64(symbols[i + _U64(2)])
        full = _U64(c >= limit[s])
        out[at - one] = np.uint16(c)
        at -= full
        c >>= word * full
        c += start[s] + ((c * inverse[s]) >> shift[s]) * rest[s]
        s = _U64(symbols[i + one])
        full = _U64(b >= limit[s])
        out[at - one] = np.uint16(b)
        at -= full
        b >>= word * full
        b += start[s] + ((b * inverse[s]) >> shift[s]) * rest[s]
        s = _U64(symbols[i])
        full = _U64(a >= limit[s])
        out[at - one] = np.uint16(a)
        at -= full
        a >>= word * full
        a += start[s] + ((a * inverse[s]) >> shift[s]) * rest[s]
    for x in (d, c, b, a):
        at -= _U64(2)
        out[at] = np.uint16(x)
        out[at + one] = np.uint16(x >> word)
    return int(at)


@kernel
def _number(data: U8, at: int, size: int) -> int:
    """Return the `size` bytes at a place as an unsigned number, little endian."""
    found = 0
    for byte in range(size):
        found |= int(data[at + byte]) << (8 * byte)
    return found


@kernel
def header_size(levels: int, pieces: int) -> int:
    """Return the bytes before the first stream."""
    return 8 + 4 * levels + (2 * (2 * levels + 1) + 3) // 4 * 4 + 4 * pieces


@kernel
def check(data: U8, n: int, piece: int) -> tuple[int, int]:
    """Check the header and the table of a packed tensor of n parameters; return what is wrong, and its size in bytes.

    Centroids must be finite and not negative, frequencies must add up to `TOTAL`, and the lengths of streams to the
    size. `OK` means that nothing is wrong.
    """
    if data.size < 8:
        return SHORT, 0
    size, levels = _number(data, 0, 4), _number(data, 4, 2)
    if levels > LEVELS or _number(data, 6, 2) != 0 or size % 4 != 0:
        return HEADER, 0
    if levels == 0:
        return (OK if size == 8 else LENGTHS), 8
    pieces = (n + piece - 1) // piece
    start = header_size(levels, pieces)
    if size < start or data.size < size:
        return SHORT, 0
    for level in range(levels):
        if (_number(data, 8 + 4 * level, 4) >> 23) >= 0xFF:  # The centroid is negative, infinite or NaN.
            return TABLE, 0
    total = 0
    for s in range(2 * levels + 1):
        total += _number(data, 8 + 4 * levels + 2 * s, 2)
    if total != TOTAL:
        return TABLE, 0
    at = start
    for p in range(pieces):
        length = _number(data, start - 4 * pieces + 4 * p, 4)
        if length < 4 * LANES or length % 2 != 0:
            return LENGTHS, 0
        at += length
    if (at + 3) // 4 * 4 != size:
        return LENGTHS, 0
    for rest in range(at, size):
        if data[rest] != 0:
            return LENGTHS, 0
    return OK, size


@kernel
def decode(data: U8, n: int, piece: int, number: int, out: F32) -> int:
    """Decode one piece of a packed tensor, which `check` accepted, into out [m]; return `STREAM` if it is damaged.

    The four states are variables, because numba keeps no array in registers and counts references around every call
    that takes one.
    """
    levels = _number(data, 4, 2)
    if levels == 0:
        out[:] = np.float32(0.0)
        return OK
    # For each slot: its symbol's frequency (high bits) and its place among the symbol's slots (low bits), and the value
    # that the symbol decodes to.
    entries, values = np.empty(TOTAL, np.uint32), np.empty(TOTAL, np.float32)
    found = np.zeros(1, np.uint32)
    slots = 0
    for s in range(2 * levels + 1):
        found[0] = np.uint32(_number(data, 4 + 4 * ((s + 1) // 2), 4)) if s > 0 else np.uint32(0)
        centroid = found.view(np.float32)[0] if s % 2 == 1 else -found.view(np.float32)[0]
        f = _number(data, 8 + 4 * levels + 2 * s, 2)
        for place in range(f):
            entries[slots] = f << TABLE_BITS | place
            values[slots] = centroid if s > 0 else np.float32(0.0)
            slots += 1
    pieces = (n + piece - 1) // piece
    first = header_size(levels, pieces)
    start = first
    for p in range(number):
        start += _number(data, first - 4 * pieces + 4 * p, 4)
    stop = _U64(start + _number(data, first - 4 * pieces + 4 * number, 4))
    one, two, byte, word, bits = _U64(1), _U64(2), _U64(8), _U64(16), _U64(TABLE_BITS)
    low, mask = _U64(_LOW), _U64(TOTAL - 1)
    a, b = _U64(_number(data, start, 4)), _U64(_number(data, start + 4, 4))
    c, d = _U64(_number(data, start + 8, 4)), _U64(_number(data, start + 12, 4))
    if min(a, b, c, d) < low or max(a, b, c, d) >= _U64(1 << 31):
        return STREAM
    at, i = _U64(start + 4 * LANES), _U64(0)
    # Numbers without a sign, and a loop of this form: with others, numba's code takes up to twice as long.
    while i + _U64(LANES) <= _U64(out.size) and at + _U64(2 * LANES) <= stop:
        slot = a & mask
        entry = _U64(entries[slot])
        out[i] = values[slot]
        a = (entry >> bits) * (a >> bits) + (entry & mask)
        short = a < low
        a = a << word | _U64(data[at]) | _U64(data[at + one]) << byte if short else a
        at += two if short else _U64(0)
        slot = b & mask
        entry = _U64(entries[slot])
        out[i + one] = values[slot]
        b = (entry >> bits) * (b >> bits) + (entry & mask)
        short = b < low
        b = b << word | _U64(data[at]) | _U64(data[at + one]) << byte if short else b
        at += two if short else _U64(0)
        slot = c & mask
        entry = _U64(entries[slot])
        out[i + two] = values[slot]
        c = (entry >> bits) * (c >> bits) + (entry & mask)
        short = c < low
        c = c << word | _U64(data[at]) | _U64(data[at + one]) << byte if short else c
        at += two if short else _U64(0)
        slot = d & mask
        entry = _U64(entries[slot])
        out[i + _U64(3)] = values[slot]
        d = (entry >> bits) * (d >> bits) + (entry & mask)
        short = d < low
        d = d << word | _U64(data[at]) | _U64(data[at + one]) << byte if short else d
        at += two if short else _U64(0)
        i += _U64(LANES)
    # The stream may have fewer than four words left, so each read is checked from here on.
    for j in range(int(i), out.size):
        x = (a, b, c, d)[j % LANES]
        slot = x & mask
        entry = _U64(entries[slot])
        out[j] = values[slot]
        x = (entry >> bits) * (x >> bits) + (entry & mask)
        if x < low:
            if at + two > stop:
                return STREAM
            x = x << word | _U64(data[at]) | _U64(data[at + one]) << byte
            at += two
        lane = j % LANES
        a, b, c, d = x if lane == 0 else a, x if lane == 1 else b, x if lane == 2 else c, x if lane == 3 else d
    return OK if at == stop and a == low and b == low and c == low and d == low else STREAM


@kernel
def folded(counts: I64, sums: F64) -> tuple[I64, F32, int]:
    """Add up the counts and sums [p, s] of all pieces, in order.

    Returns the counts of symbols [s], the mean magnitudes of the levels from 1 on [l − 1], and the largest level that
    occurs.
    """
    symbols, total = np.zeros(counts.shape[1], np.int64), np.zeros(counts.shape[1], np.float64)
    for p in range(counts.shape[0]):
        for s in range(symbols.size):
            symbols[s] += counts[p, s]
            total[s] += sums[p, s]
    top = 0
    means = np.zeros(symbols.size // 2, np.float32)
    for level in range(1, symbols.size // 2 + 1):
        n = symbols[2 * level - 1] + symbols[2 * level]
        if n > 0:
            top = level
            means[level - 1] = np.float32((total[2 * level - 1] - total[2 * level]) / n)
    return symbols, means, top


@kernel
def lengthen(counts: I64, means: F32, norm: float) -> None:
    """Scale the means of levels so that the decoded tensor, with counts [s] of symbols, has this Euclidean norm."""
    squares = 0.0
    for level in range(1, means.size + 1):
        n = np.float64(counts[2 * level - 1] + counts[2 * level])
        squares += n * (np.float64(means[level - 1]) * np.float64(means[level - 1]))
    if squares > 0.0:
        by = norm / math.sqrt(squares)
        for level in range(means.size):
            means[level] = np.float32(min(by * np.float64(means[level]), 3.4e38))
