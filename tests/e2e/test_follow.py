"""A follower's cuts are what the log folds to, whichever processes die meanwhile."""

import asyncio
import json
import math
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import isthmus
from e2e.test_processes import EXAMPLE, ROOT, commits_of, processes, wait_for
from isthmus.agent.ports import open_log
from isthmus.codecs.kernels import F32
from isthmus.errors import InputError, LayoutMismatch, RunMissing, Unavailable
from isthmus.format.layout import Spec, TensorClass, place
from isthmus.format.rules import Pace, Rules
from isthmus.inspect import follow
from isthmus.log import evaluations, fold, gc
from isthmus.log.run import Run
from isthmus.store import AT_START, Layer, Store
from isthmus_services.main import main
from support.world import World, seed_of, serving, train, until, world

QUICK = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=3)


def exported(run: str, version: int, out: Path) -> dict[str, torch.Tensor]:
    assert main(["export", run, "--version", str(version), "-o", str(out), "--force"]) == 0
    return load_file(out)


def read(what: Callable[..., Awaitable[Any]], run: str, *arguments: object) -> Any:
    async def go() -> Any:
        async with open_log(run) as log:
            return await what(log, *arguments)

    return asyncio.run(go())


def whole(run: Run, version: int, values: Sequence[F32]) -> follow.Cut:
    fragments = range(len(run.layout.fragments))
    return follow.Cut(run, version, dict(enumerate(values)), dict.fromkeys(fragments, version))


def in_folder(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = load_file(file)
        assert not found.keys() & part.keys()
        found |= part
    index = folder / "model.safetensors.index.json"
    if index.exists():
        where = json.loads(index.read_text())["weight_map"]
        assert where.keys() == found.keys()
        assert all(name in load_file(folder / file) for name, file in where.items())
    return found


@pytest.mark.tier("test")
@pytest.mark.timeout(300)
def test_cuts_are_what_the_log_folds_to_through_kills(tmp_path: Path) -> None:
    run, into = str(tmp_path / "run"), tmp_path / "cuts"
    listed = tmp_path / "listed"
    noting = f"{sys.executable} -c {shlex.quote(NOTE)} {listed}"
    with processes(tmp_path) as p:
        syncer = p.isthmus("s", "syncer", run, "--wait")
        start = (sys.executable, str(EXAMPLE), run, "--steps", "500", "--step-seconds", "0.02", "--learner")
        learners = [p.start(name, *start, name) for name in ("a", "b")]
        wait_for((tmp_path / "run" / "run").exists, "a run is there")
        follower = p.isthmus("f", "follow", run, "--into", str(into), "--every", "2", "--keep", "99", "--exec", noting)
        wait_for(lambda: len(list(into.glob("cut-*"))) > 2, "it follows")
        os.kill(syncer.pid, signal.SIGKILL)
        p.isthmus("s2", "syncer", run)
        os.kill(follower.pid, signal.SIGKILL)
        again = follow.newest_in(into)
        p.isthmus("f2", "follow", run, "--into", str(into), "--every", "2", "--keep", "99", "--exec", noting)
        for learner in learners:
            p.ends(learner)
        newest = {
            f: max(c.version for c in commits_of(run) if c.header.fragment == f)
            for f in {c.header.fragment for c in commits_of(run)}
        }
        last = min(newest.values()) // 2 * 2
        wait_for(lambda: follow.newest_in(into) == last, "it has followed to the end")
    found = sorted(int(path.name[4:]) for path in into.glob("cut-*"))
    assert len(found) > 4
    assert all(version % 2 == 0 for version in found)
    assert [v for v in found if v > again], "the second follower continued after the first"
    for version in found:
        wanted = exported(run, version, tmp_path / "export.safetensors")
        cut = in_folder(into / f"cut-{version:06d}")
        assert cut.keys() == wanted.keys()
        assert all(torch.equal(cut[name], wanted[name]) for name in wanted), version
    assert (into / "newest").resolve() == into / f"cut-{found[-1]:06d}"
    said = [line.split() for line in listed.read_text().splitlines()]
    assert [int(version) for version, _ in said] == sorted({int(version) for version, _ in said})
    assert all(folder == str(into / f"cut-{int(version):06d}") for version, folder in said)


NOTE = "import os, sys; open(sys.argv[1], 'a').write(os.environ['ISTHMUS_CUT'] + ' ' + os.environ['ISTHMUS_CUT_DIR'] + '\\n')"


class Counting(Layer):
    """A store that counts reads, and is unavailable while `away` is set."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.read: Counter[str] = Counter()
        self.away = False

    async def _through(self, operation: str, key: str, send: Any) -> Any:
        if self.away:
            raise Unavailable("away")
        self.read[key.split("/", maxsplit=1)[0]] += operation == "get"
        return await send()


async def trained(w: World, rounds: int) -> None:
    """Train until that many rounds of every fragment have been merged."""
    async with serving(w.syncer(pace=QUICK)) as syncer:
        enough = lambda: min(k.head for k in syncer.coordinators) >= rounds  # noqa: E731
        await train(w.learner("a"), 4, enough=enough)


async def folded(w: World, version: int) -> list[F32]:
    carry = fold.PublishedValue(w.log)
    return [(await fold.fold(w.log, f.index, carry, until=version)).carried for f in w.run.layout.fragments]


async def test_no_more_is_fetched_than_has_changed(tmp_path: Path) -> None:
    seen: list[Counting] = []
    async with world(tmp_path / "run", seed_of(Rules(fragments=3, sync_every=2))) as w:
        await trained(w, 4)
        through = w.through(lambda store: seen.append(Counting(store)) or seen[-1])  # type: ignore[func-returns-value]
        follower = follow.CutFollower(through.log)
        head = await follower.head(1)
        assert head >= 4
        first = await follower.cut(2)
        for version, cut in ((2, first), (4, await follower.cut(4))):
            assert all(np.array_equal(a, b) for a, b in zip(cut.values.values(), await folded(w, version), strict=True))
        before = seen[0].read.copy()
        await follower.cut(4)
        assert seen[0].read["values"] == before["values"], "the follower has the values"
        await trained(w, head + 2)
        more = await follower.head(head + 1)
        assert more > head
        before = seen[0].read.copy()
        cut = await follower.cut(head + 1)
        assert seen[0].read["values"] - before["values"] == 3 * (head + 1 - 4), "each newer value is read once"
        assert seen[0].read["snapshots"] == before["snapshots"]
        assert all(np.array_equal(a, b) for a, b in zip(cut.values.values(), await folded(w, head + 1), strict=True))


async def test_what_was_collected_meanwhile_is_followed_from_a_snapshot(tmp_path: Path) -> None:
    async with world(tmp_path / "run", seed_of(Rules(fragments=2, sync_every=2))) as w:
        await trained(w, 2)
        follower = follow.CutFollower(w.log)
        await follower.head(1)
        await follower.cut(1)
        await trained(w, 12)
        await asyncio.to_thread(main, ["gc", str(tmp_path / "run"), "--keep", "1", "--min-age", "0", "--apply"])
        head = await follower.head(100)
        cut = await follower.cut(head)
        assert all(np.array_equal(a, b) for a, b in zip(cut.values.values(), await folded(w, head), strict=True))


async def test_an_outage_is_waited_for_and_versions_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(follow, "LOOK_S", 0.02)
    seen: list[Counting] = []
    async with world(tmp_path / "run", seed_of(Rules(fragments=2, sync_every=2))) as w:
        away = lambda store: seen.append(Counting(store)) or seen[-1]  # type: ignore[func-returns-value]  # noqa: E731
        through = w.through(away, AT_START)
        cuts = follow.cuts(through.log, w.runtime, every=3)
        assert (await anext(cuts)).number == 0
        await trained(w, 7)
        head = min(c.version for c in [await w.log.newest(p) for p in range(2)] if c)
        seen[0].away = True
        found = asyncio.ensure_future(anext(cuts))
        await until(lambda: "the run cannot be followed for now: away" in caplog.text, "it says so")
        assert not found.done()
        seen[0].away = False
        assert (await found).number == head // 3 * 3 >= 6
        assert "the run is followed again" in caplog.text
        await cuts.aclose()  # type: ignore[attr-defined]


def test_a_folder_holds_whole_cuts_in_files_as_large_as_asked(tmp_path: Path) -> None:
    async def go() -> None:
        async with world(tmp_path / "run", seed_of(Rules(fragments=3))) as w:
            values = await folded(w, 0)
            into = tmp_path / "cuts"
            (into / ".cut-000004.new").mkdir(parents=True)
            (into / ".cut-000004.new" / "half").write_text("of one that was killed")
            for version in (1, 2, 3, 4):
                path = follow.store(whole(w.run, version, values), into, dtype="bfloat16", largest=1500, keep=2)
            assert sorted(p.name for p in into.iterdir()) == ["cut-000003", "cut-000004", "newest"]
            assert follow.newest_in(into) == 4
            files = sorted(p.name for p in path.glob("*.safetensors"))
            assert len(files) > 1
            assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
            tensors = in_folder(path)
            assert {x.dtype for x in tensors.values()} == {torch.bfloat16}
            for fragment, flat in zip(w.run.layout.fragments, values, strict=True):
                for t in fragment.tensors:
                    wanted = torch.from_numpy(flat[t.start : t.stop].copy()).bfloat16().reshape(-1)
                    assert torch.equal(tensors[t.spec.name].reshape(-1)[t.origin : t.origin + t.size], wanted)

    asyncio.run(go())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((), "--into DIR, --exec CMD, or both"), (("--exec", ""), "--exec is empty: give a command")],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["follow", str(tmp_path), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_model_is_loaded_from_a_cut_as_from_pretrained_does(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    import isthmus

    config = GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(3)
    model = GPT2LMHeadModel(config)
    run, into = str(tmp_path / "run"), tmp_path / "cuts"
    isthmus.join(
        run, model, torch.optim.SGD(model.parameters(), lr=0.1), learner="a", create=Rules(fragments=2)
    ).close()
    assert main(["follow", run, "--into", str(into), "--largest", "6e-6", "--cuts", "1"]) == 0
    config.save_pretrained(into / "newest")
    assert (into / "newest" / "model.safetensors.index.json").exists()
    again = GPT2LMHeadModel.from_pretrained(into / "newest")
    for (name, mine), (_, theirs) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


async def test_the_newest_is_looked_for_of_every_fragment(tmp_path: Path) -> None:
    """A fragment that was already seen at the wanted version is looked up again, because it may have advanced."""
    async with world(tmp_path / "run", seed_of(Rules(fragments=3, sync_every=2))) as w:
        await trained(w, 6)
        newest = min([c.version for c in [await w.log.newest(p) for p in range(3)] if c])
        follower = follow.CutFollower(w.log)
        follower._seen = {0: 3, 1: 2, 2: 2}
        assert await follower.head(3) == newest > 3


def test_a_cut_that_nothing_points_to_was_not_finished(tmp_path: Path) -> None:
    (tmp_path / "cut-000002").mkdir()
    assert follow.newest_in(tmp_path) == -1
    (tmp_path / "newest").symlink_to("cut-000001")
    assert follow.newest_in(tmp_path) == 1


def test_cuts_go_by_their_numbers(tmp_path: Path) -> None:
    async def go() -> None:
        async with world(tmp_path / "run") as w:
            values = await folded(w, 0)
            for version in (999_999, 1_000_000):
                follow.store(whole(w.run, version, values), tmp_path / "c", dtype=None, largest=1 << 30, keep=1)
            assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["cut-1000000", "newest"]

    asyncio.run(go())


class Two(torch.nn.Module):
    """A model with the tensors of a run that `seed_of` creates, in a given dtype."""

    def __init__(self, names: Sequence[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in names:
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))


async def test_a_module_is_brought_up_to_date_where_its_owner_says_so(tmp_path: Path) -> None:
    async with world(tmp_path / "run", seed_of(Rules(fragments=3, sync_every=2))) as w:
        specs = [(spec.name, spec.shape) for spec in w.run.layout.specs]
        module = Two(specs, torch.bfloat16)
        following = isthmus.follow(str(tmp_path / "run"), module)
        assert await asyncio.to_thread(following.update, 60.0)
        first = following.cut
        assert not following.update(), "there is no newer cut"
        await trained(w, 4)
        await until(lambda: following._brought is not None and following._brought.number > first, "it has come")
        before = module.get_parameter(specs[0][0]).clone()
        assert torch.equal(module.get_parameter(specs[0][0]), before), "the module changes only in update()"
        assert following.update()
        values = await folded(w, following.cut)
        for fragment, flat in zip(w.run.layout.fragments, values, strict=True):
            for t in fragment.tensors:
                held = module.get_parameter(t.spec.name).reshape(-1)[t.origin : t.origin + t.size]
                assert torch.equal(held, torch.from_numpy(flat[t.start : t.stop].copy()).bfloat16())
        await asyncio.to_thread(following.note, "loss", 2.5)
        following.close()
        assert [(p.cut, p.value) for p in (await evaluations.series(w.log, "loss")).points] == [(following.cut, 2.5)]


def _so_many(seen: Sequence[object], number: int) -> bool:
    return len(seen) >= number


async def test_a_function_gets_cuts_and_what_it_returns_is_kept(tmp_path: Path) -> None:
    async with world(tmp_path / "run", seed_of(Rules(fragments=2, sync_every=2))) as w:
        seen: list[follow.Cut] = []

        def judge(cut: follow.Cut) -> dict[str, float]:
            seen.append(cut)
            if len(seen) == 3:
                raise RuntimeError("no more")
            return {"sum": float(sum(x.sum() for x in cut.tensors().values())), "bad": 1.0}

        with pytest.raises(RuntimeError, match="no more"), isthmus.follow(str(tmp_path / "run"), judge) as following:
            for number in (1, 2):
                await until(partial(_so_many, seen, number), "a cut has come")
                await trained(w, 3 * number)
            await asyncio.to_thread(following.wait, 60.0)
        points = (await evaluations.series(w.log, "sum")).points
        assert [p.cut for p in points] == [cut.number for cut in seen[:2]]
        values = await folded(w, seen[1].number)
        assert points[1].value == pytest.approx(float(sum(flat.sum() for flat in values)), rel=1e-5)
        assert await evaluations.names(w.log) == ["bad", "sum"]
        assert len((await evaluations.series(w.log, "sum", 1)).points) == 1
        with pytest.raises(InputError, match="sum of cut 3 is nan"):
            await evaluations.note(w.log, "sum", 3, math.nan)
        await evaluations.note(w.log, "sum", points[0].cut, 7.0)
        assert (await evaluations.series(w.log, "sum")).points[0].value == 7.0, "the later value counts"
        doomed = (await gc.plan(w.log, min_age_s=0.0, keep=1)).doomed
        assert not any(e.key.startswith("evaluations/") for entries in doomed.values() for e in entries)


def test_a_module_of_another_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    async def made() -> list[tuple[str, tuple[int, ...]]]:
        async with world(tmp_path / "run", seed_of(Rules(fragments=2))) as w:
            return [(spec.name, spec.shape) for spec in w.run.layout.specs]

    specs = asyncio.run(made())
    for wrong, words in (
        (specs[1:], "of the run is not in the module"),
        ([(specs[0][0], (1, 1)), *specs[1:]], "has shape"),
        ([*specs, ("more", (2,))], "parameter 'more' of the module is not in the run"),
    ):
        module = Two(wrong, torch.float32)
        following = isthmus.follow(str(tmp_path / "run"), module)
        with pytest.raises(LayoutMismatch, match=words):
            following.update(60.0)
        assert not any(p.any() for p in module.parameters())
        following.close()
    with pytest.raises(RunMissing), isthmus.follow(str(tmp_path / "none"), Two(specs, torch.float32)) as following:
        following.update(60.0)


async def test_some_fragments_or_a_mixture_are_followed_where_that_is_asked_for(tmp_path: Path) -> None:
    async with world(tmp_path / "run", seed_of(Rules(fragments=3, sync_every=2))) as w:
        await trained(w, 6)
        heads = {p: c.version if (c := await w.log.newest(p)) else 0 for p in range(3)}
        some = await anext(follow.cuts(w.log, w.runtime, fragments=[2, 0]))
        assert (some.number, set(some.values)) == (min(heads[0], heads[2]), {0, 2})
        mixed = await anext(follow.cuts(w.log, w.runtime, mixed=True))
        assert (mixed.number, dict(mixed.versions)) == (sum(heads.values()), heads)
        for p, version in heads.items():
            # By itself: another fragment may not have this version yet.
            there = await fold.fold(w.log, p, fold.PublishedValue(w.log), until=version)
            assert np.array_equal(mixed.values[p], there.carried)
        names = {t.spec.name for p in (0, 2) for t in w.run.layout.fragments[p].tensors}
        if not any(t.rows for f in w.run.layout.fragments for t in f.tensors):
            assert some.tensors().keys() == names
            path = follow.store(some, tmp_path / "cuts", dtype=None, largest=1 << 30, keep=1)
            assert in_folder(path).keys() == names
        with pytest.raises(InputError, match=r"fragments \[3\]: the run has 0 to 2"):
            await anext(follow.cuts(w.log, w.runtime, fragments=[3]))


def test_part_of_a_tensor_is_not_written_as_the_whole(tmp_path: Path) -> None:
    specs = [Spec("table", (4, 2), "float32", TensorClass.DENSE)]
    layout = place(specs, [((0, 1), (1, 3))])
    run = Run("run", bytes(32), None, layout, {})  # type: ignore[arg-type]
    one = follow.Cut(run, 1, {0: np.ones(2, np.float32)}, {0: 1})
    with pytest.raises(InputError, match="tensor 'table' lies in the fragments 0, 1: ask for all of them, or for none"):
        one.tensors()
    both = follow.Cut(run, 1, {0: np.ones(2, np.float32), 1: np.zeros(6, np.float32)}, {0: 1, 1: 1})
    assert both.tensors()["table"].tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


def test_what_a_command_prints_last_is_a_point_that_status_shows_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(tmp_path / "run")
    assert main(["init", run]) == 0
    measure = f"{sys.executable} -c 'print(\"so good\"); print(1.25)'"
    assert main(["follow", run, "--exec", measure, "--series", "held-out", "--cuts", "1"]) == 0
    assert main(["follow", run, "--exec", "true", "--series", "held-out", "--cuts", "1"]) == 1, "nothing was stored"
    assert "no measurement of cut 0 for --series held-out: the last word that true printed" in capsys.readouterr().out
    monkeypatch.setenv("ISTHMUS_HEARTBEAT", "0.1")
    picture, report = tmp_path / "loss.png", tmp_path / "status.json"
    assert main(["status", run, "--plot", str(picture), "--json", str(report)]) == 0
    assert "measured, held-out: 1.25 at version 0" in capsys.readouterr().out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert [point[:2] for point in json.loads(report.read_text())["measured"]["held-out"]] == [[0, 1.25]]
    assert main(["follow", run, "--into", str(tmp_path / "c"), "--series", "x"]) == 2
    assert "add --exec CMD" in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_the_examples_serve_and_judge_what_two_trainers_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, examples = str(tmp_path / "run"), ROOT / "examples"
    monkeypatch.syspath_prepend(str(examples))
    assert main(["init", run, "--model", "trainer:make_model", "--fragments", "3", "--sync-every", "6"]) == 0
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run)
        judge = p.start("j", sys.executable, str(examples / "evaluate_versions.py"), run, "--until", "8")
        server = p.start("v", sys.executable, str(examples / "serve_newest.py"), run, "--requests", "12")
        wait_for(lambda: "version 0" in p.said("j"), "the first version is judged")
        start = (sys.executable, str(examples / "trainer.py"), run, "--steps", "100", "--learner")
        for process in (*[p.start(name, *start, name) for name in ("a", "b")], judge, server):
            p.ends(process)
        answers = [line for line in p.said("v").splitlines() if line.startswith("request")]
    assert len(answers) == 12
    points = read(evaluations.series, run, "held-out").points
    assert points[0].value > 3.0 > 1.0 > points[-1].value, "an untrained model's loss is log(61), which is 4.1"
    assert points[-1].cut >= 8
