"""Codecs on a device give the same bytes as the codecs on the CPU, for any length and any finite numbers.

The device is torch's CPU; with `-m gpu` it is a GPU.
"""

import numpy as np
import pytest
import torch

from isthmus.codecs import codec
from isthmus.torch.device_codecs import CODECS

DRAW = np.random.default_rng(0)


def tricky() -> np.ndarray:
    """Return numbers half-way between two levels, denormal numbers, zeros of both signs, and the largest numbers."""
    ties = np.arange(-7.5, 8.0, 0.5, dtype=np.float32) * np.float32(0.125)
    odd = [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 3e38, -3.4028234e38, 1.0, -1.0, 2.0**-133 * 7]
    return np.concatenate([ties, np.array(odd, np.float32), DRAW.normal(size=87).astype(np.float32)])


def anything(n: int) -> np.ndarray:
    """Return finite numbers of any size, of about one size within each block of 128."""
    bits = DRAW.integers(0, 1 << 32, n, dtype=np.uint32)
    exponents = np.repeat(DRAW.integers(0, 255, -(-n // 128), dtype=np.uint32), 128)[:n]
    near = np.clip(exponents.astype(np.int64) - DRAW.integers(0, 12, n), 0, 254).astype(np.uint32)
    found: np.ndarray = ((bits & np.uint32(0x807FFFFF)) | (near << np.uint32(23))).view(np.float32)
    return found


CASES: dict[str, np.ndarray] = {
    "normal": DRAW.normal(scale=1e-3, size=1000).astype(np.float32),
    "one": np.array([3.5], np.float32),
    "a block and one": DRAW.normal(size=129).astype(np.float32),
    "zeros": np.zeros(300, np.float32),
    "tiny blocks": (DRAW.normal(size=256) * 1e-39).astype(np.float32),
    "tricky": tricky(),
    "any bits": anything(1 << 18),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CODECS)
def test_the_bytes_are_the_same(name: str, case: str, where: torch.device) -> None:
    x, code, there = CASES[case], codec(name), CODECS[name]
    here = np.zeros(code.size(x.size), np.uint8)
    code.encode(x, here)
    scales, codes, said = (part.cpu() for part in there.encode(torch.from_numpy(x.copy()).to(where)))
    assert scales.numel() == there.split(x.size)
    assert np.array_equal(torch.cat((scales, codes)).numpy(), here)
    decoded = np.empty_like(x)
    code.decode(here, decoded)
    assert np.array_equal(said.numpy(), decoded)


@pytest.mark.parametrize("name", CODECS)
def test_parts_lie_where_the_whole_has_them(name: str) -> None:
    x, there = CASES["normal"], CODECS[name]
    scales, codes, _ = there.encode(torch.from_numpy(x.copy()))
    for begin in (0, 128, 896):
        part = there.encode(torch.from_numpy(x[begin : begin + 128].copy()))
        at, split = there.offset(begin), there.split(begin)
        assert torch.equal(codes[at : at + part[1].numel()], part[1])
        assert torch.equal(scales[split : split + part[0].numel()], part[0])
