"""What the tests of `isthmus heal` share: a damaged run, and following what heal says."""

import asyncio
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from advice.followed import advises, isthmus
from advice.lives import training
from advice.rows import Row
from isthmus.errors import LogCorrupt
from isthmus.inspect.status import read_ledgers
from isthmus.log.listing import checkpoints_in
from support.world import SPECS, World, newest_commit, serving, train, until


def model() -> nn.Module:
    """Return a module with the parameters of the runs of these tests."""
    made = nn.Module()
    for spec in SPECS:
        made.register_parameter(spec.name, nn.Parameter(torch.zeros(spec.shape)))
    return made


async def grown(w: World, versions: int = 4) -> int:
    """Train until each fragment has this many versions, then kill the only syncer; return the first one's version."""
    async with serving(w.syncer("s0"), killed=True) as syncer:
        await train(w.learner("a"), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= versions)
    return (await newest_commit(w, 0)).version


async def settled_to(w: World) -> int:
    """Return the version of fragment 0 that learner a's newest checkpoint knows."""
    ledgers = await read_ledgers(w.log, checkpoints_in(await w.store.list("learners/")))
    return ledgers["a"]["fragments"][0]["settled_to"] if ledgers else 0


async def heal(here: Row, w: World) -> str:
    """Run `isthmus heal`, which must have a row's sentence and advice; return what it printed, in one line."""
    code, told = await isthmus("heal", w.run.url)
    assert code == 1, told
    advises(here, told)
    return " ".join(told.split())


async def moves(w: World, version: int) -> None:
    """Let a syncer and a learner go on until the first fragment has this version again."""
    async with serving(w.syncer("s8")) as syncer, training(w.learner("a")):
        await until(lambda: syncer.coordinators[0].head >= version, "the fragment moves")


async def hold_all(w: World) -> None:
    """Let a syncer fold both fragments, and end it as SIGTERM does."""
    async with serving(w.syncer("s7")) as syncer:
        await until(
            lambda: len(syncer.held) == 2 and all(k.state is not None for k in syncer.coordinators), "it holds all"
        )


async def sound(w: World) -> None:
    """Assert that heal finds nothing, and that a syncer and a learner go on with every fragment."""
    code, told = await isthmus("heal", w.run.url)
    assert (code, "2 fragments: 2 sound" in told) == (0, True), told
    async with serving(w.syncer("s9")) as syncer, training(w.learner("z")):
        heads = [k.head for k in syncer.coordinators]
        await until(lambda: all(k.head > n for k, n in zip(syncer.coordinators, heads, strict=True)), "they go on")


async def adopted_by_a(w: World, folder: Path) -> int:
    """Return the first fragment's newest version once learner a has an update on it, and a checkpoint that knows it."""
    async with training(w.learner("a", checkpoint_s=0.1)):
        async with serving(w.syncer("s1"), killed=True) as syncer:
            await until(lambda: min(k.head for k in syncer.coordinators) >= 3, "it merges")
        head = (await newest_commit(w, 0)).version
        rest = folder / "updates" / "00000" / "a"
        await until(lambda: any(path.name.startswith(f"{head:012d}-") for path in rest.iterdir()), "a goes on")
        while await settled_to(w) < head:  # noqa: ASYNC110 – only the store knows
            await asyncio.sleep(0.05)
    return head


async def delete_as_told(told: str, lost: int, count: int) -> None:
    """Delete what heal names, which must be so many objects, so that a fragment goes on without its newest version."""
    found = re.search(r", delete (.+?) with .* they go on from version (\d+)", told)
    assert found is not None, told
    assert int(found[2]) == lost - 1
    paths = found[1].split(" and ")
    assert len(paths) == count, told
    for path in paths:
        Path(path).unlink()


async def join_once_told(w: World, folder: Path) -> None:
    """Let learner a join, delete the checkpoints of its own that it names, of which there must be one, and let it join."""
    with pytest.raises(LogCorrupt) as caught:
        await w.learner("a").join()
    named = re.findall(r"learners/a/\d+/checkpoints/[^\s:]+", caught.value.detail)
    assert named
    for key in named:
        (folder / key).unlink()
    await w.learner("a").join()


def delete_named(told: str, folder: Path) -> None:
    """Delete the checkpoints that heal names, of which there must be one."""
    named = re.findall(rf"{re.escape(str(folder))}/learners/a/\d+/checkpoints/\S+", told)
    assert named
    for path in named:
        Path(path).unlink()


async def spoil_update(w: World, folder: Path, version: int = 3) -> Path:
    """Overwrite an update that this version of the first fragment merged; return its path."""
    commit = await w.log.commit(0, version)
    assert commit is not None
    path: Path = folder / commit.header.inputs[0].key
    path.write_bytes(b"gone")
    return path
