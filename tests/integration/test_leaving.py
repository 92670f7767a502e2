"""A learner leaves a run well if it is interrupted at any moment, has a slow store, or is dropped without `close`."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isthmus
from isthmus.errors import InputError
from isthmus.format.rules import Pace, Rules
from isthmus.link import agent_thread
from isthmus.link.group import OneRank
from isthmus.store import files
from isthmus_services.processes import isthmus_command
from support import restarts

RULES, PACE = Rules(fragments=2, sync_every=4), Pace(heartbeat_s=0.2, silence_s=0.8)


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGINT, also in tests that a shell runs in its background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_model_with_an_open_link_is_not_joined_again(tmp_path: Path) -> None:
    """As by a cell of a notebook that is run twice: two links would write into one model."""
    link, model, optimizer = join(tmp_path)
    run = link.run.url

    def again(learner: str) -> isthmus.Link:
        return isthmus.join(run, model, optimizer, learner=learner)

    with pytest.raises(
        InputError, match=r"^this model has an open link already, of learner a: call its close\(\) first$"
    ):
        again("b")
    link.close(wait=0.0)
    with again("b") as other:
        other.wait = 0.0
    assert other.closed
    dropped = again("c")
    del dropped
    gc.collect()
    again("d").close(wait=0.0)


def test_the_link_of_a_forked_process_says_that_it_cannot_be_used(tmp_path: Path) -> None:
    link, _, _ = join(tmp_path)
    link._process += 1  # as in a child: forking this process, with its threads, could stop it
    with pytest.raises(InputError, match=r"was forked from it, .*: call join in the process that trains$"):
        link.step(tokens=2)
    link._process -= 1
    link.step(tokens=2)
    link.close(wait=0.0)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: nn.LazyLinear(2), "parameter 0.weight has no shape yet, since its layer is lazy: pass a batch"),
        (lambda: nn.Linear(2, 2, device="meta"), "parameter 0.weight is on the meta device, without numbers: give"),
    ],
)
def test_a_model_without_numbers_is_refused_with_what_to_do(
    layer: Callable[[], nn.Module], why: str, tmp_path: Path
) -> None:
    model = nn.Sequential(layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=f"^{re.escape(why)}"):
        isthmus.join(str(tmp_path / "run"), model, optimizer, learner="a", create=isthmus.Rules.suited)
    assert not (tmp_path / "run").exists()


def join(folder: Path, learner: str = "a", **given: Any) -> tuple[isthmus.Link, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = {"create": RULES, "pace": PACE} | given
    return isthmus.join(str(folder / "run"), model, optimizer, learner=learner, **given), model, optimizer


def step(link: isthmus.Link, model: nn.Module, optimizer: torch.optim.Optimizer, **given: Any) -> None:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    link.step(tokens=3, **given)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("isthmus-agent")]


def gone() -> None:
    end = time.monotonic() + 30
    while threads():
        assert time.monotonic() < end, threads()
        time.sleep(0.02)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds by which a read or write is delayed, by a word that its path contains."""
    delays: dict[str, float] = {}
    write, read = files.FileStore._write, files.FileStore._read

    def wait(path: object) -> None:
        time.sleep(max([seconds for word, seconds in delays.items() if word in str(path)], default=0.0))

    def slowly_write(self: Any, path: Any, *more: Any) -> Any:
        wait(path)
        return write(self, path, *more)

    def slowly_read(self: Any, path: Any, *more: Any) -> Any:
        wait(path)
        return read(self, path, *more)

    monkeypatch.setattr(files.FileStore, "_write", slowly_write)
    monkeypatch.setattr(files.FileStore, "_read", slowly_read)
    return delays


# --- interrupted ------------------------------------------------------------------------------------------------------


def test_an_interrupt_while_joining_leaves_no_thread(tmp_path: Path, slow: dict[str, float]) -> None:
    join(tmp_path)[0].close(wait=0)
    gone()
    slow["run"] = 0.3
    timer = threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        join(tmp_path)
    timer.join()
    slow.clear()
    gone()
    link, *_ = join(tmp_path)
    link.close(wait=0)


def test_an_interrupt_before_the_agent_has_begun_keeps_it_from_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isthmus.torch import model as torch_model

    monkeypatch.setattr(torch_model, "keep_denormals", lambda: time.sleep(1.5))
    timer = threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        join(tmp_path)
    timer.join()
    gone()
    assert not list(tmp_path.glob("run/**/claim"))


def test_a_loop_that_survives_interrupts_trains_and_sends_on(tmp_path: Path) -> None:
    link, model, optimizer = join(tmp_path)
    step(
        link, model, optimizer
    )  # torch makes the state of an optimizer in several lines, between which it is cut short
    stop = threading.Event()
    armed, interrupts = False, 0

    def interrupted(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    def interrupt() -> None:
        while not stop.wait(0.003):
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, interrupted)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        while interrupts <= 30:
            try:
                armed = True
                step(link, model, optimizer)
                armed = False
            except KeyboardInterrupt:
                interrupts += 1
                # An interrupt at the end of `optimizer.step` may come before torch switches gradients on again.
                torch.set_grad_enabled(True)
    finally:
        stop.set()
        thread.join()
    for _ in range(20):
        step(link, model, optimizer)
    before = {p.name for p in tmp_path.glob("run/updates/*/a/*")}
    end = time.monotonic() + 30
    while {p.name for p in tmp_path.glob("run/updates/*/a/*")} == before:
        assert time.monotonic() < end, "the learner sends no updates any more"
        step(link, model, optimizer)
        time.sleep(0.01)
    link.close(wait=0)


def test_a_second_interrupt_ends_the_wait_at_the_end(tmp_path: Path, slow: dict[str, float], caplog: Any) -> None:
    link, model, optimizer = join(tmp_path)
    step(link, model, optimizer)
    slow["checkpoints"] = 5.0
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        link.close()
    timer.join()
    assert "no checkpoint of step 1 was stored, its last: a restart goes on after step 0" in caplog.text
    assert str(link.summary) in caplog.messages


# --- a slow store -----------------------------------------------------------------------------------------------------


def test_the_last_checkpoint_is_waited_for(
    tmp_path: Path, slow: dict[str, float], caplog: Any, monkeypatch: Any
) -> None:
    for name in ("DRAIN_S", "CLOSE_S", "LEAVE_S"):
        monkeypatch.setattr(agent_thread, name, 0.1)
    link, model, optimizer = join(tmp_path)
    step(link, model, optimizer)
    slow["checkpoints"] = 2.0
    link.close(wait=0)
    assert "no checkpoint" not in caplog.text
    slow.clear()
    again, *_ = join(tmp_path)
    assert again.steps_done == 1
    again.close(wait=0)


def test_who_leaves_without_a_checkpoint_stores_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank leaves like this if another rank failed: the parts of the model may then be of different steps."""
    link, model, optimizer = join(tmp_path)
    for _ in range(3):
        step(link, model, optimizer)
    monkeypatch.setattr(OneRank, "alone", False)
    link._leave(done=False, well=False, wait_s=0.0)
    monkeypatch.undo()
    assert not [p for p in tmp_path.glob("run/checkpoints/**/*") if p.is_file()]
    link, *_ = join(tmp_path)
    assert link.steps_done == 0
    link.close(wait=0)


def test_what_could_not_be_stored_in_time_is_said(
    tmp_path: Path, slow: dict[str, float], caplog: Any, monkeypatch: Any
) -> None:
    link, model, optimizer = join(tmp_path)
    step(link, model, optimizer)
    restarts.store(link)
    step(link, model, optimizer)
    for name in ("DRAIN_S", "LAST_S", "CLOSE_S", "LEAVE_S"):
        monkeypatch.setattr(agent_thread, name, 0.1)
    monkeypatch.setattr(agent_thread, "LAST_BYTES_S", 1e12)
    slow["checkpoints"] = 60.0
    link.close(wait=0)
    assert "uploads and checkpoints under way did not finish within 0 s" in caplog.text
    assert "no checkpoint of step 2 was stored, its last: a restart goes on after step 1" in caplog.text
    gone()
    slow.clear()
    again, *_ = join(tmp_path)
    assert again.steps_done == 1, "no upload may go on after the warning"
    again.close(wait=0)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_short_run_hears_what_became_of_its_work(tmp_path: Path) -> None:
    link, model, optimizer = join(tmp_path, pace=Pace(heartbeat_s=0.2, silence_s=2.0))
    with open(tmp_path / "log", "wb") as log:
        syncer = subprocess.Popen(isthmus_command("syncer", str(tmp_path / "run")), stdout=log, stderr=log)
    try:
        end = time.monotonic() + 120
        while not all(link.versions):
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            step(link, model, optimizer)
            time.sleep(0.02)
        for _ in range(8):
            step(link, model, optimizer)
        link.close()
        assert not any(link._side.agent("uplink").uplink.attempts), "all updates must be answered"
    finally:
        syncer.terminate()
        syncer.wait(60)


def test_a_learner_that_is_told_to_wait_waits_for_a_syncer_that_is_away(tmp_path: Path) -> None:
    links = []
    for name in ("a", "b"):
        link, model, optimizer = join(tmp_path, name)
        for _ in range(8):
            step(link, model, optimizer)
        links.append(link)
    closing = [threading.Thread(target=link.close, kwargs={"wait": 240.0}) for link in links]
    for thread in closing:
        thread.start()
    with open(tmp_path / "log", "wb") as log:
        syncer = subprocess.Popen(isthmus_command("syncer", str(tmp_path / "run")), stdout=log, stderr=log)
    try:
        for thread in closing:
            thread.join(240)
    finally:
        syncer.terminate()
        syncer.wait(60)
    # Steps are so short here that a round may close with one of the two. The other's update is then late.
    assert any(link.summary.ledger.merged for link in links), (tmp_path / "log").read_text()


def test_where_no_syncer_is_heard_nobody_waits(tmp_path: Path) -> None:
    link, model, optimizer = join(tmp_path)
    for _ in range(8):
        step(link, model, optimizer)
    link.close()
    with pytest.raises(InputError, match="wait=-1"):
        link.close(wait=-1)


# --- without `close` --------------------------------------------------------------------------------------------------


def test_who_drops_a_link_lets_the_agent_go(tmp_path: Path) -> None:
    link, model, optimizer = join(tmp_path)
    step(link, model, optimizer)
    assert threads()
    del link
    gc.collect()
    gone()


def test_a_trainer_that_raises_lets_the_agent_go(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from isthmus.integrations.transformers import IsthmusCallback

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, at: int) -> dict[str, list[int]]:
            if at == 40:
                raise OSError("row 40 cannot be read")
            return {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}

    config = GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    settings = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=40, per_device_train_batch_size=2, report_to="none", use_cpu=True,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model=GPT2LMHeadModel(config), args=settings, train_dataset=Rows())
    callback = IsthmusCallback(str(tmp_path / "run"), learner="a", create=RULES, pace=PACE)
    with pytest.raises(OSError, match="row 40"):
        callback.into(trainer).train()
    gone()
    with pytest.raises(InputError, match="there is no link"):
        _ = callback.link


PROCESS = [sys.executable, "-m", "support.restarts"]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.tier("all"))])
def test_a_process_that_is_ended_by_a_signal_goes_on_with_the_same_bits(number: signal.Signals, tmp_path: Path) -> None:
    model, optimizer = "experts", "adamw"
    tests = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        [*PROCESS, str(tmp_path / "run"), model, optimizer, "12"], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline().startswith("stored 2")
        process.send_signal(number)
        process.stdout.read()
    assert process.wait(60) == (143 if number == signal.SIGTERM else -number)
    last = restarts.live(tmp_path / "run", model, optimizer, restarts.STEPS, "return")
    whole = restarts.uninterrupted(model, optimizer)
    assert 2 <= last.first < 12
    last.batches = whole.batches[: last.first] + last.batches
    assert restarts.differences(last, whole) == []
