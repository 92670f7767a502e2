"""The global model is exported in other tools' formats, and runs begin from their files; no code of a file runs."""

import json
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from e2e.test_processes import ROOT, isthmus
from e2e.test_ranks import torchrun
from isthmus.inspect import export
from isthmus.torch import dcp
from isthmus_services.main import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

THEIRS = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

def base():
    torch.manual_seed(3)
    config = GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)

def adapted():
    model = base()
    torch.manual_seed(4)
    made = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "lora_B" in name:
                p.normal_()
    return made
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a current folder with a module of models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hf_models.py").write_text(THEIRS)
    yield tmp_path
    sys.modules.pop("hf_models", None)


def same(mine: nn.Module, theirs: nn.Module) -> bool:
    pairs = zip(mine.named_parameters(), theirs.named_parameters(), strict=True)
    return all(a == b and torch.equal(p, q) for (a, p), (b, q) in pairs)


def test_a_language_model_goes_out_to_from_pretrained_and_comes_back(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    assert main(["init", "run", "--model", "hf_models:base"]) == 0
    made = sys.modules["hf_models"].base()
    assert main(["export", "run", "--hf", "whole", "--model", "hf_models:base"]) == 0
    assert same(AutoModelForCausalLM.from_pretrained("whole"), made)
    assert main(["export", "run", "--hf", "weights", "--largest", "1e-5"]) == 0
    assert "add the model's config.json, or use --model" in capsys.readouterr().out
    shutil.copy("whole/config.json", "weights")
    assert len(list(Path("weights").glob("model-*.safetensors"))) > 1
    assert same(AutoModelForCausalLM.from_pretrained("weights"), made)
    for number, folder in enumerate(("whole", "weights")):
        assert main(["init", f"again{number}", "--from", folder, "--model", "hf_models:base"]) == 0
        assert main(["export", f"again{number}", "-o", f"{number}.safetensors"]) == 0
    assert main(["export", "run", "-o", "first.safetensors"]) == 0
    first, *others = (export.read(here / f"{name}.safetensors") for name in ("first", "0", "1"))
    for other in others:
        assert all(np.array_equal(a, b) for a, b in zip(first.values, other.values, strict=True))
    assert main(["export", "run", "--hf", "whole"]) == 2
    assert "--hf whole is not empty" in capsys.readouterr().err
    assert main(["export", "run"]) == 2
    assert "choose an output" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft warns about transformers
def test_adapters_go_out_to_peft(here: Path) -> None:
    from peft import PeftModel

    assert main(["init", "run", "--model", "hf_models:adapted"]) == 0
    theirs = sys.modules["hf_models"]
    made = theirs.adapted().eval()
    assert main(["export", "run", "--hf", "whole", "--model", "hf_models:adapted"]) == 0
    assert main(["export", "run", "--hf", "weights"]) == 0
    shutil.copy("whole/adapter_config.json", "weights")
    ids = torch.arange(6)[None]
    wanted = made(input_ids=ids).logits
    assert not torch.equal(wanted, theirs.base().eval()(input_ids=ids).logits)
    for folder in ("whole", "weights"):
        again = PeftModel.from_pretrained(theirs.base(), folder)
        assert torch.equal(again(input_ids=ids).logits, wanted), folder


def test_a_distributed_checkpoint_goes_out_and_comes_back(here: Path) -> None:
    assert main(["init", "run", "--seed", "4"]) == 0
    assert main(["export", "run", "--dcp", "out", "-o", "first.safetensors"]) == 0
    first = export.read(here / "first.safetensors")
    state = {s.name: torch.empty(s.shape) for s in first.specs}
    load(state, checkpoint_id="out", no_dist=True)
    for spec, values in zip(first.specs, first.values, strict=True):
        assert np.array_equal(state[spec.name].reshape(-1).numpy(), values)
    model = "isthmus.demo.gpt:byte_gpt"
    assert main(["init", "again", "--from", "out", "--model", model]) == 0
    assert main(["export", "again", "-o", "again.safetensors", "--dtype", "bfloat16"]) == 0
    again = export.read(here / "again.safetensors")
    assert {spec.dtype for spec in again.specs} == {"bfloat16"}
    for mine, theirs in zip(first.values, again.values, strict=True):
        assert np.array_equal(torch.from_numpy(mine).bfloat16().float().numpy(), theirs)


SHARDED = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
whole = {name: p.detach().clone() for name, p in model.named_parameters()}
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 3)).sum().backward()
before = {name: p.detach().clone() for name, p in model.state_dict().items()}
dcp.save({"model": before, "optimizer": {"lr": 0.5, "step": torch.tensor(3)}}, checkpoint_id=sys.argv[1])
if dist.get_rank() == 0:
    from safetensors.torch import save_file
    save_file(whole, sys.argv[2])
dist.destroy_process_group()
"""


@pytest.mark.timeout(180)
def test_what_several_ranks_have_written_is_read_without_them(here: Path) -> None:
    import os
    import subprocess

    (here / "sharded.py").write_text(SHARDED)
    (here / "small.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))\n"
    )
    command = [*torchrun(2), "sharded.py", "theirs", "whole.safetensors"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(list(Path("theirs").glob("*.distcp"))) == 2
    assert main(["init", "run", "--from", "theirs", "--model", "small:make"]) == 0
    assert main(["export", "run", "-o", "out.safetensors"]) == 0
    whole, out = (export.read(here / name) for name in ("whole.safetensors", "out.safetensors"))
    wanted = {spec.name: flat for spec, flat in zip(whole.specs, whole.values, strict=True)}
    assert {spec.name for spec in out.specs} == wanted.keys()
    assert all(np.array_equal(flat, wanted[spec.name]) for spec, flat in zip(out.specs, out.values, strict=True))
    sys.modules.pop("small", None)


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("open('touched', 'w').close()",)


def test_what_a_description_names_is_not_run(here: Path) -> None:
    Path("theirs").mkdir()
    Path("theirs/.metadata").write_bytes(pickle.dumps({"state_dict_metadata": Evil()}))
    done = isthmus("init", "run", "--from", "theirs", "--model", "isthmus.demo.gpt:byte_gpt")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "theirs is no checkpoint that torch.distributed.checkpoint has written" in done.stderr
    assert not Path("touched").exists()
    for words in (b"", b"not one", pickle.dumps(3), pickle.dumps({}, protocol=0), b"\x80\x04(.", b"\x80\x04h\x05."):
        Path("theirs/.metadata").write_bytes(words)
        assert main(["init", "run", "--from", "theirs", "--model", "isthmus.demo.gpt:byte_gpt"]) == 2, words


def test_of_a_checkpoint_of_everything_the_model_alone_is_read(here: Path) -> None:
    everything = {"model": {"w": torch.ones(4)}, "optimizer": {"exp_avg": torch.zeros(4)}, "ema": torch.zeros(4)}
    save(everything, checkpoint_id="theirs", no_dist=True)
    found = dcp.read(here / "theirs")
    assert [spec.name for spec in found.specs] == ["w"]
    assert [values.tolist() for values in found.values] == [[1.0] * 4]


def test_a_damaged_checkpoint_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save({"w": torch.ones(4)}, checkpoint_id="theirs", no_dist=True)
    (parts,) = Path("theirs").glob("*.distcp")
    whole = parts.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2]):
        parts.write_bytes(damaged)
        assert main(["init", "run", "--from", "theirs", "--model", "isthmus.demo.gpt:byte_gpt"]) == 2
        assert "theirs is no checkpoint" in capsys.readouterr().err
    # Replace the part by one of the same length that holds another number of values.
    save({"w": torch.ones(5)}, checkpoint_id="others", no_dist=True)
    (other,) = Path("others").glob("*.distcp")
    assert len(other.read_bytes()) == len(whole)
    parts.write_bytes(other.read_bytes())
    assert main(["init", "run", "--from", "theirs", "--model", "isthmus.demo.gpt:byte_gpt"]) == 2
    assert f"{parts.name} holds 20 bytes of a block of (4,) torch.float32" in capsys.readouterr().err
    parts.unlink()
    assert main(["init", "run", "--from", "theirs", "--model", "isthmus.demo.gpt:byte_gpt"]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"w": "../secret.safetensors"}}, "names files outside its folder"),
        ({"weight_map": []}, "is no index"),
        ([], "is no index"),
        ({"weight_map": {"w": "gone.safetensors"}}, "cannot be read"),
    ],
)
def test_an_index_names_files_beside_it_or_is_refused(
    here: Path, index: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("theirs").mkdir()
    (here / "theirs" / export.INDEX).write_text(json.dumps(index))
    assert main(["init", "run", "--from", "theirs", "--model", "isthmus.demo.gpt:byte_gpt"]) == 2
    assert words in capsys.readouterr().err
    assert ROOT.exists()
