"""If a run cannot be created, the error is raised before anything is written."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from isthmus.codecs.kernels import F32
from isthmus.errors import InputError, RunMissing
from isthmus.format.layout import Spec, Tensor, TensorClass
from isthmus.format.records import frame
from isthmus.format.records.frame import Blob, Body, Data
from isthmus.format.records.keys import RUN_KEY, commit_key, members_key
from isthmus.format.records.objects import RunHeader
from isthmus.format.rules import FRAGMENTS_MAX, Pace, Rules
from isthmus.log.creation import Seed, create_run
from isthmus.log.run import Run, read_run
from isthmus.runtime.clock import single_threaded
from isthmus.store import Entry
from isthmus_lab.simulate.store import Objects
from support.world import seed_of


class Memory:
    """A store in a dictionary."""

    def __init__(self) -> None:
        self.url = "memory://run"
        self.objects = Objects()

    async def get(self, key: str) -> Body:
        return bytearray(self.objects.get(key))

    async def get_range(self, key: str, start: int, stop: int) -> Body:
        return bytearray(self.objects.get(key)[start:stop])

    async def put(self, key: str, data: Data) -> None:
        self.objects.put(key, bytes(data), 0.0)

    async def create(self, key: str, data: Blob) -> bool:
        return self.objects.create(key, bytes(data), 0.0)

    async def list(self, prefix: str) -> Sequence[Entry]:
        return self.objects.list(prefix)

    async def delete(self, key: str) -> None:
        self.objects.delete(key)


async def created(seed: Seed) -> tuple[Memory, Run]:
    store = Memory()
    return store, await create_run(store, single_threaded(0), seed)


async def refused(seed: Seed) -> str:
    store = Memory()
    with pytest.raises(InputError) as error:
        await create_run(store, single_threaded(0), seed)
    assert not isinstance(error.value, RunMissing)
    assert store.objects.blobs == {}, "something was written before it failed"
    return str(error.value)


async def test_a_run_of_more_fragments_than_a_small_header_holds_is_created() -> None:
    store, run = await created(
        seed_of(Rules(fragments=2000), Pace(), [Spec(f"t{i}", (4,), "float32", TensorClass.DENSE) for i in range(2000)])
    )
    assert len(run.layout.fragments) == len(run.header.snapshots) == 2000
    assert (await read_run(store)).digest == run.digest


async def test_a_header_names_as_many_snapshots_as_there_may_be_fragments() -> None:
    _, run = await created(seed_of())
    widest = {
        "snapshots": tuple(np.random.default_rng(0).bytes(32) for _ in range(FRAGMENTS_MAX)),
        "model": "ü" * 256,
        "seed": (1 << 63) - 1,
    }
    header = RunHeader(**{name: getattr(run.header, name) for name in RunHeader.__struct_fields__} | widest)
    blob = frame.draft(frame.Kind.RUN, header).blob
    assert frame.parse(blob, frame.Kind.RUN, RunHeader)[0] == header


@pytest.mark.parametrize(
    ("name", "message"),
    [("layer\x1b[2J", "cannot be described"), ("x" * 300, "cannot be described")],
)
async def test_a_tensor_that_no_run_can_name_is_refused_before_anything_is_written(name: str, message: str) -> None:
    """If it were written, no process could read the run object again."""
    specs = [Spec("fine", (4,), "float32", TensorClass.DENSE), Spec(name, (4,), "float32", TensorClass.DENSE)]
    assert message in await refused(seed_of(specs=specs))


async def test_values_that_are_not_finite_are_refused_before_anything_is_written() -> None:
    seed = seed_of()
    assert not callable(seed.values)
    seed.values[-1][3] = np.nan
    assert "'layer6'" in await refused(seed)


@pytest.mark.parametrize("rules", [Rules(fragments=4), Rules(fragments=40)])
async def test_a_model_that_is_brought_piece_by_piece_makes_the_same_run(rules: Rules) -> None:
    specs = [Spec("wide", (600, 300), "float32", TensorClass.DENSE), Spec("fine", (4,), "float32", TensorClass.DENSE)]
    whole = seed_of(rules, specs=specs)
    assert not callable(whole.values)
    named = dict(zip((s.name for s in specs), whole.values, strict=True))
    asked: Counter[str] = Counter()

    async def take(piece: Tensor) -> F32:
        asked[piece.name] += 1
        return named[piece.spec.name][piece.origin : piece.origin + piece.size]

    _, wanted = await created(whole)
    store, found = await created(replace(whole, values=take))
    assert found.header.snapshots == wanted.header.snapshots
    assert set(asked.values()) == {2}, "each piece is checked before anything is written, and then written"
    assert len(asked) == sum(len(f.tensors) for f in found.layout.fragments)
    named["wide"][-1] = np.nan
    with pytest.raises(InputError, match="'wide'"):
        await create_run(empty := Memory(), single_threaded(0), replace(whole, values=take))
    assert empty.objects.blobs == {}
    assert store.objects.blobs


@pytest.mark.parametrize("left", [commit_key(0, 1), members_key(1), "commits/00001/000000000007", "updates/00000/a/x"])
async def test_no_run_is_created_beside_the_log_of_a_run_whose_object_is_gone(left: str) -> None:
    store, run = await created(seed_of())
    object_ = await store.get(RUN_KEY)
    await store.put(left, b"of the run")
    await store.delete(RUN_KEY)
    kept = dict(store.objects.blobs)
    with pytest.raises(
        RunMissing,
        match=f"{RUN_KEY} is gone, and {left.partition('/')[0]}/ lie beside it .*: end no syncer, .* else run the same `isthmus create` again if that made the run, or restore it from a backup",
    ):
        await create_run(store, single_threaded(0), seed_of())
    assert store.objects.blobs == kept, "something was written"
    await store.put(RUN_KEY, object_)
    assert (await create_run(store, single_threaded(0), seed_of())).digest == run.digest


async def test_an_unfinished_creation_is_finished() -> None:
    store, _ = await created(seed_of())
    await store.delete(RUN_KEY)
    await create_run(store, single_threaded(0), seed_of())
    assert RUN_KEY in store.objects.blobs


def test_where_a_digest_is_expected_no_run_is_to_be_created() -> None:
    said = str(RunMissing("s3://b/r", pinned="ab12"))
    assert "init" not in said
    assert "restore s3://b/r/run from a backup" in said
