"""A GPU merges with the processor's bits, a missing GPU is reported, and the processor takes over if a GPU fails.

The kernels run in numba's simulator here. `tests/gpu/test_merging.py` compares the bits of a real GPU.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isthmus.agent import speed
from isthmus.codecs import codec, kernels
from isthmus.codecs.kernels import F32, cuda
from isthmus.errors import InputError
from isthmus.format.isotropic import flop
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import Rules
from isthmus.log import merge, polar
from isthmus.runtime.clock import ALONE, ComputePool, cores, threaded

pytestmark = pytest.mark.tier("test")

ON_GPU = ComputePool(gpu=True)
TESTS = Path(__file__).parents[1]


def matrix(m: int, n: int) -> F32:
    return np.random.default_rng([m, n]).standard_normal((m, n), dtype=np.float32)


def factor(d: F32, compute: ComputePool = ALONE) -> F32:
    return polar.polar_factor(d, kernels.norm(d.reshape(-1)), compute)


# --- the kernels ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated(pytestconfig: pytest.Config) -> dict[str, dict[str, bool]]:
    """Whether the simulator gives the same bits as the processor, by part and case."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "support.simulated_cuda",
            *(["wrong"] if pytestconfig.getoption("tier") != "all" else []),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.tier("all")
@pytest.mark.parametrize(("part", "least"), [("products", 50), ("polar factors", 36), ("tiles as on a GPU", 1)])
def test_the_kernels_have_the_bits_of_the_processor(
    simulated: dict[str, dict[str, bool]], part: str, least: int
) -> None:
    assert len(simulated[part]) >= least
    assert [name for name, same in simulated[part].items() if not same] == []


@pytest.mark.parametrize("wrong", ["zeros of the other sign", "two roundings"])
def test_the_comparison_finds_kernels_that_are_wrong(simulated: dict[str, dict[str, bool]], wrong: str) -> None:
    assert not all(simulated[wrong].values())


# --- a missing GPU ----------------------------------------------------------------------------------------------------


class Target(SimpleNamespace):
    """numba's CUDA target on a machine where something is missing."""

    def __init__(self, available: bool, error: str | None) -> None:
        super().__init__(is_available=lambda: available, cuda_error=lambda: error)

    def get_current_device(self) -> Any:
        raise RuntimeError("Call to cuDevicePrimaryCtxRetain\nresults in CUDA_ERROR_OUT_OF_MEMORY")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (
            Target(False, "\nCUDA driver library\ncannot be found.\n"),
            "CUDA driver library cannot be found: see whether",
        ),
        (Target(False, None), "there is a driver, but not CUDA's compiler libNVVM: pip install 'numba-cuda"),
        (Target(True, None), "cuDevicePrimaryCtxRetain results in CUDA_ERROR_OUT_OF_MEMORY: see whether nvidia-smi"),
    ],
)
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, target: Target, said: str) -> None:
    monkeypatch.setattr(cuda, "_load", lambda: None)
    monkeypatch.setattr(cuda, "_cuda", target)
    with pytest.raises(InputError, match=f"^no GPU can be used: .*{said}"):
        polar.require_gpu()


def test_a_numba_without_its_cuda_target_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ImportError("NVIDIA CUDA Python bindings not found.\nInstall them.")

    monkeypatch.setattr(cuda, "_load", load)
    with pytest.raises(
        InputError, match=r"numba cannot load its CUDA target: NVIDIA CUDA Python bindings .*numba-cuda"
    ):
        polar.require_gpu()


@pytest.mark.parametrize("command", [("syncer",), pytest.param(("replay",), marks=pytest.mark.tier("all"))])
def test_a_command_without_a_gpu_ends_with_one_line(command: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "isthmus_services.main", *command, str(tmp_path / "run"), "--gpu"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2, done.stderr
    assert "no GPU can be used: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gpu_is_compared_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "require", lambda: "Test GPU")
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "polar_factor", on_processor)
        assert polar.require_gpu() == "Test GPU"

    def almost(*arguments: Any) -> F32:
        found = on_processor(*arguments)
        found[-1, -1] = np.nextafter(found[-1, -1], np.float32(2.0))
        return found

    monkeypatch.setattr(cuda, "polar_factor", almost)
    with pytest.raises(InputError, match="Test GPU computes other bits than the processor"):
        polar.require_gpu()
    monkeypatch.setattr(cuda, "polar_factor", failing([]))
    with pytest.raises(InputError, match="Test GPU cannot compute merges: out of memory: see whether"):
        polar.require_gpu()


# --- the processor in place of the GPU --------------------------------------------------------------------------------


def on_processor(d: F32, scale: float, quintics: Sequence[tuple[float, float, float]]) -> F32:
    """Compute what the GPU would, on the processor."""
    assert quintics is polar.QUINTICS
    return polar.polar_factor(d, polar._WITHIN / scale)


def failing(calls: list[tuple[int, ...]]) -> Callable[..., F32]:
    def fail(d: F32, *_: object) -> F32:
        calls.append(d.shape)
        raise RuntimeError("out of memory")

    return fail


@pytest.fixture
def _unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polar, "_warned", set())


@pytest.mark.usefixtures("_unwarned")
def test_where_the_gpu_fails_the_processor_computes_the_same_and_one_warning_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(cuda, "polar_factor", failing(calls))
    for m, n in ((5, 9), (9, 5), (40, 40)):
        assert factor(matrix(m, n), ON_GPU).tobytes() == factor(matrix(m, n)).tobytes()
    assert calls == [(5, 9), (9, 5), (40, 40)], "each matrix is tried on the GPU: memory may be free again"
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "could not compute a matrix of 5 × 9: out of memory; the processor computes it" in warnings[0]


@pytest.mark.usefixtures("_unwarned")
def test_here_a_merge_that_should_use_a_gpu_has_the_same_bytes(caplog: pytest.LogCaptureFixture) -> None:
    """This holds on machines with and without a GPU."""
    rules = Rules(merge="iso", iso_block=40)
    fragment = partition(
        [
            Spec("weight", (64, 33), "float32", TensorClass.DENSE),
            Spec("gain", (17,), "float32", TensorClass.DENSE),
        ],
        1,
    ).fragments[0]
    draw = np.random.default_rng(0)
    start = merge.initial(draw.standard_normal(fragment.size, dtype=np.float32))
    updates = [draw.standard_normal(fragment.size, dtype=np.float32) for _ in range(3)]
    found = []
    for compute in (ALONE, ON_GPU):
        round_ = merge.Accumulator(fragment, merge.outers(rules), compute)
        for x in updates:
            round_.add(x, 1.0)
        done = merge.advance(start, round_, codec("int4"), bytes(32))
        found.append((done.state_digest, done.value_digest))
    assert found[0] == found[1]


def test_matrices_go_to_the_gpu_only_where_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def count(d: F32, *more: Any) -> F32:
        calls.append(d.shape)
        return on_processor(d, *more)

    monkeypatch.setattr(cuda, "polar_factor", count)
    for gpu in (False, True):
        with threaded(1, compute=1, gpu=gpu) as runtime:
            polar.isotropic(matrix(6, 30), 16, runtime.compute)
        assert calls == ([(6, 15)] * 2 if gpu else [])


def test_a_machine_is_as_fast_as_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    sides: list[int] = []

    def instant(d: F32, *_: object) -> F32:
        sides.append(d.shape[0])
        return d

    monkeypatch.setattr(cuda, "polar_factor", instant)
    ticks = iter(range(10_000))
    found = speed.glance(lambda: float(next(ticks)), Rules(), ON_GPU)
    assert sides == [speed.SIDE_GPU] * (speed.REPEATS + 1)
    assert found.flop_s == flop(speed.SIDE_GPU, speed.SIDE_GPU) / cores()
