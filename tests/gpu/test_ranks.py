"""Learners on a GPU, of one rank and of two that share it, make the same model as learners on a CPU, bit for bit."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from e2e.test_ranks import trained

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda"), pytest.mark.timeout(600)]

KINDS = {
    "one process": {"a": ("plain-cuda", 1), "b": ("plain-cuda", 1)},
    "one rank": {"a": ("plain", 1), "b": ("fsdp2-cuda", 1)},
    "two ranks that share the GPU": {"a": ("plain", 1), "b": ("fsdp2-cuda", 2)},
    "two replicas that share the GPU": {"a": ("plain", 1), "b": ("ddp-cuda", 2)},
}
ON_CPU = {"a": ("plain", 1), "b": ("plain", 1)}

Made = Mapping[str, "Future[dict[tuple[int, int], bytes]]"]


@pytest.fixture(scope="module")
def made(cuda: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """The digests of all states of each run; all train at the same time, as they wait more than they compute."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1 + len(KINDS)) as pool:
        patch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        cases = {**KINDS, "on the CPU": ON_CPU}
        yield {name: pool.submit(trained, folder / name.replace(" ", "-"), kinds) for name, kinds in cases.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_learners_on_the_gpu_make_the_same_model_bit_for_bit(made: Made, kind: str) -> None:
    alone = made["on the CPU"].result()
    assert len(alone) == 3
    assert made[kind].result() == alone
