"""A learner whose updates are never merged says so while it trains, at its end, and by the command's exit code."""

import logging
import os
import subprocess
import threading
import traceback
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import isthmus
from isthmus.errors import Fenced, InputError, LayoutMismatch
from isthmus.format.rules import Rules
from support import forking

pytestmark = pytest.mark.tier("test")

RULES = Rules(fragments=2, sync_every=4)


def isthmus_(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return forking.isthmus(*arguments, environment={k: v for k, v in os.environ.items() if k[:8] != "ISTHMUS_"})


def join(folder: Path, model: nn.Module, **options: Any) -> isthmus.Link:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return isthmus.join(str(folder), model, optimizer, learner=options.pop("learner", "a"), create=RULES, **options)


def test_the_command_ends_with_a_code_of_its_own_and_says_why(folder: Path) -> None:
    done = isthmus_("init", str(folder))
    assert done.returncode == 0, done.stderr
    done = isthmus_("learner", str(folder), "--learner", "l0", "--steps", "12", "--log-format", "text")
    assert done.returncode == 3, done.stdout + done.stderr
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    assert "l0: 12 steps in" in last
    assert "NONE OF ITS WORK WAS MERGED" in last
    assert str(folder) in last


def test_a_loop_is_told_at_its_end(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), join(folder, nn.Linear(4, 2)) as link:
        for _ in range(6):
            link.step(tokens=torch.tensor(32), loss=torch.tensor(0.5))
    (found,) = [record for record in caplog.records if "6 steps" in record.getMessage()]
    assert found.levelno == logging.WARNING
    assert link.summary.never_merged
    assert link.summary.ledger.processed == 6 * 32


def test_a_signal_ends_the_wait_for_answers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a syncer no answer comes: the test would take days."""
    link = join(folder, nn.Linear(4, 2), checkpoint_s=60.0)
    for _ in range(6):
        link.step(tokens=32)
    with caplog.at_level(logging.INFO):
        threading.Timer(1.0, link.let_go).start()
        link.close(wait=1e6)
    assert link.summary.never_merged
    assert not any("could not publish the leave message" in message for message in caplog.messages)


def test_a_loss_that_is_no_number_is_told_once_and_leaves_no_checkpoint(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 2)
    with join(folder, model, checkpoint_s=0.05) as link:
        link.step(tokens=1, loss=0.5)
        for _ in range(3):
            link.step(tokens=1, loss=float("nan"))
        assert sum("the loss of step 2 is nan" in record.getMessage() for record in caplog.records) == 1
        with torch.no_grad():
            model.weight[0, 0] = float("nan")
        link.step(tokens=1, loss=0.4)
    assert "no checkpoint of step" in caplog.text
    assert not [key for key in folder.rglob("*") if "000005-" in key.name], "peers would reject the last step's"


def test_errors_come_from_join_and_step_in_one_line_of_their_own(folder: Path) -> None:
    def lines_of(error: Exception) -> str:
        return "".join(traceback.format_exception(error))

    with pytest.raises(InputError) as caught:
        join(folder, nn.Linear(4, 2).double())
    said = lines_of(caught.value)
    assert "asyncio" not in said
    assert "RunMissing" not in said
    with join(folder, nn.Linear(4, 2)):
        with pytest.raises(LayoutMismatch) as other:
            join(folder, nn.Linear(4, 3), learner="b")
        assert "asyncio" not in lines_of(other.value)


def test_who_was_taken_over_is_told_by_step_in_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with join(folder, nn.Linear(4, 2)) as old:
        with pytest.raises(InputError, match="another process of the name a, or an earlier join in this one, trains"):
            join(folder, nn.Linear(4, 2))
        with join(folder, nn.Linear(4, 2), takeover=True), pytest.raises(Fenced) as caught:
            while True:
                old.step(tokens=1)
    said = "".join(traceback.format_exception(caught.value))
    assert "asyncio" not in said
    assert "ExceptionGroup" not in said
    assert "Traceback" not in caplog.text


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_learners_of_one_run_need_not_be_wrapped_alike(folder: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 2))
    compiled = cast(nn.Module, torch.compile(nn.Sequential(nn.Linear(4, 2))))
    with join(folder, compiled) as a, join(folder, nn.DataParallel(plain), learner="b") as b:
        assert [t.spec.name for f in a.run.layout.fragments for t in f.tensors] == ["0.weight", "0.bias"]
        assert a.run.digest == b.run.digest
    for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(p, q)


def test_rules_are_what_create_takes(folder: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"create=True: pass the rules .* create=isthmus\.Rules\.suited"):
        isthmus.join(str(folder), model, optimizer, learner="a", create=True)  # type: ignore[arg-type]
    assert not folder.exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"run": ""}, "the address of the run is empty"),
        ({"run": 7}, r"join\(run=7\): pass a URL or a folder, not an int"),
        ({"bus": 6379}, r"join\(bus=6379\): pass a text, not an int"),
        ({"learner": 3}, r"join\(learner=3\): pass a text, not an int"),
        ({"checkpoint_s": "60"}, r"join\(checkpoint_s='60'\): pass seconds, not a str"),
        ({"steps": "300"}, r"join\(steps='300'\): pass a whole number, not a str"),
        ({"steps": 3.5}, r"join\(steps=3.5\): pass a whole number, not a float"),
        ({"warmup_steps": True}, r"join\(warmup_steps=True\): pass a whole number, not a bool"),
        ({"pace": {}}, r"join\(pace\): pass an isthmus.Pace, not a dict"),
        ({"state": object()}, r"join\(state\): pass a mapping by names of your own, such as .*, not an object"),
        ({"create": isthmus.Rules}, r"join\(create=Rules\): pass isthmus.Rules.suited, or rules"),
        ({"model": {}}, r"join\(model\): pass the module itself, not a dict"),
        ({"optimizer": torch.optim.SGD}, r"join\(optimizer\): pass an optimizer of the model's parameters, not a type"),
    ],
)
def test_what_join_is_given_is_of_the_type_that_it_takes(folder: Path, given: dict[str, Any], said: str) -> None:
    model = nn.Linear(4, 2)
    right = {"run": folder, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "learner": "a"}
    with pytest.raises(InputError, match=said):
        isthmus.join(**{**right, "create": isthmus.Rules.suited, **given})
    assert not folder.exists()


def test_a_run_may_be_given_as_a_path(folder: Path) -> None:
    model = nn.Linear(4, 2)
    with isthmus.join(
        folder, model, torch.optim.SGD(model.parameters(), lr=0.1), learner="a", create=isthmus.Rules.suited
    ) as link:
        assert link.run.url == str(folder)
