"""The parts of `make gpu` that measure: the machine, the codecs, and what a learner costs the training thread.

Each yields rows as they are measured. Where there is no GPU they run at a small size on the CPU, which shows that they
work; the figures then mean nothing.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import isthmus
from isthmus.codecs import codec, kernels, pack
from isthmus.codecs.packed import keep_dropped
from isthmus.demo.gpt import ByteGPT, loss_of
from isthmus.doctor import machine as doctor
from isthmus.format.rules import CodecName, Pace, Rules
from isthmus.log import polar
from isthmus.runtime.clock import cores, threaded
from isthmus.torch import device_codecs
from isthmus.torch.device import CHUNK
from isthmus_lab.bench.kernels import flat
from isthmus_lab.bench.measure import Row, counted, quantile, rates, row
from isthmus_services.processes import end, isthmus_command

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

REPEATS = 7


def wait() -> None:
    """Wait until the device has done everything that was queued."""
    if HAS_GPU:
        torch.cuda.synchronize()


def timed(work: Callable[[], object], repeats: int = REPEATS, times: int = 1) -> list[float]:
    """Return the seconds of one call of `work`, on the device, in each repeat. A first call does not count."""
    work()
    wait()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(times):
            work()
        wait()
        found.append((time.perf_counter() - began) / times)
    return found


# --- the machine ------------------------------------------------------------------------------------------------------


def machine() -> Iterator[Row]:
    """Yield what the device and this machine can do, and whether merges have the right bits here."""
    size = (1 << 30) if HAS_GPU else (1 << 22)
    x = torch.empty(size // 4, device=DEVICE)
    y = torch.empty_like(x)
    said = "device" if HAS_GPU else "no GPU"
    took = timed(lambda: y.copy_(x), times=5)
    yield row(
        "machine", f"copy within the {said}, bytes read and written", counted(size), rates(2e-9 * size, took), "GB/s"
    )
    if HAS_GPU:
        host = torch.empty(size // 4, pin_memory=True)
        took = timed(lambda: x.copy_(host, non_blocking=True))
        yield row("machine", "copy from pinned memory", counted(size), rates(1e-9 * size, took), "GB/s")
        took = timed(lambda: host.copy_(x, non_blocking=True))
        yield row("machine", "copy to pinned memory", counted(size), rates(1e-9 * size, took), "GB/s")
    side = 8192 if HAS_GPU else 256
    a = torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16)
    took = timed(lambda: a @ a, times=5)
    yield row("machine", "matrix product in bfloat16", f"{side}²", rates(2e-12 * side**3, took), "TFLOP/s")
    began = time.perf_counter()
    kernels.warm()
    yield row("machine", "kernels compiled or loaded", "", [time.perf_counter() - began], "s")
    right = doctor.fingerprint() == doctor.BITS[kernels.ARITHMETIC]
    yield row("machine", "merges have the bits of every other machine", "", [float(right)], "", aim=1.0)
    threads = cores()
    values = np.zeros(16 << 20, np.float32)
    out = np.empty_like(values)
    took = timed(lambda: np.copyto(out, values))
    yield row(
        "machine",
        f"copy within host memory, one thread of {threads}",
        "16.78M",
        rates(4e-9 * values.size, took),
        "GB/s",
    )


def about() -> dict[str, str]:
    """Return the name of each thing that the figures depend on, and what it is here."""
    found = {
        "GPU": "no GPU",
        "torch": torch.__version__,
        "Python": sys.version.split()[0],
        "processor": f"{cores()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "disk, free": f"{shutil.disk_usage(tempfile.gettempdir()).free / 2**30:.0f} GiB",
    }
    if HAS_GPU:
        properties = torch.cuda.get_device_properties(0)
        found["GPU"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {torch.cuda.device_count()} of them"
        )
        found["CUDA"] = str(torch.version.cuda)
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )  # fmt: skip
        found["driver"] = asked.stdout.strip() or "unknown"
    for name in ("numba", "numpy", "triton"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = "none"
    return found


# --- codecs -----------------------------------------------------------------------------------------------------------


def codecs() -> Iterator[Row]:
    """Yield the speed of each codec on the device beside a copy there, and on all cores of the CPU; then of matrices."""
    n = CHUNK if HAS_GPU else CHUNK >> 6
    torch.manual_seed(0)
    x = 0.02 * torch.randn(n, device=DEVICE)
    y = torch.empty_like(x)
    times = 20 if HAS_GPU else 1
    copies = rates(4e-9 * n, timed(lambda: y.copy_(x), times=times))
    host = x.cpu().numpy()
    for name, made in device_codecs.CODECS.items():
        if name == CodecName.F32:
            continue  # its codes are the numbers themselves: nothing is computed
        took = timed(lambda made=made: made.encode(x), times=times)  # type: ignore[misc]
        yield row(
            "codecs",
            f"{name}: encode on the device",
            counted(n),
            rates(4e-9 * n, took),
            "GB/s of float32",
            limits=copies,
        )
    fragment = flat(n)
    out = np.empty_like(host)
    with threaded(cores(), 0) as runtime:
        for name in (*device_codecs.CODECS, "q1.5"):
            code = codec(name)

            def encode(code: Any = code) -> None:
                keep_dropped(fragment, code, pack(code, fragment, host, runtime.compute), out, runtime.compute)

            yield row(
                "codecs",
                f"{name}: encode on {cores()} cores",
                counted(n),
                rates(4e-9 * n, timed(encode)),
                "GB/s of float32",
            )
        yield from _matrices(runtime.compute)


def _matrices(compute: Any) -> Iterator[Row]:
    """Yield how long the polar factor of a matrix takes on all cores and on the device, and whether the bits agree."""
    if HAS_GPU:
        polar.require_gpu()
    draw = np.random.default_rng(0)
    for m, n in ((768, 3072), (2048, 8192)) if HAS_GPU else ((64, 96),):
        d = draw.standard_normal((m, n)).astype(np.float32)
        here = timed(lambda d=d: polar.isotropic(d, 0, compute), repeats=3)  # type: ignore[misc]
        yield row("codecs", f"polar factor on {cores()} cores", f"{m} × {n}", here, "s")
        if HAS_GPU:
            on_gpu = replace(compute, gpu=True)
            there = timed(lambda d=d, on_gpu=on_gpu: polar.isotropic(d, 0, on_gpu), repeats=3)  # type: ignore[misc]
            yield row("codecs", "polar factor on the GPU", f"{m} × {n}", there, "s", limits=here)
            same = polar.isotropic(d, 0, compute).tobytes() == polar.isotropic(d, 0, on_gpu).tobytes()
            yield row("codecs", "the two have the same bits", f"{m} × {n}", [float(same)], "", aim=1.0)


# --- steps ------------------------------------------------------------------------------------------------------------

SHAPES = {"1M": (128, 4, 8), "100M": (768, 14, 32), "1B": (2048, 20, 8)}
"""Width, layers and batch of the byte-level GPT of each size. Contexts are of 512 bytes."""

TURN_S = 0.5


def steps(size: str, seconds: float) -> Iterator[Row]:
    """Yield what a step costs with a learner beside the bare loop, in turns, and how much memory each takes."""
    width, layers, batch = SHAPES[size] if HAS_GPU else (32, 2, 2)
    context = 512 if HAS_GPU else 32
    torch.manual_seed(0)
    model = ByteGPT(width, layers, heads=max(1, width // 64), context=context).to(DEVICE)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    text = torch.randint(256, (batch, context + 1), device=DEVICE)

    def train() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = loss_of(model, text)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        train()
    wait()
    bare_bytes = _allocated()
    shown = counted(parameters)
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder, "run"))
        began = time.perf_counter()
        # A checkpoint of the largest model would fill the disk of a small machine.
        checkpoint_s = 60.0 if parameters < 5e8 else float("inf")
        with isthmus.join(
            run, model, optimizer, learner="a", create=Rules(fragments=12, sync_every=12), pace=Pace(quorum=1),
            checkpoint_s=checkpoint_s,
        ) as link:  # fmt: skip
            yield row("steps", "creating the run and joining it", shown, [time.perf_counter() - began], "s")
            with open(Path(folder, "syncer.log"), "wb") as log:
                syncer = subprocess.Popen(
                    isthmus_command("syncer", run, "--quorum", "1", "--threads", str(max(1, cores() // 2))),
                    stdout=log, stderr=log,
                )  # fmt: skip
            try:
                yield from _in_turns(train, link, shown, seconds)
            finally:
                end(syncer, 20.0)
            with_bytes = _allocated()
            if HAS_GPU:
                yield row(
                    "steps",
                    "memory of the GPU, beside the bare loop",
                    shown,
                    [with_bytes / 2**30],
                    "GiB",
                    limits=[bare_bytes / 2**30],
                )
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            yield row("steps", "memory of the host, at most", shown, [peak], "GiB")


def _allocated() -> float:
    """Return the most bytes of the device that were in use since the last call."""
    if not HAS_GPU:
        return 0.0
    found = float(torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    return found


def _in_turns(train: Callable[[], None], link: isthmus.Link, shown: str, seconds: float) -> Iterator[Row]:
    """Train bare and with the learner in turns, for some seconds."""
    bare: list[float] = []
    joined: list[float] = []
    held: list[float] = []
    began = time.perf_counter()
    while min(link.versions) < 1:
        train()
        wait()
        link.step(1)
    yield row("steps", "until all of it was merged once and adopted", shown, [time.perf_counter() - began], "s")
    adopted = sum(link.versions)
    until = time.monotonic() + seconds
    first = True
    while time.monotonic() < until or len(joined) < 3:
        for kept, stepping in ((bare, False), (joined, True)):
            wait()
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < TURN_S:
                train()
                if stepping:
                    asked = time.perf_counter()
                    link.step(1)
                    held.append(time.perf_counter() - asked)
                count += 1
                if count % 8 == 0:
                    wait()  # a queue of many steps would make turns of several seconds
            wait()
            if not first:
                kept.append(1e3 * (time.perf_counter() - began) / count)
        first = False
    yield row("steps", "a step in a run, beside the bare loop", shown, joined, "ms", limits=bare)
    yield row("steps", "link.step, p50", shown, [1e3 * quantile(held, 0.5)], "ms")
    yield row("steps", "link.step, p99", shown, [1e3 * quantile(held, 0.99)], "ms")
    yield row("steps", "link.step, the longest", shown, [1e3 * max(held)], "ms")
    yield row("steps", "fragments adopted meanwhile", shown, [float(sum(link.versions) - adopted)], "")


# --- the largest model ------------------------------------------------------------------------------------------------

LARGE = {"8B": (4096, 40), "4B": (3072, 36), "2B": (2560, 26), "1B": (2048, 20)}
"""Width and layers of the model of each size."""

HOST_BYTES = 24
"""Bytes of host memory for each parameter: the learner's copy of the global version, the syncer's state of three arrays,
and two arrays that come and go while the run is created and read."""


def large() -> Iterator[Row]:
    """Create a run of the largest model for which this machine has memory, join it, and train until all of it is merged."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for width, layers in LARGE.values():
        if HOST_BYTES * 12 * width**2 * layers < 0.85 * free:
            break
    context, batch = 512, 4
    if not HAS_GPU:
        width, layers, context = 64, 2, 32
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = ByteGPT(width, layers, heads=width // 64, context=context)
    torch.set_default_dtype(torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    shown = counted(parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    text = torch.randint(256, (batch, context + 1), device=DEVICE)
    _allocated()
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder, "run"))
        began = time.perf_counter()
        with isthmus.join(
            run, model, optimizer, learner="a", create=Rules(fragments=48, sync_every=48), pace=Pace(quorum=1),
            checkpoint_s=float("inf"),
        ) as link:  # fmt: skip
            yield row("large", "creating the run and joining it", shown, [time.perf_counter() - began], "s")
            log = Path(folder, "syncer.log")
            with open(log, "wb") as out:
                syncer = subprocess.Popen(
                    isthmus_command("syncer", run, "--quorum", "1", "--threads", str(cores())), stdout=out, stderr=out
                )
            began = time.perf_counter()
            held: list[float] = []
            try:
                while min(link.versions) < 1:
                    loss = loss_of(model, text)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
                    wait()
                    asked = time.perf_counter()
                    link.step(text.numel())
                    held.append(time.perf_counter() - asked)
                    if syncer.poll() is not None:
                        raise RuntimeError(f"the syncer ended with {syncer.returncode}")
                yield row(
                    "large", "until all of it was merged once and adopted", shown, [time.perf_counter() - began], "s"
                )
                yield row("large", "steps meanwhile", shown, [float(len(held))], "")
                yield row("large", "link.step, p50", shown, [1e3 * quantile(held, 0.5)], "ms")
                yield row("large", "link.step, the longest", shown, [1e3 * max(held)], "ms")
                peak = Path(f"/proc/{syncer.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
                yield row("large", "memory of the syncer, at most", shown, [int(peak) / 2**20], "GiB")
            finally:
                syncer.kill()
                syncer.wait()
            peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            yield row("large", "memory of the learner's host, at most", shown, [peak_gib], "GiB")
            if HAS_GPU:
                yield row("large", "memory of the GPU, at most", shown, [_allocated() / 2**30], "GiB")
            link.close(wait=0.0)
