"""`status --check` fails while finished learners' work is not in the model, and its advice brings the work in."""

import re
import shlex
import time
from pathlib import Path

import pytest

from advice.followed import advises, mine
from advice.rows import row
from e2e.test_processes import PACED, isthmus, processes
from isthmus.reasons import LATE_WORK
from isthmus_services.commands.learner import NEVER_MERGED
from isthmus_services.main import main

STEPS = "120"


BRING_IN = (
    f"bring their work in soon ({LATE_WORK}): start them again with --wait-at-end 600 (a loop of your own: "
    "link.close(wait=600)) and, once they have joined, a syncer: isthmus syncer … --bus …"
)
LATE = (
    "no token, if all of them are there before the syncer, or else what comes more than `staleness` versions after it; but of a long update a part. In "
    "one trial, updates with eight times the usual steps kept 4 % to 100 % of their length (half of them over 50 %), and "
    "38 % to 100 % of their weight"
)


def check(run: Path) -> tuple[int, str]:
    done = isthmus("status", str(run), "--check")
    assert done.stdout, done.stderr
    return done.returncode, done.stdout.partition(f"\n{run}: run ")[0]


def commits(run: Path) -> int:
    return len(list((run / "commits").glob("*/*")))


@row(
    "status",
    "no learner trains: … of … learners are done; …; … left with tokens that no syncer answered, which are not in the model",
    means="No syncer was there when these learners ended. What they had sent since the last commit is in their checkpoints "
    "only. The number is that work's share of all their tokens.",
    like="A few per cent of pending tokens after a run that ended well: steps after the last update, which no round takes.",
    do=BRING_IN,
    then="The learners send the work again and end once it is merged; then the sentence is gone. `isthmus explain …` says "
    "for each update to which part of its weight and of its length it was cut.",
    lost=LATE,
)
@row(
    "log",
    "…: … steps in …; … sent and not answered (…; WHAT WAS NOT ANSWERED IS NOT IN THE MODEL: start this learner and the others "
    "again soon, with close(wait=600) or --wait-at-end 600, and then a syncer; … (`isthmus explain … FRAGMENT/VERSION` says for "
    "how much)",
    means="The learner has ended, and no syncer answered its last updates: in parentheses stands why. They are in the store, and "
    "in its checkpoint.",
    like="`that goes on when this learner comes back`: little is open, as at every end.",
    do="start this learner and the others again soon, with close(wait=600) or --wait-at-end 600, and then a syncer",
    then="At its end the learner says which share was merged, and the words are gone. `isthmus status` names a syncer's command.",
    lost=LATE,
)
@pytest.mark.tier("all")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("served", [True, False], ids=["served for a while", "never served"])
def test_work_that_no_syncer_answered_is_named_and_its_advice_brings_it_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    monkeypatch.setenv("PACED_STEP_S", "0.1")  # a round waits for a learner for so many steps
    run = tmp_path / "run"
    assert main(["init", str(run), "--model", "support.paced:small", "--sync-every", "12", "--quorum", "2"]) == 0
    learner = ("learner", str(run), *PACED, STEPS, "--learner")
    with processes(tmp_path) as p:
        syncer = p.isthmus("syncer", "syncer", str(run)) if served else None
        learners = [p.isthmus(name, *learner, name) for name in ("a", "b")]
        until = time.monotonic() + 200
        if syncer is not None:
            while commits(run) < 12:
                assert time.monotonic() < until, p.said("syncer")
                time.sleep(0.05)
            syncer.kill()
        for process in learners:
            p.ends(process, code=0 if served else NEVER_MERGED)
        unanswered = mine(test_work_that_no_syncer_answered_is_named_and_its_advice_brings_it_in)[1]
        if served:
            advises(unanswered, p.said("a"))
        code, said = check(run)
        assert code == 1
        advice = re.search(
            r"(?:a \(\d+%\), b \(\d+%\) left with tokens that no syncer answered, which are not in the model|is not in the run)\n  → .*: start them again with "
            r"(--wait-at-end 600) .*, once they have joined, a syncer: isthmus (.*)$",
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
        assert "NOT IN THE MODEL" not in p.said("a again")
        code, said = check(run)
        newest = max((run / "commits" / "00000").iterdir()).relative_to(run)
        told = isthmus("explain", str(run), str(newest)).stdout
    assert all(
        re.search(rf"in \d: {name} .* steps, [\d,]+ tokens, length [\d.e-]+, [\d.]+% of the weight", told)
        for name in "ab"
    ), told
    assert (code, said.partition(":")[0]) == (0, "no learner trains"), said
