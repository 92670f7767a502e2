"""A run survives a few kinds of faults on real processes, a real Redis and a real S3 server."""

from pathlib import Path

import pytest

from chaos.run import FAULTS, run

SHORT = ("kill everything", "redis restarted empty", "store loses replies", "two of one name")
HOSTILE = (
    "store of one syncer cut",
    "one learner's objects denied",
    "one learner floods",
    "merged updates overwritten",
)


@pytest.mark.timeout(400)
def test_a_few_rounds_of_chaos_leave_the_log_whole_and_the_ledgers_balanced(tmp_path: Path) -> None:
    said: list[str] = []
    report = run(tmp_path, rounds=3, seed=3, syncers=2, learners=2, deck=SHORT * 2, forked=True, say=said.append)
    assert report["violations"] == [], "\n".join(said)
    assert set(report["faults"]) <= set(SHORT) <= set(FAULTS)
    assert report["differ"] == 0
    assert report["replayed"] + report["unverifiable"] == report["commits"] > 20
    for ledger in report["ledger"].values():
        assert ledger["merged"] > 0


@pytest.mark.timeout(400)
def test_no_learner_and_no_half_dead_syncer_stops_the_others(tmp_path: Path) -> None:
    said: list[str] = []
    report = run(tmp_path, rounds=4, seed=5, syncers=2, learners=3, deck=HOSTILE * 3, forked=True, say=said.append)
    assert report["violations"] == [], "\n".join(said)
    assert report["differ"] == 0
    assert report["replayed"] + report["unverifiable"] == report["commits"] > 10
