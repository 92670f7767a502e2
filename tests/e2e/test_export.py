"""`isthmus export` replaces no file unasked, creates no folder, and tells a collected version from a damaged one."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from isthmus.agent.ports import open_log
from isthmus.format.records.objects import Input
from isthmus.format.rules import Pace, Rules
from isthmus.log import gc
from isthmus.log.gc import Garbage
from isthmus_services.main import main
from support.world import seed_of, serving, train, world

PACE = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=2)


@pytest.fixture
def run(folder: Path) -> tuple[str, Garbage]:
    """Create a run of two fragments with several versions, of which `gc` has left the newest."""

    async def body() -> Garbage:
        async with world(folder, seed_of(Rules(fragments=2, sync_every=2), PACE)) as w:
            async with serving(w.syncer("s1")) as syncer:
                await train(w.learner("a"), 20, enough=lambda: min(k.head for k in syncer.coordinators) >= 8)
            plan = await gc.plan(w.log, keep=2, min_age_s=-60.0)
            await gc.apply(w.log, plan)
            return plan

    return str(folder), asyncio.run(body())


def said_by(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main([*words])
    captured = capsys.readouterr()
    return code, captured.err.strip() or captured.out.strip()


def test_a_file_that_is_there_is_replaced_only_with_force(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(folder)]) == 0
    out = tmp_path / "m.safetensors"
    out.write_text("ten years")
    capsys.readouterr()
    code, said = said_by(capsys, "export", str(folder), "-o", str(out))
    assert (code, said) == (2, f"isthmus export: -o {out} exists already: use --force to replace it")
    assert out.read_text() == "ten years"
    assert main(["export", str(folder), "-o", str(out), "--force"]) == 0
    assert out.stat().st_size > 1000
    assert [p.name for p in tmp_path.iterdir() if "safetensors" in p.name] == [out.name], "no partial file is left"


@pytest.mark.tier("test")
def test_whoever_may_read_new_files_may_read_an_exported_model(folder: Path, tmp_path: Path) -> None:
    net = ("--model", "integration.test_global_buffers:net")
    assert main(["init", str(folder), *net]) == 0
    before = os.umask(0o027)
    try:
        assert main(["export", str(folder), "-o", str(tmp_path / "m.safetensors")]) == 0
        assert main(["export", str(folder), "--hf", str(tmp_path / "weights")]) == 0
        assert main(["export", str(folder), "--hf", str(tmp_path / "module"), *net]) == 0
    finally:
        os.umask(before)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and folder not in path.parents)
    assert [path.name for path in files] == ["m.safetensors", "model.safetensors", "model.safetensors"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}


def test_no_folder_is_made_up(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(folder)]) == 0
    capsys.readouterr()
    code, said = said_by(capsys, "export", str(folder), "-o", str(tmp_path / "no" / "m.safetensors"))
    assert code == 2
    assert said.endswith(f"there is no folder {tmp_path}/no")
    assert not (tmp_path / "no").exists()
    code, said = said_by(capsys, "export", str(folder), "-o", str(tmp_path))
    assert said == f"isthmus export: -o {tmp_path} is a folder: name a file"


def test_a_time_before_the_run_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(folder)]) == 0
    capsys.readouterr()
    code, said = said_by(capsys, "export", str(folder), "-o", str(tmp_path / "m"), "--at", "2020-01-01")
    assert code == 2
    assert "there was no model then: the run began at 20" in said
    assert not (tmp_path / "m").exists()
    code, said = said_by(capsys, "export", str(folder), "-o", str(tmp_path / "m"), "--at", "9e9")
    assert code == 0
    assert said.endswith("at version 0, the initial model")


def test_a_version_that_was_collected_is_told_from_a_damaged_one(
    run: tuple[str, Garbage], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, plan = run
    first, out = max(plan.starts), str(tmp_path / "m")
    assert first > 2
    code, said = said_by(capsys, "export", url, "-o", out, "--version", "2")
    assert code == 2, "this is an input error, not a failed check"
    assert "version 2 of fragment" in said
    assert "was collected by `isthmus gc`: versions kept are" in said
    assert "missing" not in said
    assert main(["export", url, "-o", out, "--version", str(first)]) == 0
    assert main(["export", url, "-o", out, "--version", "0", "--force"]) == 0

    async def damage() -> int:
        async with open_log(url) as log:
            commit = await log.newest(0)
            assert commit is not None
            head = commit.version
            await log.store.delete(commit.header.value_key)
            for version, key in await log.snapshots(0):
                if version == head:
                    await log.store.delete(key)
            return head

    head = asyncio.run(damage())
    capsys.readouterr()
    code, said = said_by(capsys, "export", url, "-o", out, "--force")
    assert code == 1, said
    assert f"is missing, and version {head} published it" in said
    assert "collected" not in said


def test_explain_and_replay_know_what_was_collected(
    run: tuple[str, Garbage], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, plan = run

    async def merged() -> list[tuple[int, bool, Input]]:
        async with open_log(url) as log:
            return [(c.version, c.in_segment, c.header.inputs[0]) async for c in log.commits(0, 0)]

    commits = asyncio.run(merged())
    version, _, given = next(c for c in commits if c[1])
    assert main(["explain", url, given.key]) == 0
    assert f"collected by `isthmus gc`, which has packed version {version}" in capsys.readouterr().out
    newest, packed, given = commits[-1]
    assert not packed

    async def lose() -> None:
        async with open_log(url) as log:
            await log.store.delete(given.key)

    asyncio.run(lose())
    assert main(["explain", url, given.key]) == 0
    said = capsys.readouterr().out
    assert f"missing, though version {newest} merged it and `isthmus gc` has not passed it: damage" in said
    assert main(["replay", url, "--fragment", "1", "--json", str(tmp_path / "r.json")]) == 0
    assert f"from version {plan.starts[1]} on; earlier versions were collected" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["differ"] == 0


def test_gc_says_what_to_do_about_what_is_too_young(
    run: tuple[str, Garbage], capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = run
    assert main(["gc", url, "--keep", "1", "--apply"]) == 0
    said = capsys.readouterr().out
    assert "objects younger than 3600 s are kept for now; use --min-age 0 to delete them" in said
    assert main(["gc", url, "--keep", "1", "--min-age", "0", "--apply"]) == 0
    assert "min-age" not in capsys.readouterr().out
