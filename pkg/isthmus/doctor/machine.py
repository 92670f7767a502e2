"""Check this machine: disk, torch, and whether the kernels give the bits that the arithmetic version promises."""

import hashlib
import importlib.util
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from isthmus.codecs import CODECS, codec, kernels, pack
from isthmus.codecs.kernels import ARITHMETIC, F32
from isthmus.doctor.advice import FREES, freeing
from isthmus.doctor.findings import FAILURE, OK, WARNING, Finding, Role, RoleKind
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import MergeRule, Rules
from isthmus.log import merge
from isthmus.runtime.clock import Runtime
from isthmus.runtime.disk import FEW, room_in
from isthmus.wording import counted

DISK_WARNING, DISK_FAILURE = 2 << 30, 100 << 20
"""Free bytes below which the disk gives a warning, or a failure."""

FILES_FAILURE = 1_000
"""Files that it can still hold below which the disk gives a failure; below `FEW`, a warning."""

BITS = {1: "f7508948098312e71b2f3435eacc1e14e85cb259d754dcd8a039098cd67b6911"}
"""The digest that `fingerprint` must return, by arithmetic version. It was measured once, and is the same on every
machine."""


def examine_machine(folder: Path | None, role: Role, runtime: Runtime, *, signed: bool = False) -> Iterator[Finding]:
    """Yield findings about this machine; `folder` is the folder of the run, None for a run in a bucket.

    `signed`: whether the run is known to be signed.
    """
    if folder is not None:
        yield _disk(folder, signed=signed)
    yield _kernels(runtime)
    if role.kind in (RoleKind.OPERATOR, RoleKind.LEARNER):
        yield _torch(role)


def _disk(run: Path, *, signed: bool) -> Finding:
    folder = next(parent for parent in (run, *run.parents) if parent.exists())
    left = room_in(folder)
    files = math.inf if left.files is None else left.files
    said = f"{left} free below {folder}"
    if left.bytes < DISK_WARNING or files < FEW:
        outcome = FAILURE if left.bytes < DISK_FAILURE or files < FILES_FAILURE else WARNING
        more = "make room: " + freeing(FREES, str(run), signed=signed)
        return Finding("machine: disk", outcome, said, more)
    return Finding("machine: disk", OK, said)


def _kernels(runtime: Runtime) -> Finding:
    check, started = "machine: kernels", runtime.now()
    kernels.warm()
    took = runtime.now() - started
    found = fingerprint()
    cpu = os.environ.get("NUMBA_CPU_NAME") or platform.machine()
    if found != BITS.get(ARITHMETIC):
        said = f"the kernels do not compute the bits of arithmetic {ARITHMETIC} on {cpu}"
        more = "merge on another machine, or install other releases of numba and llvmlite (those of constraints.txt)"
        return Finding(check, FAILURE, said, more)
    cores = counted(os.cpu_count() or 1, "core")
    said = f"the kernels compute the bits of arithmetic {ARITHMETIC}; ready after {took:.1f} s on {cpu}, {cores}"
    if took > 5.0:
        return Finding(check, WARNING, said, "set NUMBA_CACHE_DIR to a folder that is kept between starts")
    return Finding(check, OK, said)


def _torch(role: Role) -> Finding:
    check = "machine: torch"
    if importlib.util.find_spec("torch") is None:
        outcome = FAILURE if role.kind == RoleKind.LEARNER else WARNING
        return Finding(
            check, outcome, "not installed", "pip install '.[torch]' in a clone of Isthmus, where learners run"
        )
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding(check, OK, f"{torch.__version__}, {', '.join(devices) or 'no GPU'}")


def fingerprint() -> str:
    """Return a digest of merges of fixed numbers under every merge rule and with every codec. It uses every kernel."""
    embedding = Spec("e", (64, 16), "float32", TensorClass.EMBEDDING)
    layout = partition([embedding, Spec("d", (1000, 9), "float32", TensorClass.DENSE)], 1)
    fragment, bits = layout.fragments[0], np.random.PCG64(20260421)

    def draw() -> F32:
        # Only raw bits are drawn, because NumPy's distributions may change with its version.
        return ((bits.random_raw(fragment.size) >> np.uint64(40)).astype(np.float32) - 2**23) * np.float32(2**-23)

    state, digest = merge.initial(draw()), hashlib.sha256()
    for rule in MergeRule:
        accumulator = merge.Accumulator(fragment, merge.outers(Rules(merge=rule, outer_lr=0.4, outer_momentum=0.5)))
        for i in range(3):
            accumulator.add(draw(), merge.weight(100 + i, 10))
        for code in (*CODECS.values(), codec("q1.5")):
            result = merge.advance(state, accumulator, code, bytes(32))
            digest.update(result.published_digest + result.state_digest)
            digest.update(pack(code, fragment, result.state.master).tobytes())
        state = result.state
    return digest.hexdigest()
