"""A model with running statistics evaluates well in every form in which it leaves a run."""

import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import isthmus
from isthmus.errors import RecordInvalid
from isthmus.format.records import tree
from isthmus.format.rules import Pace, Rules
from isthmus.inspect.follow import Cut
from isthmus.learner.global_local import LocalTensor, tensor_of, together
from isthmus_services.main import main
from isthmus_services.processes import isthmus_command
from support import restarts

SHIFT = 10.0

STEPS = 1000
"""Least number of steps of each learner. The loss is then at most a twentieth of an untrained model's."""


class Net(nn.Module):
    """Predicts the mean of inputs far from zero, with a normalisation layer. Its teacher follows its first layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
        self.teacher = nn.Linear(8, 16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x)
        return found

    def save_pretrained(self, folder: Path, max_shard_size: int) -> None:
        from safetensors.torch import save_file

        save_file(dict(self.state_dict()), folder / "model.safetensors")


def net() -> Net:
    return Net()


def batch(seed: int, count: int = 64) -> torch.Tensor:
    return 3 * torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)) + SHIFT


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.mean((model(x) - x.mean(1, keepdim=True)) ** 2)


def held_out(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return float(loss_of(model, batch(10_000, 512)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run that two learners have trained, and the loss of one of them."""
    folder = tmp_path_factory.mktemp("buffers")
    run = folder / "run"
    links, loops = [], []
    for name in ("a", "b"):
        model = Net()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        pace = Pace(heartbeat_s=0.2, silence_s=3.0, quorum=2)
        rules = Rules(fragments=2, sync_every=8)
        links.append(isthmus.join(str(run), model, optimizer, learner=name, create=rules, pace=pace))
        loops.append((model, optimizer))
    with open(folder / "log", "wb") as log:
        syncer = subprocess.Popen(isthmus_command("syncer", str(run)), stdout=log, stderr=log)
    try:
        end = time.monotonic() + 200
        number = 0
        # The first versions overshoot; and versions may come quickly, so wait for enough steps, too.
        while min(v for link in links for v in link.versions) < 20 or number < 2 * STEPS:
            assert time.monotonic() < end, (folder / "log").read_text()
            for (model, optimizer), link in zip(loops, links, strict=True):
                number += 1
                loss_of(model, batch(number)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model.teacher.weight.lerp_(model.body[0].weight, 0.1)  # type: ignore[arg-type]
                link.step(tokens=64)
            time.sleep(0.002)
        for link in links:
            restarts.store(link)
        local = held_out(loops[0][0])
        for link in links:
            link.close()
    finally:
        syncer.terminate()
        syncer.wait(60)
    assert local < 10.0
    return run, local


def test_an_exported_file_evaluates_well(trained: tuple[Path, float], tmp_path: Path, capsys: Any) -> None:
    run, local = trained
    assert main(["export", str(run), "-o", str(tmp_path / "m.safetensors")]) == 0
    said = capsys.readouterr().out
    assert "5 tensors that are not merged (body.1.num_batches_tracked, …)" in said or "4 tensors" in said
    assert "a, b" in said or "b, a" in said
    assert "WARNING" not in said
    assert main(["export", str(run), "-o", str(tmp_path / "old.safetensors"), "--version", "5"]) == 0
    assert "are of now, not of the version that was asked for" in capsys.readouterr().out
    model = Net()
    untrained = held_out(model)
    model.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=False)
    assert held_out(model) < max(3 * local, 1.0) < untrained
    assert (model.teacher.weight - Net().teacher.weight).norm() > 0.1
    fresh = Net()
    file = load_file(tmp_path / "m.safetensors")
    fresh.load_state_dict({n: p for n, p in file.items() if "running" not in n}, strict=False)
    assert held_out(fresh) > 5 * held_out(model), "without running statistics the model is of no use"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_and_a_distributed_checkpoint_have_them_too(trained: tuple[Path, float], tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    run, local = trained
    named = f"{__name__}:net"
    assert main(["export", str(run), "--hf", str(tmp_path / "hf"), "--model", named]) == 0
    assert main(["export", str(run), "--hf", str(tmp_path / "plain"), "--dcp", str(tmp_path / "dcp")]) == 0
    for name in ("hf", "plain"):
        model = Net()
        model.load_state_dict(load_file(tmp_path / name / "model.safetensors"), strict=False)
        assert held_out(model) < max(3 * local, 1.0)
    model = Net()
    state = {n: t for n, t in model.state_dict().items() if n != "teacher.bias"}
    load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    model.load_state_dict(state, strict=False)
    assert held_out(model) < max(3 * local, 1.0)


def test_a_module_that_follows_evaluates_well(trained: tuple[Path, float]) -> None:
    run, local = trained
    model = Net()
    with isthmus.follow(str(run), model) as following:
        assert following.update(wait_s=60)
    assert held_out(model) < max(3 * local, 1.0)
    assert model.body[1].num_batches_tracked > 10  # type: ignore[operator]


def test_files_and_functions_that_follow_get_them_too(trained: tuple[Path, float], tmp_path: Path) -> None:
    run, local = trained
    assert main(["follow", str(run), "--into", str(tmp_path), "--cuts", "1"]) == 0
    model = Net()
    model.load_state_dict(load_file(tmp_path / "newest" / "model.safetensors"), strict=False)
    assert held_out(model) < max(3 * local, 1.0)
    judged: list[float] = []

    def judge(cut: Cut) -> None:
        model = Net()
        tensors = {**cut.tensors(), **cut.buffers()}
        assert {values.dtype for values in cut.buffers().values()} == {np.dtype(np.float32), np.dtype(np.int64)}
        model.load_state_dict({name: torch.tensor(values) for name, values in tensors.items()}, strict=False)
        judged.append(held_out(model))

    with isthmus.follow(str(run), judge) as following:
        end = time.monotonic() + 60
        while not judged:
            assert time.monotonic() < end
            following.wait(0.1)
    assert judged[0] < max(3 * local, 1.0)


def test_a_new_run_begins_with_them(trained: tuple[Path, float], tmp_path: Path) -> None:
    run, _ = trained
    file = str(tmp_path / "m.safetensors")
    assert main(["export", str(run), "-o", file]) == 0
    assert main(["init", str(tmp_path / "new"), "--from", file, "--model", f"{__name__}:net"]) == 0


def test_statistics_are_those_of_all_that_was_seen() -> None:
    draw = np.random.default_rng(0)
    seen = [draw.normal(mean, 1.0 + mean, 100_000) for mean in (0.0, 2.0, 5.0)]

    def of(x: np.ndarray, count: int) -> dict[str, LocalTensor]:
        return {
            "n.running_mean": LocalTensor("float32", np.array([x.mean()])),
            "n.running_var": LocalTensor("float32", np.array([x.var()])),
            "n.num_batches_tracked": LocalTensor("int64", np.array(count)),
        }

    found = together([of(x, count) for x, count in zip(seen, (7, 9, 8), strict=True)])
    whole = np.concatenate(seen)
    assert found["n.running_mean"].values[0] == pytest.approx(whole.mean())
    assert found["n.running_var"].values[0] == pytest.approx(whole.var())
    assert found["n.num_batches_tracked"].values == 7, "a counter comes from the newest checkpoint"


def test_no_learner_sets_the_statistics_of_all() -> None:
    draw = np.random.default_rng(1)

    def of(mean: float, variance: float) -> dict[str, LocalTensor]:
        return {
            "n.running_mean": LocalTensor("float32", np.array([mean, 0.0], np.float32)),
            "n.running_var": LocalTensor("float32", np.array([variance, 1.0], np.float32)),
        }

    honest = [of(*pair) for pair in zip(draw.normal(0.0, 0.1, 7), draw.normal(1.0, 0.05, 7), strict=True)]
    undisturbed = together(honest)
    for liar in (of(3e38, 1.0), of(0.0, 3e38), of(0.0, -40.0), of(-3e38, 3e38)):
        for place in (0, 7):
            found = together([*honest[:place], liar, *honest[place:]])
            for name, tensor in found.items():
                assert tensor.values.dtype == np.float32
                assert np.abs(tensor.values - undisturbed[name].values).max() < 0.2, (name, tensor.values)
                assert not name.endswith("var") or (tensor.values > 0).all()


def leaf(dtype: str, shape: tuple[int, ...], values: np.ndarray) -> tree.Leaf:
    data = values.reshape(-1).view(np.uint8)
    return tree.Leaf(tree.LeafSpec(maker="torch", dtype=dtype, shape=shape, size=data.size), data)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (leaf("i4,f8", (1,), np.zeros(12, np.uint8)), "malformed"),
        (leaf("object", (1,), np.zeros(8, np.uint8)), "malformed"),
        (leaf("float32", (3,), np.zeros(4, np.uint8)), "malformed"),
        (leaf("float32", (1,), np.zeros(3, np.uint8)), "malformed"),
        (leaf("float32", (2,), np.array([1.0, np.nan], np.float32)), "non-finite"),
    ],
)
def test_a_strangers_buffer_that_is_none_is_turned_away(odd: tree.Leaf, why: str) -> None:
    with pytest.raises(RecordInvalid, match=why):
        tensor_of(odd)


def test_a_tensor_of_another_shape_is_left_out() -> None:
    found = together([{"x": LocalTensor("float32", np.ones(3))}, {"x": LocalTensor("float32", np.zeros(4))}])
    assert found["x"].values.tolist() == [1.0, 1.0, 1.0]
    assert together([]) == {}
