"""The command that evaluates a model of the demo takes its loss on the held-out text."""

import pydoc_data.topics
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model

from isthmus.demo import evaluate
from isthmus.demo.gpt import byte_gpt, held_out_loss
from isthmus.demo.text import corpus


def test_the_loss_is_of_the_model_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(7)
    model = byte_gpt()
    save_model(model, str(tmp_path / "model.safetensors"))
    text = pydoc_data.topics.__file__
    monkeypatch.setenv("ISTHMUS_CUT_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["evaluate", text])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    some = partial(held_out_loss, every=64)  # all windows would take seconds
    monkeypatch.setattr(evaluate, "held_out_loss", some)
    evaluate.main()
    held_out = torch.frombuffer(bytearray(corpus(text).held_out), dtype=torch.uint8)
    assert float(capsys.readouterr().out) == pytest.approx(some(model, held_out))


@pytest.mark.parametrize(
    ("words", "said"), [(["--help"], "TEXT"), ([], "ISTHMUS_CUT_DIR is not set: give this command to --exec")]
)
def test_it_says_what_it_needs(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ISTHMUS_CUT_DIR", raising=False)
    monkeypatch.setattr(sys, "argv", ["evaluate", *words])
    with pytest.raises(SystemExit):
        evaluate.main()
    shown = capsys.readouterr()
    assert said in " ".join((shown.out + shown.err).split())
