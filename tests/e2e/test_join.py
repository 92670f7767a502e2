"""`isthmus.join` works in a user's training loop, with real threads, a real folder and any torch module."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import isthmus
from isthmus.bus import default_bus, open_bus
from isthmus.errors import InputError, LayoutMismatch, RunMissing
from isthmus.format.rules import Rules
from isthmus.inspect import export
from isthmus.log import Log
from isthmus.log.run import read_run
from isthmus.runtime.clock import single_threaded
from isthmus.store import open_store
from isthmus.syncer import Syncer
from isthmus.torch import model as torch_model
from isthmus_services.main import main
from support.world import serving

pytestmark = pytest.mark.tier("test")

RULES = Rules(fragments=2, sync_every=4)


def net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def join(folder: Path | str, model: nn.Module, **options: Any) -> isthmus.Link:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return isthmus.join(str(folder), model, optimizer, learner=options.pop("learner", "a"), **options)


def test_a_missing_run_names_init(folder: Path) -> None:
    with pytest.raises(RunMissing, match="isthmus init"):
        join(folder, net())


def test_a_folder_that_holds_a_run_names_it_and_gets_no_second_one(tmp_path: Path) -> None:
    join(tmp_path / "out" / "run", net(), create=RULES).close()
    for options in ({}, {"create": RULES}):
        with pytest.raises(RunMissing, match=r"out: no run here; did you mean .*out/run\?"):
            join(tmp_path / "out", net(), **options)


def test_the_first_creates_and_the_next_adopts_its_values(folder: Path) -> None:
    first, second = net(), net()
    with torch.no_grad():
        for p in second.parameters():
            p.add_(1.0)
    with join(folder, first, create=RULES) as a, join(folder, second, learner="b", create=RULES) as b:
        assert a.run.digest == b.run.digest
        assert a.steps_done == b.steps_done == 0
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


def test_of_racing_creators_all_join_one_run(folder: Path) -> None:
    models = []
    for i in range(4):
        torch.manual_seed(i)
        models.append(nn.Linear(3, 3))
    digests, failures = [], []

    def go(i: int) -> None:
        try:
            with join(folder, models[i], learner=f"l{i}", create=RULES) as link:
                digests.append(link.run.digest)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=go, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert len(set(digests)) == 1
    assert all(torch.equal(m.weight, models[0].weight) for m in models)


def test_another_model_is_refused_by_its_first_difference(folder: Path) -> None:
    join(folder, net(), create=RULES).close()
    with pytest.raises(LayoutMismatch, match=r"tensor '0.weight' has shape \(9, 4\), the run has \(8, 4\)"):
        join(folder, net(9))


def test_other_rules_are_refused(folder: Path) -> None:
    join(folder, net(), create=RULES).close()
    with pytest.raises(InputError, match=r"sync_every is 4 there, not 7\): leave create= out to join it"):
        join(folder, net(), create=Rules(fragments=2, sync_every=7))
    join(folder, net()).close()


def test_the_environment_names_the_learner_that_the_program_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ISTHMUS_LEARNER", raising=False)
    with pytest.raises(InputError, match=r"no name: pass learner=.*, or set ISTHMUS_LEARNER"):
        join(folder, net(), create=RULES, learner=None)
    monkeypatch.setenv("ISTHMUS_LEARNER", "from-env")
    for options, name in (({}, "a"), ({"learner": None}, "from-env")):
        with join(folder, net(), create=RULES, **options):
            pass
        assert list((folder / "learners" / name).iterdir())


def test_tied_weights_are_merged_once(folder: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    with join(folder, model, create=RULES) as link:
        (spec,) = link.run.layout.specs
        assert (spec.name, spec.role) == ("embed.weight", "embedding")
    assert model.head.weight is model.embed.weight


def test_frozen_parameters_stay_and_must_agree(folder: Path) -> None:
    model = net()
    model.get_parameter("0.weight").requires_grad_(False)
    with join(folder, model, create=RULES) as link:
        assert "0.weight" not in {s.name for s in link.run.layout.specs}
        assert set(link.run.frozen) == {"0.weight"}
    other = net()
    other.get_parameter("0.weight").requires_grad_(False)
    with torch.no_grad():
        other.get_parameter("0.weight")[0, 0] += 1
    with pytest.raises(LayoutMismatch, match=r"frozen parameter '0\.weight' is stored in other bytes here"):
        join(folder, other)
    join(folder, other, frozen="trusted").close()
    with pytest.raises(InputError, match="unknown value of frozen= 'blindly': choose one of checked, trusted"):
        join(folder, other, frozen="blindly")


def test_buffers_stay_local(folder: Path) -> None:
    norm = nn.BatchNorm1d(4)
    assert norm.running_mean is not None
    model = nn.Sequential(nn.Linear(4, 4), norm)
    with join(folder, model, create=RULES):
        norm.running_mean.add_(5.0)
    assert torch.all(norm.running_mean == 5.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parameters_keep_their_dtype(folder: Path, dtype: torch.dtype) -> None:
    model = net().to(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    with join(folder, model, create=RULES) as link:
        link.step(tokens=4)
        assert {s.dtype for s in link.run.layout.specs} == {str(dtype).removeprefix("torch.")}
    for p, q in zip(model.parameters(), before, strict=True):
        assert p.dtype == dtype
        assert torch.equal(p, q)


def test_a_dtype_that_cannot_be_merged_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="is float64"):
        join(folder, net().double(), create=RULES)


def test_parameters_without_a_gradient_and_several_groups_are_fine(folder: Path) -> None:
    model = net()
    unused = nn.Linear(3, 3)
    model.append(unused)
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "lr": 1e-2},
        {"params": model[2].parameters()},
        {"params": unused.parameters()},
    ]
    optimizer = torch.optim.AdamW(groups)
    link = isthmus.join(str(folder), model, optimizer, learner="a", create=RULES)
    for _ in range(10):
        model[2](model[1](model[0](torch.ones(2, 4)))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        link.step(tokens=2)
    link.close()
    assert link.steps_done == 10
    assert link.summary == link.summary, "final"


def test_rules_may_be_chosen_by_the_model_and_are_asked_for_once(folder: Path) -> None:
    chosen = partial(Rules.suited, sync_every=24)
    with join(folder, net(), create=chosen) as a:
        assert (a.run.rules.merge, a.run.rules.sync_every) == ("iso", 24)
    # `Rules.suited` without options accepts the rules of the existing run.
    with join(folder, net(), learner="b", create=Rules.suited) as b:
        assert b.run.digest == a.run.digest
    with pytest.raises(InputError, match=r"create=.* returned a str: it must return isthmus.Rules"):
        join(folder / "other", net(), create=lambda specs: "iso")


def test_an_optimizer_of_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="parameter group 0"):
        isthmus.join(str(folder), net(), torch.optim.SGD(net().parameters(), lr=1.0), learner="a", create=RULES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learner": "no/slash"}, "learner name"),
        ({"adopt": "swallow"}, "unknown adoption"),
        ({"bus": "ftp://x"}, "a bus is redis://"),
        ({"bus": "redis:/localhost"}, "the host is missing"),  # and not that the run is not signed
        ({"create": Rules(codec_up="int3")}, "unknown codec 'int3'"),
        ({"create": Rules(merge="mode")}, "unknown merge 'mode'"),
        ({"create": Rules(outer_momentum=1.5)}, "outer_momentum"),
        ({"create": Rules(fragments=0)}, "fragments"),
    ],
)
def test_bad_settings_are_named(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        join(folder, net(), **({"create": RULES} | options))


def test_steps_are_checked(folder: Path) -> None:
    link = join(folder, net(), create=RULES)
    with pytest.raises(InputError, match="at least 1"):
        link.step(tokens=0)
    link.close()
    link.close()
    with pytest.raises(InputError, match="closed"):
        link.step(tokens=1)


def test_a_sink_gets_every_step(folder: Path) -> None:
    taken: dict[int, dict[str, float]] = {}

    class Kept:
        closed = False

        def scalars(self, step: int, values: Mapping[str, float]) -> None:
            taken.setdefault(step, {}).update(values)

        def flush(self) -> None:
            pass

        def close(self) -> None:
            Kept.closed = True

    with join(folder, net(), create=RULES, sink=Kept()) as link:
        for i in range(5):
            link.step(tokens=10, loss=float(i))
        registry = link.metrics.registry
        assert link.vitals.pulse().alive
    assert [taken[step]["train/loss"] for step in range(1, 6)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert taken[5]["train/tokens"] == 50.0
    assert Kept.closed
    assert registry.get_sample_value("isthmus_steps_total") == 5
    assert registry.get_sample_value("isthmus_trained_tokens_total") == 50
    assert registry.get_sample_value("isthmus_step_hold_seconds_count") == 5


def test_importing_the_library_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import isthmus, isthmus.syncer, isthmus.log.commits, isthmus_services.commands.syncer"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


UNCLOSED = """
import atexit, sys, threading
names = lambda: print([t.name for t in threading.enumerate() if t.name == "isthmus-agent"])
atexit.register(names)  # runs last of all
import torch, isthmus
model = torch.nn.Linear(4, 2)
link = isthmus.join(
    sys.argv[1], model, torch.optim.SGD(model.parameters(), lr=0.1), learner="a", create=isthmus.Rules(fragments=2)
)
names()
"""


def test_the_agent_ends_with_a_script_that_does_not_close(folder: Path) -> None:
    command = [sys.executable, "-c", UNCLOSED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "['isthmus-agent']\n[]\n"), done.stderr


def test_values_go_in_and_out_of_a_module_unchanged() -> None:
    model = net()
    specs, values = torch_model.specs_of(model), torch_model.values_of(model)
    assert [s.size for s in specs] == [v.size for v in values]
    from isthmus.format.layout import partition

    layout = partition(specs, 2)
    replica = torch_model.TorchReplica(model, layout)
    for fragment in layout.fragments:
        out = np.empty(fragment.size, np.float32)
        replica.read(fragment.index, out)
        replica.write(fragment.index, out + 1)
    for before, after in zip(values, torch_model.values_of(model), strict=True):
        assert np.array_equal(after, before + 1)


def in_step(folder: Path) -> tuple[isthmus.Link, threading.Thread, threading.Event]:
    """Join with lead 0, as in synchronous DiLoCo, and train twelve steps in a thread. No syncer runs yet."""
    pace = isthmus.Pace(quorum=1, lead=0.0, overlap=0.0, grace=0.0, heartbeat_s=0.2, silence_s=0.8)
    model = net()
    link = join(folder, model, create=Rules(fragments=1, sync_every=2), pace=pace)
    done = threading.Event()

    def loop() -> None:
        for _ in range(12):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.01)
            link.step(tokens=8)
        done.set()

    thread = threading.Thread(target=loop)
    thread.start()
    assert not done.wait(1.5)
    assert link.steps_done < 12
    return link, thread, done


def test_a_loop_that_waits_for_a_version_can_be_let_go(folder: Path) -> None:
    """Otherwise a learner that is told to stop would wait at its step boundary forever once no syncer is left."""
    link, thread, done = in_step(folder)
    link.let_go()
    thread.join(10.0)
    assert done.is_set()
    link.close()


async def test_with_a_lead_the_training_thread_waits_and_goes_on_when_the_version_comes(folder: Path) -> None:
    """With settings for synchronous DiLoCo, the loop waits at its step boundary until a syncer merges."""
    link, thread, done = in_step(folder)
    runtime = single_threaded(0)
    place = default_bus(str(folder))
    assert place is not None
    async with open_store(str(folder), runtime) as store:
        run = await read_run(store)
        async with (
            open_bus(place, run.digest, None) as bus,
            serving(Syncer(Log(run, store, runtime), store, bus, runtime, "s")),
        ):
            await asyncio.to_thread(done.wait, 30.0)
    thread.join(10.0)
    assert done.is_set()
    assert min(link.versions) >= 4
    link.close()


def test_a_tensor_larger_than_a_fragment_is_cut_and_whole_again(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    first, second = nn.Linear(300, 600), nn.Linear(300, 600)
    initial = {name: p.detach().clone() for name, p in first.named_parameters()}
    with join(folder, first, create=Rules(fragments=4)) as a, join(folder, second, learner="b") as b:
        assert len(a.run.layout.fragments) == 4
        assert len(a.run.layout.placement[0]) == 4
        assert a.run.layout == b.run.layout
    for name, p in second.named_parameters():
        assert torch.equal(p, initial[name])
    assert main(["export", str(folder), "-o", str(tmp_path / "m.safetensors")]) == 0
    file = export.read(tmp_path / "m.safetensors")
    assert [s.shape for s in file.specs] == [(600, 300), (600,)]
    for spec, flat in zip(file.specs, file.values, strict=True):
        assert np.array_equal(flat, initial[spec.name].numpy().reshape(-1))


def test_matrices_stay_whole_for_balance_where_they_are_merged_isotropically(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(512, 400, bias=False) for _ in range(5)))
    for merge, cut in (("rda", True), ("iso", False)):
        with join(tmp_path / merge, model, create=Rules(fragments=4, merge=merge)) as link:
            assert any(len(cuts) > 1 for cuts in link.run.layout.placement) == cut
