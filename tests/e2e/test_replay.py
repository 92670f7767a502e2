"""`isthmus replay | explain | export` and `init --from` work offline on the copied folder of a run."""

import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import safetensors.torch
import torch

from isthmus.codecs import codec
from isthmus.codecs.kernels import F32
from isthmus.errors import InputError
from isthmus.format.layout import Layout
from isthmus.format.records import frame
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import commit_key
from isthmus.format.records.objects import CommitHeader, Input
from isthmus.format.rules import Pace, Rules
from isthmus.inspect import export, whatif
from isthmus.log import Commit, fold, merge
from isthmus.log.merge import by_class
from support import forking
from support.world import World, all_commits, balanced, seed_of, serving, train, world

T = TypeVar("T")

PACE = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=3, grace=0.3)


def cli(
    *arguments: object, timeout: int = 240, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    if not environment:
        return forking.isthmus(*map(str, arguments), timeout=timeout)
    # Libraries read these variables when they are loaded, so a new process is needed.
    command = [sys.executable, "-m", "isthmus_services.main", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=os.environ | environment, check=False
    )


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a run of three learners of different speeds, with late work."""
    folder = tmp_path_factory.mktemp("original") / "run"

    async def body() -> None:
        async with world(folder, seed_of(Rules(fragments=4, sync_every=4), PACE)) as w:
            agents = [w.learner(f"l{i}") for i in range(3)]
            async with serving(w.syncer("s1")) as syncer:
                enough = lambda: min(k.head for k in syncer.coordinators) >= 10  # noqa: E731
                speeds = (0.01, 0.013, 0.03)
                await asyncio.gather(
                    *(
                        train(a, 60, seed=i, step_s=s, enough=enough)
                        for i, (a, s) in enumerate(zip(agents, speeds, strict=True))
                    )
                )
            for agent in agents:
                balanced(agent)

    asyncio.run(body())
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """Copy the run, without its bus."""
    copy = tmp_path / "copy"
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("bus.sqlite*"))
    return copy


def in_world(folder: Path, body: Callable[[World], Awaitable[T]]) -> T:
    async def go() -> T:
        async with world(folder, seed_of(Rules(fragments=4, sync_every=4), PACE)) as w:
            return await body(w)

    return asyncio.run(go())


def commits(folder: Path) -> dict[int, list[Commit]]:
    return in_world(folder, lambda w: all_commits(w.log))


# --- replay -----------------------------------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_every_commit_of_a_run_comes_out_as_recorded(run: Path, tmp_path: Path) -> None:
    total = sum(map(len, commits(run).values()))
    done = cli("replay", run, "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    assert f"{total} commits, 0 differ" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["commits"], report["differ"]) == (total, 0)
    some = cli("replay", run, "--fragment", 2, "--from", 4, "--to", 7)
    assert "4 commits, 0 differ" in some.stdout


@pytest.mark.parametrize(
    ("threads", "environment"),
    [
        (1, {}),
        (2, {}),
        (7, {}),
        (2, {"NUMBA_CPU_NAME": "generic"}),
        (2, {"NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX"}),
    ],
)
def test_threads_and_instruction_sets_change_no_bit(
    run: Path, threads: int, environment: dict[str, str], tmp_path: Path
) -> None:
    if environment:
        environment |= {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    done = cli("replay", run, "--threads", threads, environment=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    assert ", 0 differ" in done.stdout


def rewrite(folder: Path, fragment: int, version: int, change: Callable[[CommitHeader], CommitHeader]) -> None:
    """Change a commit's content; its framing stays valid."""
    path = folder / commit_key(fragment, version)
    header, _ = frame.parse(path.read_bytes(), Kind.COMMIT, CommitHeader)
    path.write_bytes(frame.draft(Kind.COMMIT, change(header)).blob)


@pytest.mark.tier("test")
def test_a_commit_that_lies_about_a_weight_is_found_with_input_tensor_and_size(run: Path, tmp_path: Path) -> None:
    import msgspec

    def even(header: CommitHeader) -> bool:
        """Return whether weights are similar: at four bits, a small input's weight would not change the result."""
        weights = [given.weight for given in header.inputs]
        return len(weights) > 1 and min(weights) > 0.2 * max(weights)

    last = next(c for c in reversed(commits(run)[1]) if even(c.header))
    for path in (run / "commits/00001").iterdir():
        if int(path.name) > last.version:
            path.unlink()  # make it the newest commit: no later commit then confirms its bytes

    def lighter(header: CommitHeader) -> CommitHeader:
        first, *rest = header.inputs
        lied = msgspec.structs.replace(first, weight=first.weight / 3, clipped=("weight",))
        return msgspec.structs.replace(header, inputs=(lied, *rest))

    rewrite(run, 1, last.version, lighter)
    done = cli("replay", run, "--json", tmp_path / "r.json")
    assert done.returncode == 1
    assert f"fragment 1, version {last.version} differs" in done.stdout
    assert last.header.inputs[0].key in done.stdout
    assert "by the run's bounds it is" in done.stdout
    assert f"as recorded up to version {last.version - 1}" in done.stdout
    (difference,) = json.loads((tmp_path / "r.json").read_text())["differences"]
    assert difference["tensors"]
    for tensor in difference["tensors"]:
        assert 0 < tensor["different"] <= tensor["elements"]
        assert tensor["largest"] > 0
        assert tensor["name"] in done.stdout


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes] | None, str]] = {
    "corrupted update": ("updates", lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]), "is not what was merged"),
    "truncated update": ("updates", lambda blob: blob[: len(blob) // 2], "is not what was merged"),
    "missing update": ("updates", None, "is missing"),
    "corrupted value": ("values", lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]), "published was"),
    "missing value": ("values", None, "is missing"),
    "corrupted commit": ("commits", lambda blob: blob[:150] + bytes([blob[150] ^ 1]) + blob[151:], "not a commit"),
    "truncated commit": ("commits", lambda blob: blob[:100], "not a commit"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named_with_its_key_and_with_what_can_still_be_read(run: Path, what: str) -> None:
    kind, change, said = DAMAGE[what]
    found = commits(run)[0]
    victim = next(c for c in found if c.version % 3 == 0 and c.version >= 3)
    key = {
        "updates": victim.header.inputs[-1].key,
        "values": victim.header.value_key,
        "commits": commit_key(0, victim.version),
    }[kind]
    path = run / key
    blob = path.read_bytes()
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p != path}
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(blob))
    done = cli("replay", run)
    assert done.returncode == 1, done.stdout + done.stderr
    assert key in done.stdout
    assert said in done.stdout
    assert "fragment 0 is as recorded up to version " in done.stdout
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p != path} == before, "no file is changed"


def test_a_damaged_snapshot_is_named_and_the_commits_are_verified_without_it(run: Path) -> None:
    path = max((run / "snapshots/00000").iterdir())
    blob = path.read_bytes()
    path.write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))
    done = cli("replay", run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{path.relative_to(run)}: no snapshot to begin with: it lies under" in done.stdout
    assert "this snapshot is ignored" in done.stdout
    assert ", 0 differ" in done.stdout


def test_bad_choices_are_one_line_and_exit_2(run: Path, tmp_path: Path) -> None:
    for arguments, said in [
        (("--fragment", 9), "there is no fragment 9"),
        (("--from", 5, "--to", 3), "versions 5 to 3"),
        (("--threads", 0), "--threads 0"),
        (("--set", "codec=int8"), "cannot be changed afterwards"),
        (("--set", "H=24"), "cannot be changed afterwards"),
        (("--set", "P=3"), "cannot be changed afterwards"),
        (("--set", "merge=mode"), "one of rda, avg, trimmed, median, iso"),
        (("--set", "outer.lr=-1"), "outer.lr=-1"),
        (("--set", "quorum=none"), "quorum=none"),
        (("--set", "colour=red"), "names are merge"),
        (("--export", tmp_path / "x"), "need --set"),
    ]:
        done = cli("replay", run, *arguments)
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
    assert cli("replay", tmp_path / "nowhere").returncode == 2


def test_after_a_collection_it_says_from_where_it_can_start(run: Path) -> None:
    assert cli("gc", run, "--keep", 4, "--min-age", 0, "--apply").returncode == 0
    done = cli("replay", run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "earlier versions were collected" in done.stdout
    assert ", 0 differ" in done.stdout


# --- what if ----------------------------------------------------------------------------------------------------------


def test_the_same_rules_give_the_same_trajectory(run: Path, tmp_path: Path) -> None:
    header = commits(run)[0][0].header
    done = cli("replay", run, "--set", f"outer.lr={header.dense.learning_rate}", "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    assert "learners would have trained differently" in " ".join(done.stdout.split())
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["version"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(row["difference"] == 0.0 for row in rows)
    assert all(row["cosine"] == pytest.approx(1.0) for row in rows if row["way"])


def test_other_rules_depart_and_the_other_weights_can_be_evaluated(run: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "other.safetensors", tmp_path / "p.png"
    done = cli(
        "replay", run, "--set", "merge=avg", "--set", "outer.lr=0.7", "--set", "outer.momentum=0",
        "--export", out, "--plot", picture, "--json", tmp_path / "r.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert all(row["inputs_other"] == row["inputs_recorded"] for row in rows)
    assert rows[-1]["difference"] > 0
    assert 0 < rows[-1]["cosine"] < 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    # The exported weights are the fold under those rules, which is computed here step by step.
    weights = safetensors.torch.load_file(out)

    async def by_hand(w: World) -> dict[str, F32]:
        log, p = w.log, 0
        state = merge.initial(await fold.initial(log, p))
        settings = whatif.parse(["merge=avg", "outer.lr=0.7", "outer.momentum=0"])
        for commit in (await all_commits(log))[p]:
            h = commit.header
            outers = settings.outers(h)
            assert {(o.merge, o.learning_rate, o.momentum) for o in outers.values()} == {("avg", 0.7, 0.0)}
            state = (await fold.combine(log, state, p, h.inputs, outers, codec(h.codec_down))).state
        return {t.spec.name: state.published[t.start : t.stop] for t in w.run.layout.fragments[p].tensors}

    for name, flat in in_world(run, by_hand).items():
        assert np.array_equal(weights[name].numpy().reshape(-1), flat)


def test_a_learner_can_be_left_out(run: Path, tmp_path: Path) -> None:
    out, left_out = tmp_path / "other.safetensors", commits(run)[0][0].header.inputs[0].learner
    done = cli("replay", run, "--set", f"without={left_out}", "--export", out, "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert rows[0]["inputs_other"] < rows[0]["inputs_recorded"]
    weights = safetensors.torch.load_file(out)

    async def by_hand(w: World) -> dict[str, F32]:
        log, p = w.log, 0
        state = merge.initial(await fold.initial(log, p))
        for commit in (await all_commits(log))[p]:
            h = commit.header
            inputs = [i for i in h.inputs if i.learner != left_out]
            if inputs:
                outers = by_class(h.dense, h.embedding)
                state = (await fold.combine(log, state, p, inputs, outers, codec(h.codec_down))).state
            else:
                state = merge.State(h.version, state.published, state.master, state.momentum)
        return {t.spec.name: state.published[t.start : t.stop] for t in w.run.layout.fragments[p].tensors}

    for name, flat in in_world(run, by_hand).items():
        assert np.array_equal(weights[name].numpy().reshape(-1), flat)
    wrong = cli("replay", run, "--set", "without=nobody")
    assert wrong.returncode == 2
    assert "--set without=nobody: no update of it is merged there; merged are updates of " in wrong.stderr


def test_who_is_in_is_decided_anew_from_the_recorded_arrivals(run: Path) -> None:
    found = commits(run)

    async def decide(w: World, **changed: Any) -> dict[int, list[tuple[Input, ...]]]:
        return {p: whatif.decide(w.log, c, (), changed) for p, c in found.items()}

    # Commits record arrivals and times, so the recorded pace gives every recorded round, in the recorded order.
    again = in_world(run, lambda w: decide(w, grace=PACE.grace))
    pairs = [(c.header.inputs, i) for p, cs in found.items() for c, i in zip(cs, again[p], strict=True)]
    assert len(pairs) > 20
    assert [[i.key for i in recorded] for recorded, _ in pairs] == [[i.key for i in told] for _, told in pairs]
    # Without grace and late work, rounds are smaller. No update is in two rounds; no learner's base is merged twice.
    alone = in_world(run, lambda w: decide(w, grace=0.0, staleness=0))
    assert sum(map(len, [i for d in alone.values() for i in d])) < sum(len(a) for a, _ in pairs)
    for decided in alone.values():
        bases: dict[str, int] = {}
        for version, inputs in enumerate(decided, 1):
            for given in inputs:
                assert given.base == version - 1, "no late work"
                assert bases.setdefault(given.learner, -1) < given.base
                bases[given.learner] = given.base
    # A round whose quorum is not reached waits until the next round opens, and merges at least as much.
    patient = in_world(run, lambda w: decide(w, quorum=3))
    assert sum(map(len, [i for d in patient.values() for i in d])) >= sum(len(b) for _, b in pairs) * 0.99


def test_settings_are_parsed_whole() -> None:
    found = whatif.parse(["merge=avg", "merge.embeddings=rda", "quorum=2", "grace=0", "staleness=3", "overlap=1.5"])
    assert found.outer == {"merge": "avg"}
    assert found.embeddings == "rda"
    assert found.pace == {"quorum": 2, "grace": 0.0, "staleness": 3, "overlap": 1.5}
    for bad in ["grace=2", "staleness=65", "quorum=0", "outer.momentum=1", "merge", "outer.lr=nan", "outer.lr=11"]:
        with pytest.raises(InputError):
            whatif.parse([bad])


# --- explain and trace ------------------------------------------------------------------------------------------------


def test_the_story_of_a_commit_and_of_each_update_in_it(run: Path, tmp_path: Path) -> None:
    commit = commits(run)[2][4].header
    told = cli("explain", run, f"2/{commit.version}", "--json", tmp_path / "c.json")
    assert told.returncode == 0, told.stderr
    for part in ("called by", "quorum of 1", "grace granted", f"closed by {commit.waited.closed_by}", "merged in"):
        assert part in told.stdout
    assert json.loads((tmp_path / "c.json").read_text())["inputs"] == [i.key for i in commit.inputs]
    for given in commit.inputs:
        for name in (given.key, f"2/{given.learner}/{given.base}"):
            told = cli("explain", run, name, "--json", tmp_path / "u.json")
            assert told.returncode == 0, told.stderr
            facts = json.loads((tmp_path / "u.json").read_text())
            assert facts["fate"] == "merged"
            assert facts["version"] == commit.version
            assert all(seconds >= 0 for seconds in facts["seconds"].values())
            assert f"merged into version {commit.version}" in told.stdout
            assert f"trained by {given.learner}" in told.stdout


def test_the_story_of_an_update_that_missed_its_round(run: Path, tmp_path: Path) -> None:
    late = [
        (c.header, i) for cs in commits(run).values() for c in cs for i in c.header.inputs if i.base < c.version - 1
    ]
    assert late, "no update was late: the learners' speeds are too similar for this test"
    header, one = late[-1]
    told = cli("explain", run, one.key, "--json", tmp_path / "u.json")
    assert told.returncode == 0, told.stderr
    assert f" too late for version {one.base + 1}: " in told.stdout
    assert "1 version(s) late" in told.stdout
    missed = json.loads((tmp_path / "u.json").read_text())["missed_s"]
    before = next(c.header for c in commits(run)[header.fragment] if c.version == one.base + 1)
    assert missed == pytest.approx(one.arrived_at - before.waited.closed_at)
    assert missed > 0


def test_what_nobody_ever_heard_of_is_exit_2(run: Path) -> None:
    for what in ("7/1", "0/9999", "0/nobody/3", "0/l0/99999", "updates/00000/l9/000000000001-0000000000000000", "what"):
        done = cli("explain", run, what)
        assert done.returncode == 2, (what, done.stdout)
        assert done.stderr.count("\n") == 1


def test_the_timeline_has_tracks_spans_and_arrows_that_bind(run: Path, tmp_path: Path) -> None:
    done = cli("replay", run, "--trace", tmp_path / "trace.json")
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"syncers", "learner l0", "learner l1", "learner l2"}
    spans: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    for e in events:
        if e["ph"] == "X":
            assert (e["pid"], e["tid"]) in tracks
            assert e["dur"] > 0
            assert e["ts"] >= 0
            spans.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"], e["name"].split()[0]))
    kinds = {name for found in spans.values() for _, _, name in found}
    assert kinds == {"train", "upload", "fetch", "wait", "round", "merge", "publish"}
    for found in spans.values():
        found.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(found)), "spans of one track never overlap"
    arrows = [e for e in events if e["ph"] in "sf"]
    total = sum(len(c.header.inputs) for cs in commits(run).values() for c in cs)
    assert sum(e["name"].startswith("merge") for e in arrows) == 2 * total
    assert any(e["name"].startswith("adopt") for e in arrows)
    for e in arrows:
        assert any(a <= e["ts"] < b for a, b, _ in spans[e["pid"], e["tid"]]), "an arrow binds to a span"


# --- export and back --------------------------------------------------------------------------------------------------


async def _created_at(w: World) -> float:
    return w.run.header.created_at


def test_an_export_is_what_was_published_at_that_version_or_time(run: Path, tmp_path: Path) -> None:
    found = commits(run)
    newest = cli("export", run, "-o", tmp_path / "m.safetensors", "--json", tmp_path / "e.json")
    assert newest.returncode == 0, newest.stderr
    assert json.loads((tmp_path / "e.json").read_text())["versions"] == [len(found[p]) for p in range(4)]
    middle = found[0][4].header.written_at
    created_at = in_world(run, _created_at)
    for flags, versions in [
        (("--version", "3"), [3] * 4),
        (("--version", "0"), [0] * 4),
        (("--at", str(middle)), [sum(c.header.written_at <= middle for c in found[p]) for p in range(4)]),
        (("--at", str(created_at + 1e-3)), [0] * 4),
        (("--at", "2999-01-01"), [len(found[p]) for p in range(4)]),
    ]:
        out = tmp_path / "v.safetensors"
        done = cli("export", run, "-o", out, "--force", *flags)
        assert done.returncode == 0, done.stderr
        weights = safetensors.torch.load_file(out)

        async def expected(w: World, versions: list[int] = versions) -> tuple[Layout, list[F32]]:
            values = [
                (await fold.fold(w.log, p, fold.Merging(w.log), until=v)).carried.published
                for p, v in enumerate(versions)
            ]
            return w.run.layout, values

        layout, values = in_world(run, expected)
        assert set(weights) == {s.name for s in layout.specs}
        for fragment, flat in zip(layout.fragments, values, strict=True):
            for t in fragment.tensors:
                assert tuple(weights[t.spec.name].shape) == t.spec.shape
                assert np.array_equal(weights[t.spec.name].numpy().reshape(-1), flat[t.start : t.stop])
    for flags in (("--version", "999"), ("--version", "-1"), ("--at", "yesterday")):
        assert cli("export", run, "-o", tmp_path / "x", *flags).returncode == 2


MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 4)
        self.half = torch.nn.Linear(4, 5).to(torch.bfloat16)
        self.norm = torch.nn.LayerNorm(5)
        self.out = torch.nn.Linear(5, 11, bias=False).to(torch.float16)

def model():
    return Model()

def other():
    return torch.nn.Linear(3, 3)
"""


def test_a_run_starts_from_an_exported_model_and_from_anybodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODEL)
    first = cli("init", "a", "--model", "mine:model", "--seed", "5", "--fragments", "3")
    assert first.returncode == 0, first.stderr
    assert cli("export", "a", "-o", "m.safetensors").returncode == 0
    weights = safetensors.torch.load_file("m.safetensors")
    assert {n: str(t.dtype).removeprefix("torch.") for n, t in weights.items()}["half.weight"] == "bfloat16"
    # The file names the code that made it, and `--model` allows that code. Names, shapes, dtypes and values return.
    second = cli("init", "b", "--from", "m.safetensors", "--model", "mine:model", "--fragments", "3", "--seed", "99")
    assert second.returncode == 0, second.stderr
    assert cli("export", "b", "-o", "n.safetensors").returncode == 0
    again = safetensors.torch.load_file("n.safetensors")
    assert {n: (t.shape, t.dtype) for n, t in again.items()} == {n: (t.shape, t.dtype) for n, t in weights.items()}
    assert all(torch.equal(again[n], weights[n]) for n in weights)
    a, b = export.read(tmp_path / "m.safetensors"), export.read(tmp_path / "n.safetensors")
    assert a.specs == b.specs
    assert [s.role for s in a.specs if s.name == "embed.weight"] == ["embedding"]
    # A file that Isthmus did not write needs --model.
    safetensors.torch.save_file(weights, "foreign.safetensors")
    foreign = cli("init", "c", "--from", "foreign.safetensors")
    assert foreign.returncode == 2
    assert "--model" in foreign.stderr
    assert cli("init", "c", "--from", "foreign.safetensors", "--model", "mine:model").returncode == 0
    for arguments, said in [
        (("--from", "m.safetensors", "--model", "mine:other"), "is only in the"),
        (("--from", "nothing.safetensors"), "cannot be read"),
        (("--from", "mine.py"), "is no safetensors file"),
    ]:
        bad = cli("init", "d", *arguments)
        assert bad.returncode == 2, bad.stdout
        assert said in bad.stderr
    safetensors.torch.save_file({n: t.double() for n, t in weights.items()}, "double.safetensors")
    wide = cli("init", "d", "--from", "double.safetensors", "--model", "mine:model")
    assert wide.returncode == 2
    assert "F64" in wide.stderr
    assert math.isfinite(float(weights["out.weight"].sum()))
