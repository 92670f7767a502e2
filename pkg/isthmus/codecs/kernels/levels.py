"""The levels of processors that kernels are compiled for in advance, and which level this processor has.

An image is built on one machine and runs on another. It holds the kernels for each level of x86-64 that the System V
ABI names. If `ISTHMUS_KERNELS` is "levels", a process takes those of the highest level that its processor has.
Otherwise numba compiles for the processor itself at the first start; those kernels are as fast.

`python -m isthmus.codecs.kernels.levels` prints the levels of this architecture.
"""

import os
import platform
import sys
from collections.abc import Collection, Mapping

CHOOSES = "ISTHMUS_KERNELS"

LEVELS: Mapping[str, frozenset[str]] = {
    "x86-64": frozenset(),
    "x86-64-v2": frozenset({"cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"}),
    "x86-64-v3": frozenset({"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"}),
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
}
"""The features that each level adds to the one before it, under LLVM's names."""

GENERIC = "generic"
"""The only level of other architectures. On arm64 it has every feature that kernels use."""


def levels(machine: str) -> tuple[str, ...]:
    """Return the levels of an architecture (`platform.machine()`), lowest first."""
    return tuple(LEVELS) if machine.lower() in ("x86_64", "amd64") else (GENERIC,)


def level(machine: str, features: Collection[str]) -> str:
    """Return the highest level of an architecture that a processor with these features supports."""
    found, *higher = levels(machine)
    for name in higher:
        if not LEVELS[name] <= set(features):
            break
        found = name
    return found


def choose() -> None:
    """Make numba take the kernels of this processor's level if `CHOOSES` asks for it. Call before importing numba."""
    if os.environ.get(CHOOSES) != "levels" or "NUMBA_CPU_NAME" in os.environ:
        return
    import llvmlite.binding as llvm

    features = [name for name, there in llvm.get_host_cpu_features().items() if there]
    os.environ["NUMBA_CPU_NAME"] = level(platform.machine(), features)
    os.environ["NUMBA_CPU_FEATURES"] = ""


if __name__ == "__main__":
    sys.stdout.write("\n".join(levels(platform.machine())) + "\n")
