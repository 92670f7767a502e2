"""A short chaos run: a round of each kind of trouble, on real processes, a real Redis and a real S3 server."""

import random

import pytest

from chaos.run import FAULTS, run

SHORT = ("kill everything", "redis restarted empty", "store loses replies", "two of one name")


@pytest.mark.timeout(400)
def test_a_few_rounds_of_chaos_leave_the_log_whole_and_the_ledgers_balanced(tmp_path, monkeypatch):
    # Each round one fault, in this order; the long run draws them, `make chaos`.
    order = iter(SHORT)
    monkeypatch.setattr(random.Random, "sample", _first(random.Random.sample, order))
    said = []
    report = run(tmp_path, rounds=len(SHORT), seed=3, syncers=2, learners=2, say=said.append)
    assert report["violations"] == [], "\n".join(said)
    assert set(report["faults"]) == set(SHORT) <= set(FAULTS)
    assert report["injected"]["lost_replies"] > 0
    assert report["differ"] == 0
    assert report["replayed"] == report["commits"] > 20
    assert report["recovery_s"]["seen"] >= 1
    for ledger in report["ledger"].values():
        assert ledger["lives"] >= 2
        assert ledger["merged"] > 0


def _first(sample, order):
    """Let the choice of a round's faults be the next of an order; other draws stay draws."""

    def draw(self, population, k, **options):
        if list(population) == sorted(FAULTS):
            return [next(order)]
        return sample(self, population, k, **options)

    return draw
