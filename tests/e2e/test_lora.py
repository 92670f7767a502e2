"""Learners train adapters on a frozen base through kill -9, and a loop in the style of nanoGPT shares a run."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from e2e.test_processes import ROOT, commits_of, processes, wait_for
from isthmus_services.demo import judge
from isthmus_services.main import main

EXAMPLES = ROOT / "examples"
LETTERS = "abcdefghijklmnopqrstuvwxyz .\n"


def make_base(folder: Path, seed: int) -> None:
    """Write a small Llama and a tokenizer of letters in the format of a model hub."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = Tokenizer(WordLevel({c: i for i, c in enumerate(LETTERS)} | {"?": len(LETTERS)}, unk_token="?"))
    letters.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="?").save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(LETTERS) + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def losses(said: str) -> list[float]:
    return [float(line.split("'loss': '")[1].split("'")[0]) for line in said.splitlines() if "'loss': '" in line]


@pytest.mark.timeout(300)
def test_adapters_on_a_base_of_four_bits_are_trained_together_through_kill_9(tmp_path: Path) -> None:
    run, base, other = str(tmp_path / "run"), tmp_path / "base", tmp_path / "other"
    make_base(base, 1)
    make_base(other, 2)
    for name, text in (
        ("a", "the quick brown fox jumps over the lazy dog. "),
        ("b", "pack my box with five dozen jugs. "),
    ):
        (tmp_path / name).write_text(text * 60)

    def start(name: str, steps: int, *more: str) -> tuple[str, ...]:
        return (
            sys.executable, str(EXAMPLES / "lora.py"), run, "--text", str(tmp_path / name), "--learner", name, "--bits",
            "4", "--steps", str(steps), *(more or ("--base", str(base))),
        )  # fmt: skip

    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run, "--wait")
        first = p.start("a1", *start("a", 300))
        wait_for(lambda: list((tmp_path / "run" / "learners" / "a").glob("*/checkpoints/*")), "a has a checkpoint")
        os.kill(first.pid, signal.SIGKILL)
        started = [p.start("a2", *start("a", 300)), p.start("b", *start("b", 60))]
        for process in started:
            p.ends(process)
        stranger = p.start("c", *start("b", 60, "--base", str(other)))
        p.ends(stranger, 1)
        assert "is stored in other bytes here than in the run" in p.said("c")
        p.ends(p.start("b2", *start("b", 80, "--base", str(base), "--save", str(tmp_path / "out"))))
        said = p.said("a2")
    assert losses(said)[-1] < 2.5 < 3.2 < losses(p.said("a1") + said)[0], "an untrained model's loss is log(29), 3.4"
    commits = commits_of(run)
    assert judge.continuous(commits)
    assert {i.learner for c in commits for i in c.header.inputs} == {"a", "b"}
    assert main(["replay", run]) == 0
    assert main(["export", run, "--hf", str(tmp_path / "hf")]) == 0
    saved, exported = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("out", "hf"))
    assert saved.keys() == exported.keys()
    assert {name.rsplit(".", 2)[1] for name in saved} == {"lora_A", "lora_B"}
    assert sum(x.numel() for x in saved.values()) < 0.3 * sum(
        x.numel() for x in load_file(base / "model.safetensors").values()
    )
    newest = min(
        c.version
        for c in commits
        if c.version == max(d.version for d in commits if d.header.fragment == c.header.fragment)
    )
    assert any(
        main(["export", run, "--hf", str(tmp_path / "then"), "--version", str(version), "--force"]) == 0
        and all(
            torch.equal(x, saved[name])
            for name, x in load_file(tmp_path / "then" / "adapter_model.safetensors").items()
        )
        for version in range(newest, 0, -1)
    ), "the saved adapters are a version of the global model"


@pytest.mark.timeout(300)
def test_a_loop_in_the_manner_of_nanogpt_shares_a_run(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run, "--wait")
        loop = (
            sys.executable,
            str(EXAMPLES / "nanogpt_loop.py"),
            run,
            str(tmp_path / "text"),
            "--steps",
            "40",
            "--learner",
        )
        for process in [p.start(name, *loop, name) for name in ("a", "b")]:
            p.ends(process)
        assert float(p.said("a").split("held-out loss ")[-1].split(",")[0]) < 3.0, (
            "an untrained model's is log(256), 5.5"
        )
    commits = commits_of(run)
    assert {i.learner: i.tokens / i.steps for c in commits for i in c.header.inputs} == {"a": 1024, "b": 1024}
    assert main(["replay", run]) == 0
