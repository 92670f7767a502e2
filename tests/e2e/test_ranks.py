"""Learners can be torchrun jobs: real ranks over gloo train with a real syncer, and survive kill -9."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import isthmus
from e2e.rank_learner import net
from e2e.test_processes import HANGS_S, QUIET, ROOT, Processes, commits_of, processes, wait_for
from isthmus.format.records import frame
from isthmus.format.records.objects import CheckpointHeader
from isthmus_services.demo import judge
from isthmus_services.main import main

HERE = Path(__file__).parent
FRESH_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without this, ranks that torchrun has restarted connect to addresses of ranks that are gone (torch 2.13, gloo)."""

LEARNER = str(HERE / "rank_learner.py")


@pytest.fixture(autouse=True)
def fresh_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FRESH_STORES.items():
        monkeypatch.setenv(name, value)


def torchrun(ranks: int, *options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options)


def job(ranks: int, script: str, *arguments: str) -> str:
    """Run a job to its end; return its output."""
    done = subprocess.run(
        [*torchrun(ranks), str(HERE / script), *arguments],
        env={**os.environ, **QUIET}, capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_rank_that_hangs_is_named_and_ends_the_job(tmp_path: Path) -> None:
    done = subprocess.run(
        [*torchrun(2), str(HERE / "rank_hangs.py"), str(tmp_path / "run")],
        env={**os.environ, **QUIET}, capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert "rank 1 has not called link.step for 4 s" in done.stdout, done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_what_is_read_and_written_is_the_whole_of_every_placement() -> None:
    found = job(4, "rank_placements.py").splitlines()
    assert len(found) == 26, found
    assert all(line.endswith("as torch says") for line in found), found


@pytest.mark.timeout(600)
def test_ranks_that_do_not_do_the_same_are_refused_on_all_of_them(tmp_path: Path) -> None:
    job(2, "rank_disagreements.py", str(tmp_path / "run"))
    said = [json.loads((tmp_path / f"run.{rank}").read_text()) for rank in (0, 1)]
    for what, words in {
        "names": "InputError: the ranks of a learner join alike, but rank 1 joins as b and rank 0 as a",
        "runs": "InputError: the ranks of a learner join alike, but rank 1 joins the run .*-other and rank 0 the run .*",
        "optimizers": "InputError: .* rank 1 joins an optimizer torch.optim.adamw.AdamW and rank 0 an optimizer .*SGD",
        "models": r"InputError: the ranks of a learner train one model, but parameter '0.weight' of rank 0 has shape \(4, 4\).*",
        "values": "InputError: parameter '1.weight' is whole on every rank, but rank 1 holds other values than rank 0.*",
        "no run": "RunMissing: .*no run at .*",
        "tokens": "InputError: the ranks of this learner are not in step: rank 0 is at step 2 with 8 tokens, rank 1 is at "
        "step 2 with 9 tokens; every rank calls link.step.*",
        "data": r"InputError: rank 1: data\['at'\] is a __main__.Odd: a checkpoint holds plain data.*",
        "one closes": "InputError: .*rank 0 is at step 1 with 8 tokens, rank 1 closes after step 0.*",
    }.items():
        for rank in (0, 1):
            assert re.fullmatch(words, said[rank][what]), (rank, what, said[rank][what])


def trained(folder: Path, kinds: dict[str, tuple[str, int]], again: int = 4) -> dict[tuple[int, int], bytes]:
    """Run learners, each with its kind and number of ranks; return all states' digests by fragment and version."""
    folder.mkdir()
    run = str(folder / "run")
    with processes(folder) as p:
        learners = []
        p.isthmus("s", "syncer", run, "--wait")
        for name, (kind, ranks) in kinds.items():
            start = (sys.executable,) if kind.startswith("plain") else torchrun(ranks)
            learners.append(p.start(name, *start, LEARNER, run, name, kind, "50", "--told", *kinds))
            wait_for((folder / "run" / "run").exists, "the first one creates the run")
        for learner in learners:
            p.ends(learner)
        for name in kinds:
            assert "parameters were changed" not in p.said(name), "adopted versions are the link's own doing"
    commits = commits_of(run)
    assert judge.continuous(commits)
    assert main(["replay", run]) == 0
    if any([given.learner for given in c.header.inputs] != [*kinds] for c in commits):
        # The machine stalled for a second. Other learners, or another order of them, give another sum, so try again.
        assert again, [[given.learner for given in c.header.inputs] for c in commits]
        return trained(folder / "again", kinds, again - 1)
    return {(c.header.fragment, c.version): c.header.state_digest for c in commits}


@pytest.mark.timeout(900)
def test_learners_of_one_and_of_several_ranks_make_the_same_model_bit_for_bit(tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone", {"a": ("plain", 1), "b": ("plain", 1)})
    mixed = trained(tmp_path / "mixed", {"a": ("ddp", 2), "b": ("fsdp2", 2)})
    assert len(alone) == 3
    assert mixed == alone
    assert trained(tmp_path / "half", {"a": ("plain", 1), "b": ("fsdp2", 2)}) == alone
    # Use the CPU as the device that keeps fragments.
    assert trained(tmp_path / "there", {"a": ("ddp-there", 2), "b": ("fsdp2-there", 2)}) == alone
    said = {name: (tmp_path / "there" / f"{name}.log").read_text() for name in "ab"}
    for name, words in said.items():
        waits = re.findall(rf"{name}/\d waited for its device (\d+) times, (\d+) of them in training", words)
        assert len(waits) == 2, words
        assert all(int(all_of) > 0 for all_of, _ in waits), "owners pack and stage on the device"
        assert {training for _, training in waits} == {"0"}


def goes_on(p: Processes, name: str) -> list[tuple[int, int, str, int]]:
    """Return rank, step, moments and data position of each start of a learner's ranks, in the order of its log."""
    pattern = r"a/(\d) goes on after (\d+), (\w+) moments, place (\d+)"
    return [(int(r), int(step), what, int(at)) for r, step, what, at in re.findall(pattern, p.said(name))]


@pytest.mark.timeout(900)
def test_a_job_goes_on_after_kill_9_of_a_rank_and_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run, "--wait")
        first = p.start(
            "job", *torchrun(2, "--max-restarts=3"), LEARNER, run, "a", "fsdp2", "200", "--pids", str(tmp_path)
        )
        # Parts are stored before the checkpoint that names them. Parts alone are nothing to resume from.
        wait_for(lambda: [*(tmp_path / "run" / "learners" / "a").glob("*/checkpoints/0*")], "a checkpoint is there")
        wait_for((tmp_path / "1.1").exists, "the second rank has joined")
        os.kill(int((tmp_path / "1.1").read_text()), signal.SIGKILL)
        p.ends(first)
        starts = goes_on(p, "job")
        assert [s[2] for s in starts] == ["fresh", "fresh", "own", "own"]
        again = {s[1:] for s in starts[2:]}
        assert len(again) == 1
        ((step, _, place),) = again
        assert step == place > 0
        # Three ranks, then one that is not sharded. The stored data positions are of two ranks, and the log says so.
        p.ends(p.start("three", *torchrun(3), LEARNER, run, "a", "fsdp2", "220"))
        assert sorted(goes_on(p, "three")) == [(rank, 200, "own", 0) for rank in range(3)]
        assert "has the data positions of 2 ranks, but this learner has 3 ranks" in p.said("three")
        p.ends(p.start("plain", sys.executable, LEARNER, run, "a", "plain", "240"))
        assert goes_on(p, "plain") == [(0, 220, "own", 0)]
        p.ends(p.start("sharded", *torchrun(2), LEARNER, run, "a", "fsdp2", "260"))
        assert sorted(goes_on(p, "sharded")) == [(rank, 240, "own", 0) for rank in range(2)]
        # Each rank has written its own part of a checkpoint. The damaged piece is of the optimizer's state, so no
        # moments are taken from it. Training still continues at the same step.
        newest = max(
            (tmp_path / "run" / "learners" / "a").glob("*/checkpoints/0*"), key=lambda path: path.stat().st_mtime
        )
        header, _ = frame.parse(newest.read_bytes(), frame.Kind.CHECKPOINT, CheckpointHeader)
        written = sorted(newest.parent / "parts" / part.key.rsplit("/", 1)[1] for part in header.parts)
        assert [path.name.split("-")[1] for path in written] == ["00000", "00001"]
        blob = bytearray(written[1].read_bytes())
        blob[-64] ^= 1
        written[1].write_bytes(blob)
        p.ends(p.start("damaged", *torchrun(2), LEARNER, run, "a", "fsdp2", "280"))
        assert sorted(goes_on(p, "damaged")) == [(rank, 260, "fresh", 20) for rank in range(2)]
        assert "are not what was written" in p.said("damaged")
    assert judge.continuous(commits_of(run))
    assert main(["replay", run]) == 0


STEPS = 16
"""The steps over all incarnations of a learner that is compared with a loop that never stopped."""


def life(folder: Path, run: str, until: int, end: str) -> dict[str, Any]:
    """Run one incarnation of two ranks with uneven shards to its end; return its result."""
    out = folder / f"{until}.json"
    done = subprocess.run(
        [*torchrun(2), str(HERE / "rank_restarts.py"), run, str(until), end, str(out)],
        env={**os.environ, **QUIET}, capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == (end == "return"), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text()) if end == "return" else {}
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ends", [("raise", "kill", "return"), ("kill", "return", "return")])
def test_a_restart_of_uneven_shards_is_not_seen(ends: tuple[str, ...], tmp_path: Path) -> None:
    wanted = life(tmp_path, "alone", STEPS, "return")
    for n, end in enumerate(ends, 1):
        found = life(tmp_path, str(tmp_path / "run"), STEPS * n // len(ends), end)
    first = found["first"]
    assert first > 0
    assert (found["tensors"], found["tokens"], found["rate"]) == (wanted["tensors"], wanted["tokens"], wanted["rate"])
    assert found["batches"] == [own[first:] for own in wanted["batches"]]


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Create two connected network namespaces, 10.99.0.1 and 10.99.0.2. Neither can reach the other's loopback."""
    names = [f"isthmus-{os.getpid()}-{n}" for n in (1, 2)]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for n, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.99.0.{n}/24", "dev", "wire")
            for link in ("lo", "wire"):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces want root and ip")
@pytest.mark.timeout(600)
def test_ranks_on_two_machines_are_one_learner(tmp_path: Path, machines: list[str]) -> None:
    run = str(tmp_path / "run")
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run, "--wait")
        ranks = [
            p.start(
                f"node{n}", "ip", "netns", "exec", name, "env", "GLOO_SOCKET_IFNAME=wire", sys.executable, "-m",
                "torch.distributed.run", "--nnodes=2", f"--node-rank={n}", "--nproc-per-node=1",
                "--master-addr=10.99.0.1", "--master-port=29411", LEARNER, run, "a", "fsdp2", "60",
            )
            for n, name in enumerate(machines)
        ]  # fmt: skip
        for rank in ranks:
            p.ends(rank)
        assert "a is done" in p.said("node0")
    parts = {path.name.split("-")[1] for path in (tmp_path / "run" / "learners").glob("a/*/checkpoints/parts/*")}
    assert parts == {"00000", "00001"}, "each rank has written its part"
    assert judge.continuous(commits_of(run))
    assert {c.header.fragment for c in commits_of(run)} == {0, 1, 2}, "fragments of both ranks are merged"


Entries = dict[str, torch.Tensor]


def comes_back(run: str, spoil: Callable[[Entries], object]) -> list[Entries]:
    """Let the veteran take a step, spoil its optimizer's state and leave; return the state."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with isthmus.join(run, model, optimizer, learner="veteran") as link:
        model(torch.arange(9)).pow(2).sum().backward()
        optimizer.step()
        link.step(9)
        for entries in optimizer.state.values():
            spoil(entries)
    return [dict(optimizer.state[p]) for p in model.parameters()]


@pytest.mark.timeout(600)
def test_a_sharded_newcomer_takes_a_peers_moments_where_they_may_be_believed(tmp_path: Path) -> None:
    run, out = str(tmp_path / "run"), tmp_path / "newcomer"
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run, "--wait")
        p.ends(p.start("v", sys.executable, LEARNER, run, "veteran", "plain", "60"))
    assert any(commits_of(run)), "only a learner whose updates were merged is a donor"

    def joined(name: str, ranks: int) -> list[dict[str, Any]]:
        job(ranks, "rank_donors.py", run, name, str(out))
        return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]

    kept = comes_back(run, lambda entries: None)
    for ranks in (2, 3):  # nine rows over three ranks are even, seven and five uneven, and one row leaves ranks empty
        for found in joined(f"n{ranks}", ranks):
            assert (found["moments"], found["rates"]) == ("peer", [5e-3])
            for mine, theirs in zip(found["state"], kept, strict=True):
                assert mine == {what: value.tolist() for what, value in theirs.items()}
    comes_back(run, lambda entries: entries["exp_avg"].mul_(1e6))
    assert [found["moments"] for found in joined("far", 2)] == ["fresh", "fresh"], "they would move the model too far"
    comes_back(run, lambda entries: entries["exp_avg"].zero_())
    comes_back(run, lambda entries: entries["exp_avg_sq"].neg_())
    assert [found["moments"] for found in joined("below", 2)] == ["fresh", "fresh"], "second moments are below 0"


@pytest.mark.tier("test")
@pytest.mark.timeout(600)
def test_the_example_trains_on_two_ranks_beside_one_process(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    example = str(ROOT / "examples" / "torchrun_fsdp2.py")
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run, "--wait")
        sharded = p.start("eu-1", *torchrun(2), example, run, "--learner", "eu-1", "--steps", "60")
        alone = p.start("us-1", sys.executable, example, run, "--learner", "us-1", "--steps", "60")
        for process in (sharded, alone):
            p.ends(process)
        assert "eu-1: 60 steps" in p.said("eu-1")
        assert "parameters were changed" not in p.said("eu-1"), "adopted versions are the link's own doing"
    commits = commits_of(run)
    assert judge.continuous(commits)
    assert {i.learner for c in commits for i in c.header.inputs} == {"eu-1", "us-1"}
