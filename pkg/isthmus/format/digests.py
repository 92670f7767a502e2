"""The digest that names and verifies objects: BLAKE3, 32 bytes."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from blake3 import blake3

Bytes = bytes | bytearray | memoryview

SIZE = 32


def digest(data: "Bytes | np.ndarray[Any, Any]") -> bytes:
    """Return the digest [32 bytes] of a contiguous buffer or array. Other threads run meanwhile."""
    return blake3(data.reshape(-1).view(np.uint8).data if isinstance(data, np.ndarray) else data).digest()


def digest_of(pieces: Iterable[Bytes], *, all_cores: bool = False) -> bytes:
    """Return the digest [32 bytes] of concatenated pieces. Use `all_cores` only while nothing else runs."""
    found = blake3(max_threads=blake3.AUTO if all_cores else 1)
    for piece in pieces:
        found.update(piece)
    return found.digest()
