"""A model may be sharded over its learner's ranks in some ways; all others are rejected by name."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import isthmus
from isthmus.errors import InputError

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from isthmus.torch.ranks import ranks_of  # noqa: E402
from isthmus.torch.shard_transfer import Block, ShardPiece, pieces_of  # noqa: E402


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[None]:
    """A job of four ranks: this process is the first, and the others do not exist."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def single(tmp_path: Path) -> Iterator[None]:
    """A job of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_module_of_its_own_is_a_learner_of_its_own(job: None) -> None:
    assert ranks_of(net()) is None


def test_without_a_job_there_are_no_ranks() -> None:
    assert ranks_of(net()) is None


@pytest.mark.parametrize(("dimension", "what"), [("pp", "pipeline parallelism"), ("ep", "expert parallelism")])
def test_what_is_no_shard_of_a_tensor_is_refused_by_name(job: None, dimension: str, what: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(dimension, f"dp of {dimension}"))
    model = net()
    fully_shard(model, mesh=mesh[f"dp of {dimension}"])
    with pytest.raises(
        InputError, match=rf"parameter 0\.weight lies on a device mesh .*'{dimension}', as {what}: .*FSDP2"
    ):
        ranks_of(model)


def test_a_dimension_of_length_one_is_none(single: None) -> None:
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp"))["dp"])
    ranks = ranks_of(model)
    assert ranks is not None
    assert (ranks.size, ranks.leads) == (1, True)


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning", "ignore::FutureWarning")
def test_flat_parameters_are_refused_with_what_to_write(single: None) -> None:
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu")))
    with pytest.raises(InputError, match=r"FSDP1 .*fully_shard\(model\)"):
        ranks_of(model)


def test_replicas_on_some_of_the_ranks_are_refused(job: None) -> None:
    model = nn.parallel.DistributedDataParallel(net(), process_group=dist.new_group([0, 1], backend="fake"))
    with pytest.raises(InputError, match="shared by 2 of the job's 4 processes"):
        ranks_of(model)


def test_a_model_sharded_over_one_rank_joins_like_any_other(single: None, folder: Path) -> None:
    model = net()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rules = isthmus.Rules(fragments=2, sync_every=2)
    with isthmus.join(str(folder), model, optimizer, learner="a", create=rules) as link:
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            link.step(4)
        assert link.speaks
    trained = [value.clone() for value in model.state_dict().values()]
    trained = [value.full_tensor() for value in trained]
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    with isthmus.join(str(folder), plain, optimizer, learner="a") as link:
        assert (link.steps_done, link.moments) == (3, "own")
        assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), trained, strict=True))


WHOLE = Block((0, 0), (4, 6))


@pytest.mark.parametrize(
    ("blocks", "found"),
    {
        "whole": ([WHOLE], [ShardPiece(0, WHOLE)]),
        "replicas": ([WHOLE, WHOLE], [ShardPiece(0, WHOLE)]),
        "an empty one": ([Block((4, 0), (0, 6)), WHOLE], [ShardPiece(1, WHOLE)]),
        "halves, each twice": (
            [Block((0, 0), (4, 3)), Block((0, 3), (4, 3))] * 2,
            [ShardPiece(0, Block((0, 0), (4, 3))), ShardPiece(1, Block((0, 3), (4, 3)))],
        ),
    }.values(),
)
def test_each_block_is_given_by_the_first_that_holds_it(blocks: list[Block], found: list[ShardPiece]) -> None:
    assert list(pieces_of("w", (4, 6), blocks)) == found


@pytest.mark.parametrize(
    "blocks",
    {
        "a gap": [Block((0, 0), (4, 3)), Block((0, 4), (4, 2))],
        "an overlap as large as a gap": [Block((0, 0), (4, 3)), Block((0, 2), (4, 3))],
        "outside": [Block((0, 0), (2, 6)), Block((3, 0), (2, 6))],
        "none": [],
    }.values(),
)
def test_blocks_that_do_not_tile_are_refused(blocks: list[Block]) -> None:
    with pytest.raises(InputError, match=re.escape("do not make up a tensor of shape (4, 6)")):
        pieces_of("w", (4, 6), blocks)
