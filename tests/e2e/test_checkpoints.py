"""A training loop that resumes from a checkpoint continues with the same batches, moments and local work."""

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import isthmus
from isthmus.errors import InputError
from isthmus.format.rules import Pace, Rules
from isthmus.store import files
from isthmus_services.processes import isthmus_command

pytestmark = pytest.mark.tier("test")

RULES = Rules(fragments=2, sync_every=4)
PACE = Pace(heartbeat_s=0.2, silence_s=0.8)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loader(seed: int = 3) -> StatefulDataLoader:
    """Return a loader of torchdata over shuffled numbers."""
    generator = torch.Generator().manual_seed(seed)
    return StatefulDataLoader(list(range(4000)), batch_size=4, shuffle=True, generator=generator)


def endless(data: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Repeat the data, epoch after epoch."""
    while True:
        yield from data


class Trainer:
    """A training loop that records the batches it saw."""

    def __init__(
        self,
        folder: Path,
        learner: str = "a",
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        data: bool = True,
        **options: Any,
    ) -> None:
        self.model = net()
        self.optimizer = optimizer(self.model.parameters(), lr=options.pop("lr", 1e-2))
        self.data = loader() if data else None
        options.setdefault("create", RULES)
        options.setdefault("pace", PACE)
        self.link = isthmus.join(str(folder), self.model, self.optimizer, learner=learner, data=self.data, **options)
        self.batches: list[list[int] | None] = []

    def steps(self, count: int) -> "Trainer":
        for batch in itertools.islice(self.stream(), count):
            self.batches.append(batch.tolist() if self.data is not None else None)
            self.model(
                torch.randn(3, 4, generator=torch.Generator().manual_seed(self.link.steps_done))
            ).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.link.step(tokens=10, loss=1.0)
        return self

    def stream(self) -> Iterator[torch.Tensor]:
        if not hasattr(self, "_stream"):
            self._stream = endless(self.data) if self.data is not None else itertools.repeat(torch.zeros(1))
        return self._stream

    def moments(self) -> list[torch.Tensor]:
        return [
            self.optimizer.state[p]["exp_avg"].clone() for p in self.model.parameters() if p in self.optimizer.state
        ]


def uninterrupted(count: int) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(endless(loader()), count)]


def test_batches_moments_and_weights_go_on_where_they_were(folder: Path) -> None:
    first = Trainer(folder).steps(23)
    weights = [p.detach().clone() for p in first.model.parameters()]
    moments = first.moments()
    first.link.close()
    second = Trainer(folder)
    assert second.link.moments == "own"
    assert second.link.steps_done == 23
    assert second.link.rate == 1.0
    # No syncer ran, so the local work of 23 steps and Adam's moments must have been restored.
    assert all(torch.equal(a, b) for a, b in zip(weights, second.model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(moments, second.moments(), strict=True))
    second.steps(14)
    second.link.close()
    assert first.batches + second.batches == uninterrupted(37), "no batch is repeated, and none is skipped"


def test_a_crash_goes_back_to_the_last_checkpoint_with_everything(folder: Path) -> None:
    one = Trainer(folder, checkpoint_s=0.2)
    while len(list(folder.glob("learners/a/*/checkpoints/*"))) < 2:
        one.steps(1)
        time.sleep(0.02)
    copy = folder.parent / "crashed"
    shutil.copytree(folder, copy)  # a crash leaves only what the store holds at this moment
    one.link.close()
    two = Trainer(copy)
    done = two.link.steps_done
    assert 0 < done <= len(one.batches)
    two.steps(10)
    assert two.batches == uninterrupted(done + 10)[done:]
    two.link.close()


class Wide:
    """A learner with arrays so large that its checkpoint stores them in a part."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.link = isthmus.join(str(folder), self.model, self.optimizer, learner="a", create=RULES, pace=PACE)

    def moments(self) -> list[torch.Tensor]:
        return [v.clone() for p in self.model.parameters() for v in self.optimizer.state[p].values()]

    def train(self) -> list[torch.Tensor]:
        """Take two steps and leave; return the moments at the end."""
        for _ in range(2):
            self.model(torch.ones(1, 256)).sum().backward()
            self.optimizer.step()
            self.link.step(tokens=1)
        self.link.close(wait=0)
        return self.moments()


def test_a_restart_reads_large_arrays_one_at_a_time_and_a_damaged_one_costs_its_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond what it restores, a restart needs the memory of a few arrays, not of a second checkpoint."""
    read: list[int] = []
    own = files.FileStore._read

    def noted(self: Any, path: Path, *where: Any) -> Any:
        body = own(self, path, *where)
        if "checkpoints" in str(path):
            read.append(len(body))
        return body

    monkeypatch.setattr(files.FileStore, "_read", noted)
    first = Wide(folder).train()
    second, array = Wide(folder), 256 * 256 * 4
    assert second.link.steps_done == 2
    assert all(map(torch.equal, second.moments(), first))
    assert sum(read) > 12 * array, "it reads four weights, with two moments each"
    assert max(read) < 3 * array, "the largest read is a fragment: two weights and their biases"
    second.train()
    (part,) = folder.glob("learners/a/*2/checkpoints/parts/*")
    blob = bytearray(part.read_bytes())
    blob[-64] ^= 1
    part.write_bytes(blob)
    third = Wide(folder)
    assert third.link.steps_done == 2
    assert all(map(torch.equal, third.moments(), first))
    assert "are not what was written" in caplog.text
    third.link.close(wait=0)


def test_without_data_the_loop_starts_at_steps_done(folder: Path) -> None:
    Trainer(folder, data=False).steps(5).link.close()
    again = Trainer(folder, data=False)
    assert again.link.steps_done == 5
    again.link.close()


@pytest.fixture
def in_flight(folder: Path, tmp_path: Path) -> Iterator[Trainer]:
    """Create a run with a syncer, and a learner that has stored a checkpoint and left."""
    import subprocess

    veteran = Trainer(folder, "veteran")
    with open(tmp_path / "s.log", "wb") as log:
        syncer = subprocess.Popen(isthmus_command("syncer", str(folder)), stdout=log, stderr=log)
    try:
        end = time.monotonic() + 240
        while not all(veteran.link.versions):
            assert time.monotonic() < end, (tmp_path / "s.log").read_text()
            veteran.steps(1)
            time.sleep(0.02)
        veteran.link.close()
        yield veteran
    finally:
        syncer.terminate()
        syncer.wait(60)


def test_a_newcomer_takes_moments_from_the_store_or_warms_up(in_flight: Trainer, folder: Path) -> None:
    newcomer = Trainer(folder, "newcomer", lr=5e-3)
    assert newcomer.link.moments == "peer"
    assert newcomer.link.steps_done == 0
    assert newcomer.link.rate == 1.0
    assert all(torch.equal(a, b) for a, b in zip(in_flight.moments(), newcomer.moments(), strict=True))
    assert newcomer.optimizer.param_groups[0]["lr"] == 5e-3, "moments come from the peer, settings do not"
    newcomer.link.close()
    # The moments do not fit another optimizer, so its learning rate warms up from the start.
    odd = Trainer(folder, "odd", optimizer=torch.optim.SGD, data=False, warmup_steps=10)
    assert odd.link.moments == "fresh"
    rates = []
    for _ in range(12):
        rates.append(odd.link.rate)
        odd.steps(1)
    assert rates == [pytest.approx(min(1.0, (i + 1) / 10)) for i in range(12)]
    odd.link.close()


def test_at_the_start_of_a_run_there_is_no_warm_up(folder: Path) -> None:
    first = Trainer(folder)
    assert (first.link.moments, first.link.rate) == ("fresh", 1.0)
    first.link.close()


def test_a_checkpoint_of_another_optimizer_is_passed_over_aloud(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    Trainer(folder, data=False).steps(3).link.close()
    other = Trainer(folder, optimizer=torch.optim.SGD, data=False)
    assert other.link.moments == "fresh"
    assert other.link.steps_done == 3
    assert "is not used: it is of a torch.optim.adamw.AdamW" in caplog.text
    other.link.close()


class Odd:
    def state_dict(self) -> dict[str, Any]:
        return {"things": 2j}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("never saved")


def test_a_sampler_whose_state_is_no_plain_data_is_named(folder: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"data\['things'\] is a builtins.complex"):
        isthmus.join(str(folder), model, optimizer, learner="a", create=RULES, data=Odd())
    assert not any(t.name.startswith("isthmus") for t in threading.enumerate())


@pytest.mark.parametrize("options", [{"checkpoint_s": 0.0}, {"checkpoint_s": float("nan")}, {"warmup_steps": -1}])
def test_odd_settings_are_refused(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="checkpoint_s"):
        Trainer(folder, data=False, **options)


class Unwilling(Odd):
    def state_dict(self) -> dict[str, Any]:
        return {"next": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("this loader cannot go back")


def test_a_join_that_fails_after_all_leaves_no_thread_behind(folder: Path) -> None:
    Trainer(folder).steps(3).link.close()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(InputError, match=r"data, an Unwilling, cannot go on .*cannot go back"):
        isthmus.join(str(folder), model, optimizer, learner="a", data=Unwilling())
    end = time.monotonic() + 60
    while any(t.name.startswith("isthmus") for t in threading.enumerate()):
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.05)
