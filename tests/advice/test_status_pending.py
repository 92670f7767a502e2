"""`status --check` fails while finished learners' work is not in the model, and its advice brings the work in."""

import re
import shlex
import time
from pathlib import Path

import pytest

from advice.rows import row
from e2e.test_processes import PACED, isthmus, processes
from isthmus_services.main import main

STEPS = "120"


def check(run: Path) -> tuple[int, str]:
    done = isthmus("status", str(run), "--check")
    assert done.stdout, done.stderr
    return done.returncode, done.stdout.splitlines()[0]


def commits(run: Path) -> int:
    return len(list((run / "commits").glob("*/*")))


@row(
    "status",
    "no learner trains: … of … learners are done; …; these learners left with tokens that no syncer answered, which are "
    "not in the model: …",
    means="No syncer was there when these learners ended. What they had sent since the last commit is in their checkpoints "
    "only. The number is that work's share of all their tokens.",
    like="A few per cent of pending tokens after a run that ended well: steps after the last update, which no round takes.",
    do="start them again with --wait-at-end 600 (a loop of your own: link.close(wait=600)) and, once they have joined, a "
    "syncer: isthmus syncer … --bus … --quorum …",
    then="The learners send the work again and end once it is merged; then the sentence is gone.",
    lost="nothing, if all of them are there before the syncer; else what comes after its round",
)
@pytest.mark.tier("all")
@pytest.mark.timeout(400)
def test_work_that_no_syncer_answered_is_named_and_its_advice_brings_it_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACED_STEP_S", "0.1")  # a round waits for a learner for so many steps
    run = tmp_path / "run"
    assert main(["init", str(run), "--model", "support.paced:small", "--sync-every", "12", "--quorum", "2"]) == 0
    learner = ("learner", str(run), *PACED, STEPS, "--learner")
    with processes(tmp_path) as p:
        syncer = p.isthmus("syncer", "syncer", str(run))
        learners = [p.isthmus(name, *learner, name) for name in ("a", "b")]
        until = time.monotonic() + 200
        while commits(run) < 12:
            assert time.monotonic() < until, p.said("syncer")
            time.sleep(0.05)
        syncer.kill()
        for process in learners:
            p.ends(process)
        code, said = check(run)
        assert code == 1
        advice = re.search(
            r"no syncer answered, which are not in the model: a \(\d+%\), b \(\d+%\); start them again with "
            r"(--wait-at-end 600) .*, once they have joined, a syncer: isthmus (.* --quorum 2)$",
            said,
        )
        assert advice, said
        again = [p.isthmus(f"{name} again", *learner, name, *advice[1].split()) for name in ("a", "b")]
        for name in ("a", "b"):
            while "joined" not in p.said(f"{name} again"):
                assert time.monotonic() < until, p.said(f"{name} again")
                time.sleep(0.05)
        p.isthmus("syncer again", *shlex.split(advice[2]))
        for process in again:
            p.ends(process)
        code, said = check(run)
    assert (code, said.partition(":")[0]) == (0, "no learner trains"), said
