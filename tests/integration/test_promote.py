"""The gate: evaluators store numbers, a promoter promotes, and followers of promoted versions see nothing else."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

import isthmus
from isthmus.bus import default_bus, open_bus
from isthmus.errors import InputError
from isthmus.format.records.keys import promotion_key, version_in
from isthmus.format.signing.keys import write_signer
from isthmus.inspect import follow
from isthmus.inspect.audit import audit
from isthmus.inspect.replay import replay
from isthmus.log import evaluations, fold, gc, promotions
from isthmus.log.log_health import look
from isthmus.log.run import read_run
from isthmus.runtime.clock import single_threaded
from isthmus.store import open_store
from isthmus_services.main import main
from support.boards import a_board, ask
from support.gated import EVA, EVB, EVC, PRO, RULE, agree, commit, gated, log_of, number, promotion
from support.signed import COLLECTOR, EU, EVIL, OWNER, RULES, SYNC, US, seed
from support.world import World, in_virtual_time, serving, train, until, world

SEED = seed(msgspec.structs.replace(RULES, fragments=2), snapshot_every=3)


async def trained(w: World, versions: int) -> int:
    """Let two learners train until each fragment has so many versions; return the newest that all have."""
    async with serving(w.by(SYNC).syncer("s-1")) as syncer:

        def enough() -> bool:
            return min(k.head for k in syncer.coordinators) >= versions

        agents = w.by(EU).learner("eu"), w.by(US).learner("us-1")
        await asyncio.gather(*(train(agent, 40, enough=enough) for agent in agents))
    return min(k.head for k in syncer.coordinators)  # the syncer may have committed once more as it stopped


async def passed(w: World, version: int, value: float) -> None:
    """Store numbers of two evaluators for a version, and promote it."""
    known = await promotion(w, version, [await number(w, by, version, value) for by in ("eva", "evb")])
    assert known.last is not None
    assert known.last.version == version


# --- commands ---------------------------------------------------------------------------------------------------------


class Team:
    """The keys of a run's people in files, and commands as they give them."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.run, self.folder, self._capsys = str(tmp_path / "run"), tmp_path, capsys
        for name, signer in {"eva": EVA, "evb": EVB, "evc": EVC, "pro": PRO, "evil": EVIL, "owner": OWNER}.items():
            write_signer(tmp_path / name, signer, name)

    def told(self, *argv: str, code: int = 0) -> str:
        """Run a command; return all that it printed."""
        command, *rest = argv
        self._capsys.readouterr()
        assert main([command, self.run, *rest]) == code, self._capsys.readouterr()
        out, err = self._capsys.readouterr()
        return out + err

    def measures(self, name: str, value: float, code: int = 0) -> str:
        """Measure the newest cut by `isthmus follow`."""
        key = str(self.folder / name)
        command = "follow", "--exec", f"echo {value}", "--series", "loss", "--cuts", "1", "--name", name, "--key", key
        return self.told(*command, code=code)

    def promotes(self, *argv: str, code: int = 0) -> str:
        return self.told("promote", "--name", "pro", "--key", str(self.folder / "pro"), *argv, code=code)

    def grows(self, versions: int) -> int:
        """Train until each fragment has so many more versions; return the newest that all have."""

        async def go() -> int:
            async with open_world(self.run) as w:
                head = min([(c.version if (c := await w.log.newest(p)) else 0) for p in range(2)])
                return await trained(w, head + versions)

        return asyncio.run(go())


def test_a_cut_is_promoted_by_commands_or_they_say_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    team = Team(tmp_path, capsys)

    async def made() -> int:
        async with world(tmp_path / "run", SEED) as w:
            await gated(w)
            return await trained(w, 3)

    first = asyncio.run(made())
    # Nothing is measured, and nothing promoted.
    assert "no version has been promoted yet" in team.told("export", "--promoted", "-o", str(tmp_path / "x"), code=2)
    assert "no version has numbers of 2 evaluators in the series loss" in team.promotes(code=1)
    assert "add --name NAME" in team.told(
        "follow", "--exec", "echo 1", "--series", "loss", "--key", str(tmp_path / "eva"), code=2
    )
    said = team.told(
        "follow", "--exec", "echo 1", "--series", "loss", "--name", "eva", "--key", str(tmp_path / "evil"), code=2
    )
    assert "does not name eva with the key" in said
    team.measures("eva", 2.0)
    team.measures("eva", 2.0)
    team.measures("eva", 1.0, code=1)  # it is not stored: with two numbers, none would count
    said = team.promotes(code=1)
    assert f"version {first} has those of eva, and 1 more must come from evb, evc" in said
    team.measures("evb", 2.2)
    assert "eva is no promoter" in team.told("promote", "--name", "eva", "--key", str(tmp_path / "eva"), code=2)
    assert "name the promoter: --name NAME" in team.told("promote", code=2)
    said = team.promotes("--json", str(tmp_path / "p.json"))
    assert f"promoted: version {first} of {team.run}, as promotion 1, by pro: loss eva 2, evb 2.2" in said
    assert json.loads((tmp_path / "p.json").read_text())["promoted"]["values"] == {"eva": 2.0, "evb": 2.2}
    assert f"version {first} is promoted already: promotion 1, by pro" in team.promotes("--version", str(first))
    team.told("export", "--promoted", "-o", str(tmp_path / "p.safetensors"))
    team.told("export", "--version", str(first), "-o", str(tmp_path / "v.safetensors"))
    assert same(tmp_path / "p.safetensors", tmp_path / "v.safetensors")
    assert "leave out --at" in team.told("export", "--promoted", "--at", "0", "-o", str(tmp_path / "x"), code=2)

    # A worse cut does not pass, and nobody is given it.
    second = team.grows(2)
    team.measures("eva", 2.05)
    team.measures("evb", 2.5)
    said = team.promotes(code=1)
    assert f"not promoted: version {second} has 1 of the 2 numbers that the charter asks for" in said
    worse = f"worse than 2.2, its number at promotion 1 (version {first}), by more than the tolerance of 0.1"
    assert f"evb's number 2.5 is {worse} (lower is better)" in said
    assert "evc has no number for it" in said
    not_promoted = team.told("export", "--promoted", "--version", str(second), "-o", str(tmp_path / "x"), code=2)
    assert f"version {second} is not promoted; the newest promoted versions are: {first}" in not_promoted
    assert f"cut {first} of" in team.told("follow", "--promoted", "--into", str(tmp_path / "cuts"), "--cuts", "1")

    # The run goes on, and a later cut passes.
    third = team.grows(2)
    for name, value in (("eva", 1.9), ("evb", 1.8), ("evc", 7.0)):
        team.measures(name, value)
    said = team.promotes()
    assert f"promoted: version {third}" in said
    assert "not counted: evc's number 7 is worse than" in said
    assert f"cut {third} of" in team.told("follow", "--promoted", "--into", str(tmp_path / "cuts"), "--cuts", "1")
    assert sorted(path.name for path in (tmp_path / "cuts").glob("cut-*")) == [f"cut-{v:06d}" for v in (first, third)]
    (wrong := tmp_path / "run" / promotion_key(3)).write_bytes(b"junk")
    said = team.told("promote", "--list", "--json", str(tmp_path / "list.json"))
    wrong.unlink()
    assert f"the newest promoted version is: version {third} (promotion 2)" in said
    assert "promotion 2 does not rest on: evc 7\n" in said
    assert "promotion 1 does not rest on" not in said
    listed = json.loads((tmp_path / "list.json").read_text())["promotions"]
    assert [(p["number"], p["version"], p["holds"], p["left_out"]) for p in listed] == [
        (1, first, True, {}),
        (2, third, True, {"evc": [7.0]}),
        (3, None, False, {}),
    ]
    assert "older than version" in team.promotes("--version", str(second), code=1)
    assert "not every fragment has it yet" in team.promotes("--version", "999", code=2)


def test_a_folder_with_another_cut_is_not_taken_for_promoted_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    team = Team(tmp_path, capsys)

    async def made() -> None:
        async with world(tmp_path / "run", SEED) as w:
            await gated(w)
            await passed(w, 0, 2.0)
            await trained(w, 2)

    asyncio.run(made())
    into = "--into", str(tmp_path / "cuts"), "--cuts", "1"
    team.told("follow", *into)
    assert "which is not known to be promoted: choose another folder" in team.told(
        "follow", "--promoted", *into, code=2
    )
    assert "leave out --mixed and --every" in team.told("follow", "--promoted", "--mixed", *into, code=2)
    assert "this run has no charter with a gate" not in team.promotes(code=1)


def test_without_a_gate_nothing_can_be_promoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    team = Team(tmp_path, capsys)

    async def made() -> None:
        async with world(tmp_path / "run", SEED) as w:
            await gated(w, None)

    asyncio.run(made())
    assert "this run has no charter with a gate (isthmus charter propose)" in team.promotes(code=2)
    team.told("follow", "--exec", "echo 1", "--series", "loss", "--key", str(tmp_path / "eva"), "--cuts", "1")


def same(one: Path, other: Path) -> bool:
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@asynccontextmanager
async def open_world(run: str) -> AsyncIterator[World]:
    """Open the run in a folder again, as new processes do."""
    runtime = single_threaded(0)
    async with open_store(run, runtime) as store:
        found, bus = await read_run(store), default_bus(run)
        assert bus is not None
        async with open_bus(bus, found.digest, None) as opened:
            yield World(found, store, opened, runtime)


# --- followers --------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_follower_is_given_promoted_cuts_and_nothing_else(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(folder, SEED) as w:
        await gated(w)
        seen: list[follow.Cut] = []

        async def follows() -> None:
            async for cut in follow.cuts(await log_of(w), w.runtime, promoted=True):
                seen.append(cut)

        following = asyncio.ensure_future(follows())
        first = await trained(w, 3)
        await passed(w, first, 2.0)
        await until(lambda: seen, "the promoted cut has come")
        second = await trained(w, first + 2)
        with caplog.at_level(logging.WARNING, "isthmus.inspect.follow"):
            await promotion(w, second, [await number(w, by, second, 2.5) for by in ("eva", "evb")])
            await asyncio.sleep(10 * follow.LOOK_S)
        assert [r.getMessage() for r in caplog.records if r.name == "isthmus.inspect.follow"] == [
            f"{promotion_key(2)} does not hold, and its version is not given out: eva's number 2.5 is worse than 2, its "
            f"number at promotion 1 (version {first}), by more than the tolerance of 0.1 (lower is better); isthmus promote "
            f"{w.run.url} --list names its author"
        ]
        assert [cut.number for cut in seen] == [first]
        third = await trained(w, second + 1)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "isthmus.inspect.follow"):
            evidence = [await number(w, by, third, 1.5) for by in ("eva", "evb")]
            await number(w, "eva", third, 1.25, written_at=1.9e9)
            await promotion(w, third, evidence)
            await until(lambda: len(seen) > 1, "the next promoted cut has come")
        assert [r.getMessage() for r in caplog.records if r.name == "isthmus.inspect.follow"] == [
            f"promotion 3 rests on eva's number 1.5 for version {third}; eva has stored other numbers for it, too: 1.25; "
            "ask eva which is right"
        ]
        assert [cut.number for cut in seen] == [first, third]
        for cut in seen:
            in_log = await promotions.cut_in_log(w.log, cut.number)
            assert in_log is not None
            assert cut.published == in_log.published
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@in_virtual_time
async def test_numbers_are_of_whole_cuts_under_a_members_name(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with world(folder, SEED) as w:
        await gated(w)
        version = await trained(w, 2)
        log = await log_of(w, EVA)
        whole = await follow.CutFollower(log).cut(version)
        part = await follow.CutFollower(log, [0]).cut(version)
        assert part.published is None
        for cut in (whole, part):
            await evaluations.note(log, "loss", version, 2.0, by="eva", published=cut.published)
        numbers = await promotions.measured(log, RULE)
        assert [m.header.published for m in numbers[version]["eva"]] == [whole.published]
        with caplog.at_level(logging.WARNING, "isthmus.log.evaluations"):
            for value in (2.0, 1.5):
                await evaluations.note(log, "loss", version, value, by="eva", published=whole.published)
        assert len((await promotions.measured(log, RULE))[version]["eva"]) == 1, "with two, none would count"
        assert [r.getMessage() for r in caplog.records if r.name == "isthmus.log.evaluations"] == [
            f"loss of cut {version} is not stored as 1.5: eva has stored 2 for it before, and if an evaluator's numbers for "
            "one version differ, none of them counts; measure a later version"
        ]
        for signer, name in ((EVA, "eva"), (EU, "eu")):
            promotions.require_named(log.members, signer, name)  # a learner may measure, too
        for other, called in ((EVA, None), (EVB, "eva"), (EVIL, "evil"), (None, "eva")):
            with pytest.raises(InputError):
                promotions.require_named(log.members, other, called)


async def test_different_numbers_of_one_evaluator_are_shown_nowhere_as_the_measurement(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world(folder, SEED) as w:
        await gated(w)
        for by, value in (("eva", 2.0), ("evb", 3.0)):
            await number(w, by, 0, value)
        await commit(w, 1)
        await number(w, "eva", 1, 2.5)
        await number(w, "eva", 1, 1.5, written_at=1.9e9)
        log = await log_of(w, EVA)
        assert not await evaluations.note(log, "loss", 1, 2.5, by="eva", published=(await published_at(w, 1))), (
            "it is stored, and it does not count"
        )
        series = await evaluations.series(log, "loss")
        contested = evaluations.Contested(1, "eva", (1.5, 2.5))
        assert ([p.cut for p in series.points], series.contested) == ([0], [contested])
        async with a_board(log) as (url, _):
            shown = await ask(url, "measured")
        assert [p[1:] for p in shown["series"]["loss"]] == [[0, series.points[0].value]]
        assert shown["contested"] == {"loss": [str(contested)]}
        found = await audit(log)
        assert [(n.version, n.value, n.contested) for n in found.numbers] == [
            (0, 2.0, False), (0, 3.0, False), (1, 2.5, True), (1, 1.5, True)
        ]  # fmt: skip
        assert "contested: the different numbers of eva for version 1" in found.headline.remarks
        report = tmp_path / "status.json"
        words = ["status", str(folder), "--json", str(report)]
        assert await asyncio.to_thread(main, words) == 0
        out = capsys.readouterr().out
        assert f"at version 0; {contested}\n" in out
        assert "contested at version 1: eva has stored 1.5, 2.5 for it, and none of them counts" in out
        assert [point[0] for point in json.loads(report.read_text())["measured"]["loss"]] == [0]
        await number(w, "evb", 1, 3.5)
        series = await evaluations.series(log, "loss")
        assert [(p.cut, p.value) for p in series.points][1:] == [(1, 3.5)], "another evaluator's number counts"


async def published_at(w: World, version: int) -> bytes:
    cut = await promotions.cut_in_log(w.log, version)
    assert cut is not None
    return cut.published


async def test_a_function_is_given_promoted_cuts_and_its_numbers_name_the_member(tmp_path: Path) -> None:
    async with world(tmp_path / "run", SEED) as w:
        await gated(w)
        await passed(w, 0, 2.0)
        run, seen = str(tmp_path / "run"), list[int]()

        def judge(cut: follow.Cut) -> dict[str, float]:
            seen.append(cut.number)
            return {"loss": 1.5}

        with pytest.raises(InputError, match="leave out every and mixed"):
            isthmus.follow(run, judge, promoted=True, every=2)
        with pytest.raises(InputError, match=r"add --name NAME \(name=… in Python\)"):
            isthmus.follow(run, judge, key=EVC).wait(60.0)
        seen.clear()
        await commit(w, 1)
        with isthmus.follow(run, judge, promoted=True, name="evc", key=EVC) as following:
            await until(lambda: following.cut == 0, "it was measured")
        assert seen == [0], "version 1 is not promoted"
        assert (await promotions.measured(await log_of(w), RULE))[0]["evc"][0].header.value == 1.5


# --- garbage collection -----------------------------------------------------------------------------------------------


@in_virtual_time
async def test_what_the_newest_promoted_version_is_folded_from_is_kept(folder: Path) -> None:
    """Whatever is collected beside it: followers can begin with it, and the next promotion frees it."""
    async with world(folder, SEED) as w:
        await gated(w)
        first = await trained(w, 5)
        await passed(w, first, 2.0)
        wanted = (await follow.CutFollower(await log_of(w)).cut(first)).values
        last = await trained(w, first + 12)
        collector = await log_of(w, COLLECTOR)
        for _ in range(2):  # the second collection finds the commits packed
            plan = await gc.plan(collector, keep=1, min_age_s=0.0)
            assert plan.promoted == first
            assert min(plan.starts) > first + 2
            await gc.apply(collector, plan)
        found = await follow.CutFollower(await log_of(w)).cut(first)
        assert all(np.array_equal(found.values[p], wanted[p]) for p in wanted)
        values = [version_in(entry.key) for entry in await w.store.list("values/00000/")]
        assert [v for v in values if first < v < plan.starts[0]] == [], "nothing between the two is kept"
        assert not (await look(await log_of(w))).wrong
        assert all(one.difference is None and not one.gaps for one in await replay(await log_of(w)))
        await passed(w, last, 1.0)
        plan = await gc.plan(collector, keep=1, min_age_s=0.0)
        assert plan.promoted == last
        await gc.apply(collector, plan)
        snapshots = [version_in(entry.key) for entry in await w.store.list("snapshots/00000/")]
        assert [v for v in snapshots if 0 < v < plan.starts[0]] == []


@in_virtual_time
async def test_gc_keeps_the_last_promotion_that_holds(folder: Path) -> None:
    """A promoter who may not, or a rule that has changed, frees nothing that followers read."""
    async with world(folder, SEED) as w:
        await gated(w)
        first = await trained(w, 4)
        await passed(w, first, 2.0)
        last = await trained(w, first + 8)
        await promotion(w, last, [await number(w, by, last, 9.0) for by in ("eva", "evb")])
        await agree(w, None, heads=[last] * 2)
        collector = await log_of(w, COLLECTOR)
        plan = await gc.plan(collector, keep=1, min_age_s=0.0)
        assert plan.promoted == first
        await gc.apply(collector, plan)
        at = await fold.fold(await log_of(w), 0, fold.PublishedValue(w.log), until=first)
        assert at.version == first
