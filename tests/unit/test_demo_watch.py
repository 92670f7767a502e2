"""What a demo prints while its processes start and at its end, and on how much text it judges a short run."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from isthmus.demo.gpt import CONTEXT
from isthmus.inspect.bus_view import BusView
from isthmus_services.demo import report
from isthmus_services.demo.judge import WHOLE_STEPS, WINDOWS_MIN, judged, windows_of
from isthmus_services.demo.left import TRAINING, Left
from isthmus_services.demo.watch import Watch


def test_a_demo_says_that_its_processes_start(capsys: pytest.CaptureFixture[str]) -> None:
    run: Any = SimpleNamespace(hearing=BusView(bytes(32)), commits={})
    watch = Watch("run", 2, 30, run, Left({TRAINING: 60.0}))
    watch.enter(TRAINING)
    assert "training  2 learners and a syncer start, which takes up to half a minute" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pending", "said"), [(0, "0 (0.0%)"), (250, "250 (25.0%: each learner's last steps, not in the model)")]
)
def test_the_summary_says_what_became_of_the_tokens(
    pending: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = (
        "global_val_loss single_val_loss held_out_bytes held_out_bytes_in_all commits participation updates_merged bytes_up bytes_down kills recoveries "
        "checkpoint_bytes wall_s train_s"
    )
    found: dict[str, object] = dict.fromkeys(names.split(), 1)
    tokens = {"processed": 1000, "merged": 600, "overwritten": 50, "late": 0, "rejected": 0, "lost": 1}
    found |= {"ledger": tokens | {"pending": pending}, "rejections": {}}
    found |= {"updates_clipped": 5, "clips": {"weight": 4, "norm": 2}, "kills_by_kind": {"learner": 1, "syncer": 0}}
    found["tokens_trained_again"] = 64
    report.show(found | {"settings": {"steps": 1, "kill_every": 5}}, Console(width=120))
    cells = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    shown = {cell[1].strip(): cell[2].strip() for cell in cells}
    assert shown["tokens processed"] == "1,000"
    assert (shown["tokens merged"], shown["tokens lost"]) == ("600 (60.0%)", "1 (0.1%)")
    assert shown["tokens pending"] == said
    assert shown["tokens trained again"] == "64 (of those processed, after kills)"
    assert shown["kills (recovered)"] == "1 (1)"
    assert shown["updates clipped"] == "5 updates: norm 2, weight 4 (an update may have several reasons)"


def test_who_was_to_be_killed_and_never_was_is_told_with_the_reason() -> None:
    settings = {"steps": 300, "rules": {"sync_every": 12}, "kill_every": 15, "kill_syncer_every": None}
    nobody = {"kills_by_kind": {"learner": 0, "syncer": 0}}
    assert report._why_none(nobody, settings) == (
        "no learner was killed: at its time each was within 48 steps of its start or its end; give more --steps, or "
        "kill sooner"
    )
    assert "no learner and no syncer was" in report._why_none(nobody, settings | {"kill_syncer_every": 9})
    assert report._why_none(nobody, settings | {"kill_every": None}) == ""
    assert report._why_none({"kills_by_kind": {"learner": 1, "syncer": 0}}, settings) == ""


def test_a_short_run_is_judged_on_less_text() -> None:
    text = torch.zeros(4000 * CONTEXT + 7, dtype=torch.uint8)
    assert windows_of(judged(text, WHOLE_STEPS)) == windows_of(judged(text, 3 * WHOLE_STEPS)) == 4000
    assert windows_of(judged(text, WHOLE_STEPS // 10)) == 400
    assert windows_of(judged(text, 1)) == WINDOWS_MIN
    assert windows_of(judged(text[: 10 * CONTEXT + 1], 1)) == 10
