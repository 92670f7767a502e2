"""One word, one number: on one run, every place that shows a figure has the figure that is computed here by hand."""

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from advice.lives import training
from isthmus.format.records.keys import claim_key
from isthmus.format.records.messages import PARTS
from isthmus.format.records.objects import CommitHeader
from isthmus.format.rules import Pace, Rules
from isthmus.inspect.bus_view import moved as all_moved
from isthmus.inspect.losses import LossCurves
from isthmus.inspect.replay import replay
from isthmus.inspect.status import read_status
from isthmus.log.claims import claim_at
from isthmus.log.figures import LogSums, updates_rejected
from isthmus.reasons import LOSSLESS
from isthmus_services.demo import judge
from isthmus_services.demo.watch import Watch
from isthmus_services.main import main
from isthmus_services.output.view import rejections
from support.boards import a_board, ask
from support.world import World, all_commits, seed_of, serving, train, until, world

RULES = Rules(fragments=3, sync_every=3)
PACE = Pace(quorum=1, grace=0.0, heartbeat_s=0.1, silence_s=1.0, snapshot_every=4096)
"""Without grace, rounds close without the slower learner."""


async def told_of_a_checkpoint(w: World) -> bool:
    """Return whether a heartbeat of learner c has said that it stored a checkpoint."""
    view = (await read_status(w.log, w.bus, w.runtime, 0.1)).hearing.learners.get("c")
    return view is not None and view.traffic.checkpoints > 0


async def run_of(w: World) -> tuple[Any, list[CommitHeader]]:
    """Train a quick learner, a slow one and one that is killed; return the syncer and the commits in order of time."""
    async with serving(w.syncer("s1")) as syncer:
        done = False
        others = [
            asyncio.ensure_future(
                train(
                    w.learner(name),
                    1,
                    step_s=step_s,
                    enough=lambda: done,
                    wait_s=30.0,
                    loss=lambda step: 9 / (1 + step),
                )
            )
            for name, step_s in (("a", 0.01), ("b", 0.05))
        ]
        c = w.learner("c", checkpoint_s=0.5)
        async with training(c):
            await until(lambda: min(k.head for k in syncer.coordinators) >= 4, "rounds are made")
            stored = Path(w.run.url, "learners", "c")

            def further() -> bool:
                """Whether it has trained on since its newest checkpoint: some steps are in no update, either."""
                steps = [int(path.name.partition("-")[0]) for path in stored.glob("*/checkpoints/0*")]
                ahead = bool(steps) and c.boundary is not None and c.boundary.step >= max(steps) + 2 * RULES.sync_every
                return ahead and not c._claimed.busy

            while not await told_of_a_checkpoint(w):
                pass
            await until(further, "it is ahead of its checkpoint")
        far = [np.full(f.size, 5.0, np.float32) for f in w.run.layout.fragments]
        more = lambda: min(k.head for k in syncer.coordinators) >= 12  # noqa: E731
        # Its updates are clipped, for several reasons at once.
        await train(w.learner("c"), 20, wait_s=30.0, tokens=2000, toward=far, enough=more)
        done = True
        await asyncio.gather(*others)
        commits = [c.header for chain in (await all_commits(w.log)).values() for c in chain]
    return syncer, sorted(commits, key=lambda h: h.written_at)


async def test_every_figure_is_the_same_wherever_it_is_shown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world(folder, seed_of(RULES, PACE)) as w:
        syncer, headers = await run_of(w)
        status = await read_status(w.log, w.bus, w.runtime, 0.1)
        async with a_board(w.log, w) as (url, _):
            state = await ask(url, "state")
            totals, shown_bytes = state["totals"], state["bytes"]
            lines = (await ask(url, "series"))["log"]
            learners = {row["learner"]: row for row in (await ask(url, "learners"))["learners"]}
        commits = [c for chain in (await all_commits(w.log)).values() for c in chain]
        killed = await claim_at(w.log, claim_key("c", 2))
        curves = LossCurves()
        await replay(w.log, losses=curves)
    metrics = {
        sample.name: sample.value for family in syncer.metrics.registry.collect() for sample in family.samples
        if not sample.labels
    }  # fmt: skip
    labelled: dict[str, dict[tuple[str, ...], float]] = {}
    for family in syncer.metrics.registry.collect():
        for sample in family.samples:
            labelled.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value

    # participation
    shares = []
    for h in headers:
        there = {i.learner for i in h.inputs}
        shares.append(len(there) / len(there | set(h.waited.expected)))
    mean = sum(shares) / len(shares)
    assert 0.3 < mean < 1.0, "some places were empty, or this compares nothing"
    assert LogSums(headers).participation == pytest.approx(mean)
    assert totals["participation"] == pytest.approx(mean)
    assert metrics["isthmus_participation_ratio_sum"] / metrics["isthmus_participation_ratio_count"] == pytest.approx(
        mean
    )
    for name, row in learners.items():
        asked = [h for h in headers if name in h.waited.expected]
        there_of = [h for h in asked if name in {i.learner for i in h.inputs}]
        assert row["participation"] == pytest.approx(len(there_of) / len(asked))
    watch = Watch("demo", 3, 30, cast(Any, SimpleNamespace(commits={})), cast(Any, SimpleNamespace()))
    for commit in commits:
        watch.committed(commit)
    assert watch._totals()[0] == pytest.approx(mean)

    # merged: updates, and tokens by a fragment's share of the parameters
    updates = sum(len(h.inputs) for h in headers)
    assert totals["updates"] == updates == sum(row["merged"] for row in learners.values())
    assert sum(labelled["isthmus_updates_merged_total"].values()) == updates
    sizes = [f.size / w.run.layout.size for f in w.run.layout.fragments]
    tokens = sum(i.tokens * sizes[h.fragment] for h in headers for i in h.inputs)
    assert totals["tokens"] == pytest.approx(tokens, abs=1.0)
    by_fragment = labelled["isthmus_merged_tokens_total"]
    assert sum(n * sizes[int(p)] for (p,), n in by_fragment.items()) == pytest.approx(tokens)
    beats = [v.heartbeat for v in status.hearing.learners.values()]
    ledgers = [beat.ledger for beat in beats if beat is not None]
    assert len(ledgers) == 3
    assert sum(ledger.merged for ledger in ledgers) == pytest.approx(tokens)

    # newest merged loss: of the update captured last
    for name, points in curves.points().items():
        merged = [i for h in headers for i in h.inputs if i.learner == name and i.loss is not None]
        assert learners[name]["loss"] == points[-1].loss == max((i.taken_at, i.loss or 0.0) for i in merged)[1]
        assert set(status.losses[name]) <= set(points)
    assert curves.points().keys() == learners.keys() == status.losses.keys()

    # missed its round
    missed = sum(len(h.late) for h in headers)
    assert totals["missed_round"] == missed == metrics["isthmus_updates_missed_round_total"]

    # rejected, and rejected without loss
    by_reason: dict[str, int] = {}
    for h in headers:
        for r in h.rejected:
            by_reason[r.reason] = by_reason.get(r.reason, 0) + r.count
    assert status.rejections == by_reason == judge.rejections(commits)
    assert totals["updates_rejected"] == sum(n for reason, n in by_reason.items() if reason not in LOSSLESS)
    assert totals["rejected_without_loss"] == sum(n for reason, n in by_reason.items() if reason in LOSSLESS)
    worse = totals["updates_rejected"]
    assert worse == updates_rejected(by_reason) > 0
    assert {row["reason"]: row["times"] for row in state["reasons"]} == by_reason
    assert sum(row["times"] for row in state["reasons"] if row["work_lost"]) == worse
    assert sum(row["updates_rejected"] for row in learners.values()) == worse
    assert sum(lines["updates_rejected"]) == worse
    said, spare = rejections(by_reason)
    shown = {name: int(count) for name, count in re.findall(r"([a-z-]+) (\d+)", f"{said}, {spare}")}
    assert shown == by_reason
    counted = {reason: n for (reason,), n in labelled["isthmus_rejections_total"].items() if n}
    for reason, n in status.messages_rejected.items():
        counted[reason] -= n
    assert {reason: n for reason, n in counted.items() if n} == by_reason

    # clipped: updates, each once; reasons, of which an update may have several
    inputs = [i for h in headers for i in h.inputs]
    clipped = sum(1 for i in inputs if i.clipped)
    clips = {r: sum(r in i.clipped for i in inputs) for r in {r for i in inputs for r in i.clipped}}
    assert 0 < clipped < sum(clips.values()), "no update was clipped for several reasons: this compares nothing"
    assert (status.updates_clipped, status.clipped) == (clipped, clips)
    assert totals["clipped"] == sum(row["clipped"] for row in learners.values()) == clipped
    assert {r: n for (r,), n in labelled["isthmus_updates_clipped_total"].items() if n} == clips
    sums = LogSums(headers)
    assert (sums.merged, sums.clipped, sums.clips) == (updates, clipped, clips)

    # processed up to the newest merged updates: of a learner that was killed, with what it trained again
    assert killed.tokens_lost > 0
    reached = {
        name: max((i.incarnation, i.step, i.tokens_seen) for h in headers for i in h.inputs if i.learner == name)
        for name in learners
    }
    again = {("c", 2): killed.tokens_lost}
    by_log = {name: seen + again.get((name, incarnation), 0) for name, (incarnation, _, seen) in reached.items()}
    assert {name: row["processed"] for name, row in learners.items()} == by_log
    assert totals["processed"] == sum(by_log.values())
    assert totals["kept"] == pytest.approx(tokens / sum(by_log.values()))
    assert sum(lines["processed_per_s"]) * lines["seconds"] == pytest.approx(sum(by_log.values()))

    # the tokens of the run: merged, overwritten, lost and so on
    whole = {part: sum(getattr(ledger, part) for ledger in ledgers) for part in ("processed", *PARTS)}
    assert whole["overwritten"] > 0.0
    assert whole["lost"] > 0.0
    for part, count in whole.items():
        assert getattr(status.ledger, part) == pytest.approx(count)
        assert sum(row["said"][part] for row in learners.values()) == pytest.approx(count, abs=3.0)

    # bytes, over all incarnations that the bus still tells of
    moved = [view.traffic for view in status.hearing.learners.values()]
    whole_run = all_moved(status.hearing.learners.values())
    assert whole_run == tuple(sum(of) for of in zip(*moved, strict=True))
    beats_of_last = [beat for beat in beats if beat is not None and beat.learner != "c"]
    for beat in beats_of_last:
        view = status.hearing.learners[beat.learner]
        assert view.traffic == (beat.bytes_up - beat.checkpoint_bytes, beat.bytes_down, beat.checkpoint_bytes)
    assert status.hearing.learners["c"].earlier.up > 0, "no learner had two incarnations: this compares nothing"
    for field, count in (
        ("bytes_up", sum(t.up for t in moved)),
        ("bytes_down", sum(t.down for t in moved)),
        ("checkpoint_bytes", sum(t.checkpoints for t in moved)),
    ):
        assert sum(row["said"][field] for row in learners.values()) == count > 0

    # bytes merged, which are less than bytes up
    merged_bytes = sum(i.bytes for h in headers for i in h.inputs)
    assert totals["bytes_merged"] == shown_bytes["merged"] == merged_bytes < whole_run.up
    assert sum(row["bytes_merged"] for row in learners.values()) == merged_bytes
    assert sum(lines["bytes_merged_per_s"]) * lines["seconds"] == pytest.approx(merged_bytes)
    assert (shown_bytes["up"], shown_bytes["down"], shown_bytes["checkpoints"]) == whole_run
    assert "bytes_up" not in totals, "one word, one number"

    # what `status` prints and writes, and the audit
    words = ["status", str(w.run.url), "--json", str(tmp_path / "status.json")]
    assert await asyncio.to_thread(main, words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    written = json.loads((tmp_path / "status.json").read_text())
    told = written["totals"]
    tally = " ".join(f"{part} {whole[part] / whole['processed']:.1%}" for part in PARTS)
    assert (
        f"participation {mean:.1%} and {updates:,} updates merged, {whole['processed']:,.0f} tokens: {tally}" in printed
    )
    assert f"clipped: {clipped} updates: " in printed
    assert told["ledger"] == pytest.approx(whole)
    up, down, kept = (
        sum(row[field] for row in written["learners"]) for field in ("bytes_up", "bytes_down", "checkpoint_bytes")
    )
    assert (up, down, kept) == (sum(t.up for t in moved), sum(t.down for t in moved), sum(t.checkpoints for t in moved))
    as_heard = f"{up / 1e6:.1f} MB up, {down / 1e6:.1f} MB down, {kept / 1e6:.1f} MB of checkpoints"
    assert f"as heard {as_heard}" in printed
    assert told["participation"] == pytest.approx(mean)
    assert told["commits"] == told["summed_commits"] == len(headers)
    assert (told["updates_merged"], told["updates_clipped"]) == (updates, clipped)
    assert await asyncio.to_thread(main, ["audit", str(w.run.url), "--json", str(tmp_path / "audit.json")]) == 0
    audited = capsys.readouterr().out
    work = {row["learner"]: row for row in json.loads((tmp_path / "audit.json").read_text())["work"]}
    assert {name: row["processed"] for name, row in work.items()} == by_log
    assert f"{sum(by_log.values()):,} tokens processed up to their newest merged updates" in audited
    assert f"{len(headers)} commits, {updates} updates, {tokens:,.0f} tokens" in audited
    assert f"participation: {mean:.1%}" in audited
    spared = totals["rejected_without_loss"]
    assert f"{clipped} updates were clipped, {worse} updates rejected; rejected without loss: {spared}" in audited
    members = [member["total"] for member in json.loads((tmp_path / "audit.json").read_text())["members"]]
    assert sum(member["updates_rejected"] for member in members) == worse
    assert sum((Counter(member["rejections"]) for member in members), Counter()) == by_reason
    assert written["rejections"] == by_reason

    # the ledger has every token once; that of `status --ledger` is as of the newest checkpoint
    for ledger in ledgers:
        parts = (ledger.merged, ledger.overwritten, ledger.late, ledger.pending, ledger.rejected, ledger.lost)
        assert sum(parts) == pytest.approx(ledger.processed)
    words = ["status", str(w.run.url), "--ledger", "--json", str(tmp_path / "status.json")]
    assert await asyncio.to_thread(main, words) == 0
    stored = json.loads((tmp_path / "status.json").read_text())["ledgers"]
    assert "c" in stored, "it has kept a checkpoint"
    assert {name: of["processed"] for name, of in stored.items()} == {
        name: row["stated"]["processed"] for name, row in work.items() if row["stated"]
    }
    for kept in stored.values():
        for row in kept["fragments"]:
            assert sum(row[part] for part in PARTS) == kept["processed"]


async def test_what_a_killed_learner_trained_and_no_update_has_is_processed_everywhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world(folder, seed_of(Rules(fragments=3, sync_every=30), PACE)) as w:
        c = w.learner("c", checkpoint_s=1e6)
        async with training(c, step_s=0.05):
            async with serving(w.syncer("s1")) as syncer:
                await until(lambda: min(k.head for k in syncer.coordinators) >= 1, "rounds are made")

            def further() -> bool:
                """Whether it has trained on for two heartbeats since its newest update was captured."""
                sent = [attempt.header.tokens_seen for of in c.uplink.attempts for attempt in of.values()]
                return bool(sent) and c.boundary is not None and c.boundary.tokens_seen >= max(sent) + 500

            await until(further, "it has trained what no update has")
        async with serving(w.syncer("s2")) as syncer:
            reached = max(k.head for k in syncer.coordinators)
            more = lambda: min(k.head for k in syncer.coordinators) >= reached + 4  # noqa: E731
            second = w.learner("c")
            await train(second, 10, wait_s=30.0, enough=more)
        claim = await claim_at(w.log, claim_key("c", 2))
        inputs = [i for chain in (await all_commits(w.log)).values() for commit in chain for i in commit.header.inputs]
        known = max(i.tokens_seen for i in inputs if i.incarnation == 1)
        assert claim.tokens_seen + claim.tokens_lost > known, "merged updates have all of it: this compares nothing"
        processed = max(i.tokens_seen for i in inputs if i.incarnation == 2) + claim.tokens_lost
        ledger = (await read_status(w.log, w.bus, w.runtime, 0.1)).ledger
        assert processed <= ledger.processed
        # The metric of tokens trained again has the number of the claim. The ledger's lost tokens are fewer: what an
        # update had is merged.
        counted = second.metrics.registry.get_sample_value("isthmus_trained_again_tokens")
        assert counted == claim.tokens_lost > ledger.lost
        assert second.metrics.registry.get_sample_value("isthmus_ledger_tokens", {"part": "lost"}) == ledger.lost > 0
        cache = tmp_path / "board.npz"
        for again in ("read from the log", "kept in the cache"):
            async with a_board(w.log, w, cache) as (url, feed):
                assert (await ask(url, "state"))["totals"]["processed"] == processed, again
                (row,) = (await ask(url, "learners"))["learners"]
                lines = (await ask(url, "series"))["log"]
                assert feed.history.incarnations[0, 2].again == claim.tokens_lost
            assert row["processed"] == processed, again
            assert sum(lines["processed_per_s"]) * lines["seconds"] == pytest.approx(processed)
        assert await asyncio.to_thread(main, ["audit", str(w.run.url), "--json", str(tmp_path / "audit.json")]) == 0
        (work,) = json.loads((tmp_path / "audit.json").read_text())["work"]
        assert work["processed"] == processed
        assert f"learners state {processed:,} tokens processed up to" in capsys.readouterr().out
        # Without the claim, both know what merged updates tell.
        Path(w.run.url, claim_key("c", 2)).unlink()
        begun = min(i.tokens_seen - i.tokens for i in inputs if i.incarnation == 2)
        told = max(i.tokens_seen for i in inputs if i.incarnation == 2) + max(0, known - begun)
        async with a_board(w.log, w) as (url, _):
            assert (await ask(url, "state"))["totals"]["processed"] == told < processed
        assert await asyncio.to_thread(main, ["audit", str(w.run.url), "--json", str(tmp_path / "audit.json")]) == 0
        assert json.loads((tmp_path / "audit.json").read_text())["work"][0]["processed"] == told
