"""`status` names learners whose updates are too long, too heavy or refused, and losses that rise."""

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from isthmus.bus import BusItem
from isthmus.format.records.messages import (
    SYNCER_STREAM,
    Alive,
    encode,
    learner_stream,
)
from isthmus.inspect.bus_view import BusView
from isthmus.inspect.health_summary import Health, health
from isthmus.inspect.losses import Point
from isthmus.inspect.restarts import Restarts
from isthmus.inspect.status import Status
from isthmus.log import Commit
from isthmus.reasons import Clip
from support.healths import COMMITTED_AT, NOW, RUN, alive, beat, commit, left, looked


def test_a_learner_that_restarts_in_vain_is_named() -> None:
    found = looked(beat("a"), alive(), restarts={"a": Restarts(4, 1822)})
    assert (found.ok, found.said) == (
        False,
        "a has joined 4 times since its last checkpoint and went on after step 1822 each time: "
        "two processes have its name, or it dies before it can store one; its log says which; 1 of 1 learners merge",
    )
    assert "has joined at least 8 times" in looked(beat("a"), alive(), restarts={"a": Restarts(8, 0)}).said


def test_a_rising_loss_is_named_while_it_lasts() -> None:
    low, high = [Point(float(k), 2.0) for k in range(16)], [Point(16.0 + k, 3.0) for k in range(8)]
    found = looked(beat("a"), alive(), losses={"a": [*low, *high], "b": low})
    assert not found.ok
    assert found.said == (
        "the loss of a rises: 3 or more in its newest updates, 2 at its lowest; look at its data, or start it again "
        "with a lower learning rate (hyperparameters='passed'); isthmus replay r draws all losses; 1 of 1 learners merge"
    )
    # A learner that left long ago is not reported for its last losses.
    assert looked(beat("a"), alive(), losses={"a": [*low, *high], "b": [*low, Point(99.0, 2.0)]}).ok
    assert looked(beat("b"), left("a", done=False), alive(), losses={"a": [*low, *high]}).ok
    # Once all have left, what they ended with is what there is.
    ended = looked(left("a", done=True), losses={"a": [*low, *high]})
    assert (ended.ok, ended.said.split(":")[0]) == (False, "the loss of a rose to its end")
    assert looked(losses={"a": [*low, *high]}).said.count("rises") == 1, "of a learner on another bus nothing is known"


def test_a_learner_with_the_weight_but_not_the_work_is_named() -> None:
    def of_inputs(*heads: Sequence[tuple[str, float, int]], short: Collection[str] = ()) -> Health:
        hearing = BusView(RUN)
        for said in (beat("a"), beat("b"), alive()):
            stream = SYNCER_STREAM if isinstance(said, Alive) else learner_stream(said.learner)
            hearing.take(stream, BusItem("1-0", encode(said)), 1.0)
        commits = []
        for p, of in enumerate(heads):
            cut = dict.fromkeys(short, (Clip.SHORT,))
            inputs = [
                SimpleNamespace(learner=n, scale=1.0, weight=w, tokens=t, loss=None, norm=0.0, clipped=cut.get(n, ()))
                for n, w, t in of
            ]
            header = SimpleNamespace(written_at=COMMITTED_AT, fragment=p, inputs=inputs, rejected=(), healed=None)
            commits.append(SimpleNamespace(header=header, version=0))
        return health(Status(hearing, cast("list[Commit | None]", commits), "", 0.0, NOW), "r", "b")

    found = of_inputs(
        [("a", 96.0, 100), ("b", 4.0, 100)], [("a", 5.0, 70), ("a", 7.0, 30), ("b", 1.0, 50)], [("b", 1.0, 1)]
    )
    assert not found.ok
    assert found.said == (
        "a has 94% of the weight of the newest rounds, with 58% of their tokens: the others "
        "hardly count; isthmus explain r 1/0 shows the weights of a round and why; stop or expel a if it should not "
        "count for so much; 2 of 2 learners merge"
    )
    few = [("a", 96.0, 50), ("b", 2.0, 25), ("c", 2.0, 25)]
    assert of_inputs(few, short="bc").said.startswith(
        "b, c hardly move: 4% of the weight of the newest rounds, with 50%"
    )
    assert of_inputs(few, short="b").said.startswith("a has 96% of the weight")
    assert of_inputs(few[:2], few[:2], short="b").said.startswith("b hardly moves: 2% of the weight")
    assert of_inputs([("a", 96.0, 76), ("b", 4.0, 24)]).ok  # it is faster
    assert of_inputs([("a", 90.0, 50), ("b", 10.0, 50)]).ok
    assert of_inputs([("a", 1.0, 1)], [("a", 1.0, 1)]).ok


def test_learners_that_are_rejected_for_their_manifest_are_named() -> None:
    """Of learners that train, and of those that have left without anything being merged."""
    away = {"b": "no-manifest", "c": "no-manifest", "d": "source-not-allowed"}
    hearing = BusView(RUN)
    for said in (beat("a"), beat("b", "a merge (every update is rejected: no-manifest)"), alive(turned_away=away)):
        stream = SYNCER_STREAM if isinstance(said, Alive) else learner_stream(said.learner)
        hearing.take(stream, BusItem("1-0", encode(said)), 1.0)
    status = Status(hearing, [None], "", 0.0, NOW)
    found = health(status, "r", "b")
    assert (found.ok, found.count) == (False, "1 of 2 learners merge")
    (one, other) = found.parts
    assert str(one).startswith("updates of b, c are rejected for their manifest (no-manifest); the charter asks for a")
    assert str(other).startswith("updates of d are rejected for their manifest (source-not-allowed); ")
    for name in ("a", "b"):
        hearing.take(learner_stream(name), BusItem("2-0", encode(left(name, True))), 2.0)
    over = health(status, "r", "b")
    assert not over.ok
    assert "updates of b, c are rejected for their manifest (no-manifest)" in over.said
    assert status.as_json()["syncers"][0]["turned_away"] == away  # type: ignore[index]


def test_a_learner_that_explodes_is_named() -> None:
    def of_commits(*heads: Commit | None, waits: str = "") -> Health:
        hearing = BusView(RUN)
        for said in (beat("a"), beat("b", waits), alive()):
            stream = SYNCER_STREAM if isinstance(said, Alive) else learner_stream(said.learner)
            hearing.take(stream, BusItem("1-0", encode(said)), 1.0)
        return health(Status(hearing, list(heads), "", 0.0, NOW), "r", "b")

    found = of_commits(
        commit(COMMITTED_AT, 0, a=1.0, b=1e-3), commit(COMMITTED_AT, 1, a=0.4, b=2e-3), commit(COMMITTED_AT, 2, a=1.0, b=1.0), None
    )  # fmt: skip
    assert not found.ok
    advice = (
        "; stop it by SIGTERM, so that it leaves (a loop of your own leaves if it closes its link then), lower the learning rate or "
        "clip gradients, and start it under a new name (in a signed run an owner adds that: isthmus create once more, with "
        "--learner NAME, or isthmus members add), so that it begins with the run's model instead of its own checkpoint; the owner can expel it"
    )
    assert found.said == (
        "b explodes: of its 3 newest updates, 2 cut to less than a quarter of their length (the "
        "shortest to 0.001); the table of learners shows its loss, isthmus explain r 0/0 such a "
        f"round{advice}; 1 of 2 learners merge"
    )
    # Nothing else is said of it while a part of its updates is rejected, merged or cut.
    mixed = [commit(COMMITTED_AT, p, 7, [("b", "too-long")] if p < 2 else (), a=1.0, b=0.5) for p in range(4)]
    found = of_commits(*mixed, waits="a merge (every update is rejected: too-long)")
    assert found.said == (
        "b explodes: of its 6 newest updates, 2 rejected (too-long); the table of learners shows its loss, isthmus explain r 0/7 such a round"
        f"{advice}; 1 of 2 learners merge"
    )
    assert of_commits(commit(COMMITTED_AT, 0, 0, [("b", "stale"), ("b", "stale")], a=1.0)).ok
    # A learner that is cut a little, as first and last updates are, is not reported.
    assert of_commits(commit(COMMITTED_AT, 0, a=0.4), commit(COMMITTED_AT, 1, a=1.0)).ok
    assert of_commits(commit(COMMITTED_AT, 0, a=0.6, b=1.0)).ok
    assert of_commits(commit(COMMITTED_AT, 0, a=0.2, b=1.0)).ok
    # While learning rates are warmed up, first updates are compared with far shorter ones.
    young = [commit(COMMITTED_AT, p, 1 + p, a=0.044, b=1.0) for p in range(3)]
    assert of_commits(*young).ok
    assert not of_commits(*young, commit(COMMITTED_AT, 3, 4, a=0.044, b=1.0)).ok
    # Nor is one that trained on alone after a restart.
    assert of_commits(commit(COMMITTED_AT, 0, a=0.29, b=1.0), commit(COMMITTED_AT, 1, a=0.3, b=1.0)).ok
    assert not of_commits(commit(COMMITTED_AT, 0, a=0.05, b=1.0)).ok
    # Nor one with long rounds beside the short updates of others, or beside none.
    for norm, well in ((15.0, True), (60.0, False)):
        beside = [commit(COMMITTED_AT, 0, 8, a=1.0), commit(COMMITTED_AT, 0, 9, b=0.083)]
        for one, length, steps in zip(beside, (1.0, norm), (5, 27), strict=True):
            vars(one.header.inputs[0]).update(norm=length, steps=steps)
        assert of_commits(*beside).ok == well
        assert of_commits(beside[1]).ok
    # What it sent itself does not show that its other updates are usual.
    mild = [commit(COMMITTED_AT, 0, 8 + n, a=1.0, b=scale) for n, scale in enumerate((0.1, 0.3, 0.2, 0.24))]
    for one in mild:
        for given, length in zip(one.header.inputs, (1.0, 30.0), strict=True):
            vars(given).update(norm=length, steps=5)
    assert "b explodes: of its 4 newest updates, 3 cut" in of_commits(*mild).said
    # What explodes on and on is cut by less, since its own updates count as usual, too. A few such cuts are none.
    for many, well in ((7, True), (8, False)):
        mild = [commit(COMMITTED_AT, 0, 8 + n, a=1.0, b=0.34 if n else 1.0) for n in range(many)]
        for one in mild:
            for given, length in zip(one.header.inputs, (1.0, 12.0), strict=True):
                vars(given).update(norm=length, steps=5)
        found = of_commits(*mild)
        assert found.ok == well
    assert (
        "b explodes: of its 8 newest updates, 7 cut to less than half of their length (the shortest to 0.34)"
        in found.said
    )
    # A learner that is gone is no longer to be stopped.
    assert of_commits(commit(COMMITTED_AT, 0, a=1.0, c=0.05)).ok


def test_what_a_learner_moved_counts_over_its_restarts() -> None:
    hearing = BusView(RUN)
    for life, up in [(1, 70), (1, 100), (2, 5), (1, 101)]:
        said = msgspec.structs.replace(beat("a"), incarnation=life, bytes_up=up)
        hearing.take(learner_stream("a"), BusItem("1-0", encode(said)), 1.0)
    assert hearing.learners["a"].traffic == (105, 2, 0)


LOW, HIGH = [Point(float(t), 2.0) for t in range(40)], [Point(float(t), 2.0 / (1 + t)) for t in range(40)]


def long_steps(
    *updates: tuple[int, str, float, int],
    losses: Mapping[str, Sequence[Point]] | None = None,
    scale: float = 1.0,
    weight: float = 1.0,
    ended: bool = False,
) -> Health:
    """Return the health of a run whose newest commits have these inputs: fragment, learner, length, steps.

    `scale`, `weight`: of a's updates. Of the learners only z is away. `ended`: all of them have left.
    """
    names = sorted({name for _, name, _, _ in updates} - {"z"})
    commits = []
    for version, (fragment, name, norm, steps) in enumerate(updates, 20):
        merged = commit(COMMITTED_AT, fragment, version, (), None, **{name: scale if name == "a" else 1.0})
        vars(merged.header.inputs[0]).update(norm=norm, steps=steps)
        commits.append(merged)
    hearing = BusView(RUN)
    hearing.take(SYNCER_STREAM, BusItem("1-0", encode(alive())), 1.0)
    for name in names:
        hearing.take(learner_stream(name), BusItem("1-0", encode(left(name, True) if ended else beat(name))), 1.0)
    head = commit(COMMITTED_AT, 0, 0, (), None, **dict.fromkeys(names, 1.0))
    for given in head.header.inputs:
        vars(given).update(weight=weight if given.learner == "a" else 1.0)
    return health(Status(hearing, [head], "", 0.0, NOW, losses=losses or {}, recent=commits), "r", "b")


@pytest.mark.parametrize(
    ("count", "norm", "steps", "named"),
    [
        (8, 6.0, 4, True),
        (7, 6.0, 4, False),  # too few to judge by
        (8, 5.0, 4, False),
        (8, 6.0, 8, False),  # twice the steps explain half of it
        (8, 6.0, 3, True),  # fewer steps explain nothing
    ],
)
def test_updates_that_are_much_longer_than_the_others_are_named(
    count: int, norm: float, steps: int, named: bool
) -> None:
    found = long_steps(*[(0, "a", norm, steps)] * count, (0, "b", 1.0, 4), (0, "b", 0.1, 4), (0, "b", 1.5, 4))
    assert found.ok
    assert found.said.startswith("the newest updates of a are 6 times as long as the others', for as many steps") == (
        named and steps == 4
    )
    assert ("updates of a are" in found.said) == named
    assert "isthmus explain r 0/" in found.said or not named
    assert "of b" not in found.said


def test_updates_are_compared_with_those_of_the_same_fragment() -> None:
    long = [(0, "a", 9.0, 4)] * 9
    assert "times as long" not in long_steps(*long, (1, "b", 1.0, 4)).said
    assert "of a are 9 times as long" in long_steps(*long, (0, "b", 1.0, 4), (1, "b", 9.0, 4)).said
    assert "times as long" not in long_steps(*long, (0, "b", 8.0, 4)).said
    # The usual one is in the middle by length per step, of those that state a length, of learners that train.
    others = [(0, "b", 4.0, 40), (0, "b", 1.0, 4), (0, "b", 3.0, 4)]
    assert "of a are 9 times as long" in long_steps(*long, *others, *[(0, "b", 0.0, 4)] * 3).said
    assert "of a are 9 times as long" in long_steps(*long, *others, *[(0, "z", 9.0, 4)] * 9).said
    assert "of z" not in long_steps((0, "a", 1.0, 4), (0, "b", 1.0, 4), *[(0, "z", 9.0, 4)] * 9).said


def test_long_updates_are_a_failure_if_no_loss_has_fallen() -> None:
    updates = [*[(0, "a", 9.0, 4)] * 9, (0, "b", 1.0, 4)]
    failed = long_steps(*updates, losses={"a": LOW, "b": LOW})
    assert not failed.ok
    assert "for as many steps, and no loss has fallen: 2 at first, 2 in the newest updates" in failed.said
    for losses in ({"a": LOW, "b": HIGH}, {"a": HIGH, "b": LOW}, {"a": LOW[:3], "b": LOW}, {}):
        found = long_steps(*updates, losses=losses)
        assert (found.ok, "of a are 9 times as long" in found.said, "no loss" in found.said) == (True, True, False)
    assert failed.said.count("times as long") == 1
    high = [Point(point.at, 3.0) for point in LOW]
    assert "fallen: 2 at first, 2 in" in long_steps(*updates, losses={"a": high, "b": LOW}).said
    assert "times as long" not in long_steps(*updates, losses={"a": LOW, "b": LOW}, scale=0.01).said, "it explodes"
    heavy = long_steps(*updates, losses={"a": LOW, "b": LOW}, weight=99.0).said
    assert ("the others hardly count" in heavy, "times as long" in heavy) == (True, False)
    for losses, ok in (({"a": LOW, "b": LOW}, False), ({"a": LOW, "b": HIGH}, True)):
        over = long_steps(*updates, losses=losses, ended=True)
        assert (over.ok, "times as long" in over.said) == (ok, not ok), over.said
