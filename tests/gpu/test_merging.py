"""Merges on a GPU have the bits of the processor: products, polar factors, and what a syncer publishes."""

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from isthmus.codecs import codec, kernels
from isthmus.codecs.kernels import F32, cuda
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import Rules
from isthmus.log import merge, polar
from isthmus.runtime.clock import ALONE, ComputePool, cores, threaded
from support.matrices import KINDS, product, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("cuda"),
    # What CUDA's own packages warn of is no failure. That small matrices do not occupy a GPU must not be warned of.
    pytest.mark.filterwarnings("default", "error:Grid size"),
]

ON_GPU = ComputePool(gpu=True)

SHAPES = [
    (1, 1), (1, 500), (500, 1), (2, 3), (63, 64), (64, 64), (65, 64), (64, 200), (200, 65), (129, 127), (256, 256),
    (300, 1000), (1000, 300), (768, 3072), (3072, 768), (1024, 1024), (2048, 2048), (2048, 8192), (8192, 2048),
]  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[ComputePool]:
    """All cores of the processor."""
    with threaded(1, compute=cores()) as runtime:
        yield runtime.compute


@pytest.fixture(autouse=True)
def _unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polar, "_warned", set())


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the matrices that the GPU has computed without an error."""
    done: list[tuple[int, ...]] = []
    on_gpu = cuda.polar_factor

    def count(d: F32, factor: float, quintics: Sequence[tuple[float, float, float]]) -> F32:
        found = on_gpu(d, factor, quintics)
        done.append(d.shape)
        return found

    monkeypatch.setattr(cuda, "polar_factor", count)
    return done


def factors(d: F32, compute: ComputePool) -> tuple[F32, F32]:
    """Return the polar factor of a matrix by the processor and by the GPU."""
    norm = kernels.norm(d.reshape(-1))
    return polar.polar_factor(d, norm, compute), cuda.polar_factor(d, polar._WITHIN / norm, polar.QUINTICS)


def same(one: F32, other: F32) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def test_the_gpu_is_accepted() -> None:
    assert polar.require_gpu()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(1, 1, 1), (1, 16, 1), (64, 16, 64), (65, 17, 63), (3, 1000, 5), (500, 3, 70), (128, 512, 256), (257, 259, 261)],
)
def test_products(m: int, k: int, n: int, kind: str) -> None:
    a, b = values(kind, m, k), values(kind, k, n)
    assert same(product(a, b), cuda.product(a, b))
    assert same(product(a, np.ascontiguousarray(a.T)), cuda.gram(a))


def test_many_shapes(pool: ComputePool) -> None:
    draw = np.random.default_rng(0)
    for number in range(100):
        kind = KINDS[number % len(KINDS)]
        m, k, n = (int(x) for x in draw.integers(1, 300, 3))
        a, b = values(kind, m, k), values(kind, k, n)
        assert same(product(a, b), cuda.product(a, b)), f"product {m} {k} {n} {kind}"
        if a.any():
            assert same(*factors(a, pool)), f"polar factor {m} {k} {kind}"


@pytest.mark.parametrize(("m", "n"), SHAPES, ids=str)
def test_polar_factors(m: int, n: int, pool: ComputePool) -> None:
    d = values("normal", m, n)
    before = d.copy()
    assert same(*factors(d, pool))
    assert same(d, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e15])
def test_polar_factors_of_extreme_numbers(kind: str, scale: float, pool: ComputePool) -> None:
    assert same(*factors(values(kind, 200, 333) * np.float32(scale), pool))


def test_polar_factors_that_are_denormals_themselves(pool: ComputePool) -> None:
    d = values("normal", 150, 260)
    d[::3] *= np.float32(1e-41)
    wanted, found = factors(d, pool)
    size = np.abs(wanted)
    assert ((size > 0.0) & (size < np.finfo(np.float32).tiny)).any(), "else it shows nothing"
    assert same(wanted, found)


def test_a_matrix_of_low_rank(pool: ComputePool) -> None:
    assert same(*factors(product(values("normal", 400, 5), values("normal", 5, 700)), pool))


@pytest.mark.parametrize(
    "part",
    [np.s_[:, ::2], np.s_[3:4, 10:50], np.s_[::3, 7:8], np.s_[5:80, 20:90]],
    ids=["gaps", "row", "column", "middle"],
)
def test_parts_of_a_larger_matrix(part: tuple[slice, slice]) -> None:
    d = values("normal", 100, 300)[part]
    alone = d.copy()
    norm = kernels.norm(alone.reshape(-1))
    found = cuda.polar_factor(d, polar._WITHIN / norm, polar.QUINTICS)
    assert same(found, polar.polar_factor(alone, norm))


def test_blocks(computed: list[tuple[int, ...]], pool: ComputePool) -> None:
    d = values("normal", 300, 500)
    d[:100, :125] = 0.0
    assert same(polar.isotropic(d, 128, pool), polar.isotropic(d, 128, ON_GPU))
    assert len(computed) == 11, "3 × 4 blocks, one of which is zero"


def test_several_threads_at_once(computed: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture) -> None:
    shapes = [(40 + 30 * i, 300 - 20 * i) for i in range(8)]
    found: dict[int, F32] = {}

    def work(number: int) -> None:
        d = values("normal", *shapes[number])
        for _ in range(5):
            found[number] = polar.isotropic(d, 0, ON_GPU)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(computed) == 40, caplog.text
    for number, shape in enumerate(shapes):
        assert same(found[number], polar.isotropic(values("normal", *shape)))


def test_a_gpu_without_memory_leaves_a_matrix_to_the_processor(
    monkeypatch: pytest.MonkeyPatch, computed: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    d = values("normal", 100, 140)
    wanted = polar.isotropic(d)
    with monkeypatch.context() as patch:

        def too_large(m: int, n: int) -> Any:
            return cuda._cuda.device_array((1 << 20, 1 << 20), np.float32)

        patch.setattr(cuda, "_empty", too_large)
        for _ in range(3):
            assert same(polar.isotropic(d, 0, ON_GPU), wanted)
    assert computed == []
    assert len([r for r in caplog.records if r.name == polar.__name__ and r.levelno == logging.WARNING]) == 1
    assert same(polar.isotropic(d, 0, ON_GPU), wanted)
    assert computed == [(100, 140)], "the GPU is used again when it has memory"


@pytest.mark.parametrize("codec_down", ["int4", "f32", "q2"])
def test_a_merge_has_the_same_bytes(
    codec_down: str, computed: list[tuple[int, ...]], pool: ComputePool, caplog: pytest.LogCaptureFixture
) -> None:
    rules = Rules(merge="iso", iso_block=512)
    fragment = partition(
        [
            Spec("embed", (500, 64), "float32", TensorClass.EMBEDDING),
            Spec("up", (256, 1000), "float32", TensorClass.DENSE),
            Spec("down", (1000, 256), "float32", TensorClass.DENSE),
            Spec("square", (384, 384), "float32", TensorClass.DENSE),
            Spec("gain", (257,), "float32", TensorClass.DENSE),
        ],
        1,
    ).fragments[0]
    draw = np.random.default_rng(0)
    start = merge.initial(draw.standard_normal(fragment.size, dtype=np.float32))
    rounds = [[draw.standard_normal(fragment.size, dtype=np.float32) for _ in range(3)] for _ in range(2)]
    found = []
    for compute in (ALONE, pool, ON_GPU, ComputePool(pool.pool, pool.threads, gpu=True)):
        state, said = start, []
        for updates in rounds:
            round_ = merge.Accumulator(fragment, merge.outers(rules), compute)
            for number, x in enumerate(updates):
                round_.add(x, 1.0 + number)
            done = merge.advance(state, round_, codec(codec_down), bytes(32))
            state = done.state
            said.append((done.value_digest, done.state_digest, state.momentum.tobytes(), state.master.tobytes()))
        found.append(said)
    assert all(said == found[0] for said in found[1:])
    assert len(computed) == 2 * 2 * 5, "up and down are two blocks each; with two pools, two rounds " + caplog.text
