"""Services log their start, a request to stop and their end. They log each commit only at debug level."""

import json
import re
import sys
from pathlib import Path

from e2e.test_processes import EXAMPLE, TOLD_TO_STOP, heads, init, isthmus, processes, wait_for


def messages(text: str) -> list[str]:
    """Return the messages of a log; fails if a line is not an event."""
    return [json.loads(line)["message"] for line in text.splitlines()]


def test_a_learner_and_a_syncer_say_how_it_went(folder: Path, tmp_path: Path) -> None:
    run = str(folder)
    assert init(run) == 0
    with processes(tmp_path) as p:
        syncer = p.isthmus("s", "syncer", run, "--name", "s1")
        learner = p.isthmus("l", "learner", run, "--learner", "l0", "--steps", "100000", "--shard", "1/4")
        wait_for(lambda: heads(run) > 10, "ten commits")
        learner.terminate()
        p.ends(learner, TOLD_TO_STOP)
        syncer.terminate()
        p.ends(syncer)
        of_learner, of_syncer = messages(p.said("l")), messages(p.said("s"))
    starts, joined, asked, ends = of_learner[0], of_learner[1], of_learner[-2], of_learner[-1]
    assert starts == f"l0 starts: {run}, 100000 steps in all, part 1 of 4 of the data"
    assert joined.startswith(f"l0 joined {run} (start 1 of this name)")
    assert asked == "l0 was asked to stop by SIGTERM: it finishes its step, completes its uploads and leaves"
    assert re.match(r"l0: [\d,]+ steps in ", ends)
    assert "read in" in of_syncer[0]
    assert of_syncer[-2] == "s1 was asked to stop by SIGTERM: merges under way are finished"
    assert re.fullmatch(r"s1 ends: \d+ commits, 0 races lost", of_syncer[-1])
    assert len([m for m in of_syncer if m.startswith("commit ")]) == 1, (
        "only the first commit is logged; a line per commit needs debug level"
    )


def test_a_syncer_says_its_commits_at_debug(folder: Path, tmp_path: Path) -> None:
    run = str(folder)
    assert init(run) == 0
    with processes(tmp_path) as p:
        syncer = p.isthmus("s", "syncer", run, "--log-level", "debug")
        learner = p.isthmus("l", "learner", run, "--learner", "l0", "--steps", "100000")
        wait_for(lambda: "merges 1 updates" in p.said("s"), "a commit that is told of")
        learner.terminate()
        p.ends(learner, TOLD_TO_STOP)
        syncer.terminate()
        p.ends(syncer)
        assert any(re.match(r"commit \d+/\d+ merges 1 updates", m) for m in messages(p.said("s")))


def test_a_syncer_says_in_what_its_pace_differs_from_the_runs(folder: Path, tmp_path: Path) -> None:
    run = str(folder)
    assert init(run) == 0
    with processes(tmp_path) as p:
        other = p.isthmus("other", "syncer", run, "--quorum", "3")
        same = p.isthmus("same", "syncer", run)
        wait_for(lambda: all("read in" in p.said(name) for name in ("other", "same")), "both serve")
        assert "at another pace than the run's (quorum 3 instead of 1)" in p.said("other")
        assert "another pace" not in p.said("same")
        for syncer in (other, same):
            syncer.terminate()
            p.ends(syncer)


def test_the_example_on_a_learner_that_is_done_has_nothing_left_to_do(folder: Path, tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        command = (sys.executable, str(EXAMPLE), str(folder), "--steps", "20", "--learner", "eu-1")
        p.ends(p.start("first", *command))
        p.ends(p.start("again", *command))
        assert "eu-1: 20 steps, nothing left to do, versions" in p.said("again")
        assert "Traceback" not in p.said("again")
    assert isthmus("status", str(folder), "--json", str(tmp_path / "s.json")).returncode == 0
    (row,) = json.loads((tmp_path / "s.json").read_text())["learners"]
    assert (row["incarnation"], row["step"], row["state"]) == (2, 20, "done")
