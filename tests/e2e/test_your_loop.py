"""Every block of docs/your-loop.md runs, and its learner trains and leaves in order."""

import contextlib
import inspect
import itertools
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import isthmus
from isthmus.format.rules import Rules
from isthmus_services.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "your-loop.md").read_text()
BLOCKS = dict(enumerate(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
(LOADING,) = (number for number, text in BLOCKS.items() if "load_model" in text)
BATCHES = 24


class Sampler:
    """Batches with a position that can be stored."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> "Sampler":
        return self

    def __next__(self) -> torch.Tensor:
        if self.next == BATCHES:
            raise StopIteration
        self.next += 1
        return torch.randint(0, 5, (2, 4), generator=torch.Generator().manual_seed(self.next))

    def __len__(self) -> int:
        return BATCHES

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch.float()).pow(2).mean()
    return loss


@contextlib.contextmanager
def unhandled_signals() -> Iterator[None]:
    """Undo what a block does with SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.tier("test")
def test_the_page_lists_the_arguments_of_join_with_their_defaults() -> None:
    table = PAGE.partition("## The arguments of `join`")[2]
    listed = re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\|", table, re.MULTILINE)
    parameters = inspect.signature(isthmus.join).parameters.values()
    shown = {p.name: "" if p.default is p.empty else repr(p.default).replace("'", '"') for p in parameters}
    assert dict(listed) == shown


def test_the_page_has_blocks() -> None:
    assert len(BLOCKS) >= 10


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("number", BLOCKS.keys() - {LOADING})
def test_a_block_runs_as_written(folder: Path, number: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    links: list[isthmus.Link] = []

    def join(joined: nn.Module, with_: torch.optim.Optimizer, **options: Any) -> isthmus.Link:
        link = isthmus.join(str(folder), joined, with_, learner="a", create=Rules(fragments=2, sync_every=4), **options)
        links.append(link)
        return link

    before = [p.detach().clone() for p in model.parameters()]
    given = {
        "torch": torch, "isthmus": isthmus, "join": join, "model": model, "optimizer": optimizer, "loader": Sampler(),
        "sampler": Sampler(), "loss_of": loss_of, "extra": nn.Linear(4, 1), "model_device": "cpu",
        "itertools": itertools, "STEPS": BATCHES, "generator": torch.Generator(),
    }  # fmt: skip
    with unhandled_signals():
        exec(compile(BLOCKS[number], f"docs/your-loop.md, block {number}", "exec"), given)
    (link,) = links
    assert link.steps_done == (BATCHES // 4 if "% 4 == 0" in BLOCKS[number] else BATCHES)
    assert link.tokens_seen == BATCHES * 8
    assert any(not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


class Partly(nn.Module):
    """A model with a frozen part, tied weights and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(5, 4), nn.BatchNorm1d(4)
        self.base, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.base(self.norm(self.embedding(tokens))))
        return out


def test_the_exported_model_is_loaded_as_the_page_says(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = Partly(), torch.arange(5)
    begun = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with isthmus.join(str(folder), model, optimizer, learner="a", create=isthmus.Rules.suited) as link:
        for _ in range(4):
            model(tokens).logsumexp(1).mean().backward()
            optimizer.step()
            link.step(tokens=5)
    assert main(["export", str(folder), "-o", str(tmp_path / "model.safetensors")]) == 0
    fresh = Partly()
    fresh.base.load_state_dict(model.base.state_dict())
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {"model": fresh}
    exec(compile(BLOCKS[LOADING], "docs/your-loop.md", "exec"), found)
    assert set(found["missing"]) == {"base.bias", "base.weight"}
    trained = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    for name, tensor in fresh.state_dict().items():  # no syncer ran: the run still has its first values
        assert torch.equal(tensor, model.state_dict()[name] if name in trained else begun[name]), name


def test_a_plain_loader_goes_on_where_it_was_in_the_middle_of_an_epoch(folder: Path) -> None:
    (block,) = (text for text in BLOCKS.values() if "itertools.islice" in text)
    taken: list[int] = []
    stop_at = 0

    def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if len(taken) == stop_at:
            raise KeyboardInterrupt
        taken.append(int(batch[0][0, 0]))
        loss: torch.Tensor = model(batch[0]).pow(2).mean()
        return loss

    def join(model: nn.Module, optimizer: torch.optim.Optimizer) -> isthmus.Link:
        return isthmus.join(str(folder), model, optimizer, learner="a", create=Rules(fragments=1, sync_every=4))

    rows = torch.arange(10.0).reshape(10, 1)
    for stop_at in (4, 13, 30):
        model, generator = nn.Linear(1, 1), torch.Generator()
        given = {
            "join": join, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-6), "loss_of": loss_of,
            "loader": DataLoader(TensorDataset(rows), shuffle=True, generator=generator), "generator": generator,
            "itertools": itertools, "STEPS": 30,
        }  # fmt: skip
        with contextlib.suppress(KeyboardInterrupt):
            exec(compile(block.replace("batch.numel()", "1"), "docs/your-loop.md", "exec"), given)
        assert len(taken) == stop_at
    epochs = [taken[n : n + 10] for n in (0, 10, 20)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert len(set(map(tuple, epochs))) == 3, "each epoch has an order of its own"


def test_a_loop_that_sigterm_ends_leaves_the_run_and_goes_on_later(folder: Path, tmp_path: Path) -> None:
    (block,) = (text for text in BLOCKS.values() if "signal.SIGTERM" in text)

    class Terminated(Sampler):
        def __next__(self) -> torch.Tensor:
            if self.next == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__next__()

    for sampler, steps, state in ((Terminated(), 6, "left"), (Sampler(), 6 + BATCHES, "done")):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        links: list[isthmus.Link] = []

        def join(joined: nn.Module, with_: torch.optim.Optimizer, links: list[isthmus.Link] = links) -> isthmus.Link:
            links.append(isthmus.join(str(folder), joined, with_, learner="a", create=Rules(fragments=2, sync_every=4)))
            return links[0]

        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        given = {"join": join, "model": model, "optimizer": optimizer, "loader": sampler, "loss_of": loss_of}
        with unhandled_signals():
            exec(compile(block, "docs/your-loop.md", "exec"), given)
        assert links[0].steps_done == steps
        report = tmp_path / "status.json"
        main(["status", str(folder), "--json", str(report)])
        assert [row["state"] for row in json.loads(report.read_text())["learners"]] == [state]
