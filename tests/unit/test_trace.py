"""The timeline has arrows from each update to the commit that merged it, and from each version to training on it."""

from collections.abc import Iterable
from typing import Any

from isthmus.format.records.objects import CommitHeader
from isthmus.inspect.trace import SYNCERS, trace
from support.commits import committed, given

LOG = [
    committed(1, given("a", 0, 1), given("b", 0, 1)),
    committed(2, given("a", 1, 2)),
    # The update of b is one version late: b trained from version 1 while version 2 was made.
    committed(3, given("b", 1, 3), given("a", 2, 3)),
    committed(4),
    committed(1, given("a", 0, 1), p=1),
]


Event = dict[str, Any]


def events_of(log: Iterable[CommitHeader]) -> list[Event]:
    events = trace(log)["traceEvents"]
    assert isinstance(events, list)
    return events


def arrows(kind: str) -> list[tuple[str, Event, Event]]:
    """Return the name, the first span and the last span of each arrow of a kind."""
    events = events_of(LOG)
    spans = {(e["pid"], e["tid"], e["ts"]): e for e in events if e["ph"] == "X"}
    ends: dict[int, dict[str, Event]] = {}
    for e in events:
        if e["ph"] in "sf" and e["name"].startswith(kind):
            ends.setdefault(e["id"], {})[e["ph"]] = e
    place = [(both["s"], both["f"]) for both in ends.values()]
    return [
        (s["name"], spans[s["pid"], s["tid"], s["ts"]], spans[f["pid"], f["tid"], f["ts"]])
        for s, f in place
        if s["name"] == f["name"]
    ]


def learner(event: Event) -> str:
    names: dict[int, str] = {e["pid"]: e["args"]["name"] for e in events_of(LOG) if e["name"] == "process_name"}
    return names[event["pid"]]


def test_a_version_points_to_every_training_that_has_it_as_its_base() -> None:
    found = arrows("adopt")
    for name, source, target in found:
        place = name.removeprefix("adopt ")
        fragment, version = map(int, place.split("/"))
        assert source["name"] == f"publish {place}"
        assert target["name"] == f"train {place}"
        assert target["args"]["base"] == version
        assert target["args"]["key"].startswith(f"updates/{fragment:05d}/")
    assert sorted((name, learner(target)) for name, _, target in found) == [
        ("adopt 0/1", "learner a"),
        ("adopt 0/1", "learner b"),
        ("adopt 0/2", "learner a"),
    ]


def test_every_input_points_to_the_merge_it_went_into() -> None:
    found = arrows("merge")
    assert sorted((name, learner(source)) for name, source, _ in found) == sorted(
        (f"merge {h.fragment}/{h.version}", f"learner {i.learner}") for h in LOG for i in h.inputs
    )
    for name, source, target in found:
        assert (target["pid"], target["name"]) == (SYNCERS, name)
        assert source["name"] == name.replace("merge", "wait")
        assert source["args"]["merged into"] == int(name.split("/")[1])


def test_a_commit_without_inputs_is_a_round_without_arrows() -> None:
    events = events_of(LOG)
    assert "round 0/4" in {e["name"] for e in events}
    assert not [e for e in events if e["name"] in ("merge 0/4", "adopt 0/4") and e["ph"] in "sf"]
    assert events_of([committed(1)])
