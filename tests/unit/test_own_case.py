"""A case of one's own for the lab: its file's fields, its defaults, and its errors, which name file and field."""

import re
from pathlib import Path

import pytest

from isthmus.errors import InputError
from isthmus.format.rules import Pace, Rules
from isthmus_lab.commands.simulate.training import _ends, _failing
from isthmus_lab.training import own_case
from isthmus_lab.training.experiment import base, named
from isthmus_lab.training.experiments import EXPERIMENTS
from isthmus_lab.training.own_case import EXAMPLE, STEPS, beside, read
from isthmus_lab.training.setting import Failures, Setting
from isthmus_services.main import main


def settings_of(folder: Path, text: str) -> list[Setting]:
    path = folder / "my.toml"
    path.write_text(text)
    return read(path)[0].settings(0)


def test_the_example_has_every_field_and_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "training", "example"]) == 0
    assert capsys.readouterr().out == EXAMPLE
    (plain,) = settings_of(tmp_path, EXAMPLE)
    assert plain == named(base(STEPS), "my") == settings_of(tmp_path, "")[0]
    whole = re.sub(r"^# (\w+ = |\[)", r"\1", EXAMPLE, flags=re.MULTILINE)
    both = settings_of(tmp_path, whole)
    assert [s.name for s in both] == ["mean", "half of the bandwidth"]
    assert both[0].rules.merge == "avg"
    assert both[1].wires.gbit_s == 0.05
    assert both[1].wires.parameters == 1e8, "a case changes single fields of a table"
    said = set(re.findall(r"^(\w+) = |^\[(\w+)", whole, flags=re.MULTILINE))
    words = {word for pair in said for word in pair if word}
    known = {*own_case._OF_FILE, *own_case._TABLES, *own_case._OWN, *own_case._RULES, *own_case._PACE}
    known |= {name for kind in own_case._TABLES.values() for name in kind.__struct_fields__}
    assert words == known
    reached = set(own_case._RULES.values()) | {"feedback_down"}
    assert reached == set(Rules.__struct_fields__)
    assert set(own_case._PACE.values()) == set(Pace.__struct_fields__)


def test_what_is_left_out_suits_what_is_given(tmp_path: Path) -> None:
    (s,) = settings_of(tmp_path, 'merge = "median"\nsync_every = 48\nfeedback = false\nseeds = 2')
    assert (s.rules.merge_embeddings, s.rules.sync_every_max, s.rules.feedback_down) == ("median", 48, False)
    assert (s.rules.outer_lr, s.rules.outer_momentum) == (0.6, 0.7)
    (s,) = settings_of(tmp_path, 'merge = "mine:rule"\nouter_lr = 0.9')
    assert (s.own_merge, s.rules.merge, s.rules.outer_lr) == ("mine:rule", "rda", 0.9)
    experiment, seeds = read(tmp_path / "my.toml")
    assert (experiment.name, seeds) == ("my", 1)
    assert experiment.settings(7)[0].steps == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learner = 4", "my.toml: there is no field learner: did you mean learners?"),
        ("shape = {widht = 4}", "my.toml: shape: there is no field widht: it has width, "),
        ("[cases.a.failures]\nmean_s = 5", "there is no field mean_s: it has every_s, "),
        ("[cases.a]\nsync_evry = 4", "my.toml [cases.a]: there is no field sync_evry: did you mean sync_every?"),
        ("shape = 4", "my.toml: shape 4: must be a table of width, layers, heads, experts"),
        ("failures = {repair_s = 1.0}", "my.toml: failures: every_s is missing"),
        ("learners = 0", "my.toml: learners 0: must be at least 1"),
        ('learners = "many"', "my.toml: learners 'many': must be a whole number"),
        ("step_s = []", "my.toml: step_s []: must be array of length >= 1"),
        ("noise = nan", "my.toml: noise nan: must be finite"),
        ('until = "noon"', "my.toml: until 'noon': choose one of tokens, time"),
        ('adopt = "take"', "my.toml: adopt 'take': choose one of overwrite, blend, carry"),
        ('failures = {every_s = 9.0, moments = "mine"}', "my.toml: failures.moments 'mine': choose one of own, peer"),
        ('merge = "rsa"', "my.toml: unknown merge 'rsa': choose one of rda, avg, trimmed, median, iso"),
        ('codec = "int3"', "my.toml: unknown codec 'int3'"),
        ("outer_lr = 11.0", "my.toml: outer_lr 11.0: must be at most 10"),
        ("quorum = 5", "my.toml: quorum 5 is more than learners 4: choose fewer"),
        ("shape = {heads = 5}", "my.toml: width 96 is no multiple of heads 5"),
        ("learners = ", "my.toml: not TOML: Invalid value (at "),
    ],
)
def test_an_error_names_the_file_the_field_and_what_is_meant(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        settings_of(tmp_path, text)
    assert str(error.value).startswith(str(tmp_path))
    assert said in str(error.value)


def test_a_file_that_is_not_there_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`isthmus simulate training example > .*my.toml` writes one"):
        read(tmp_path / "my.toml")


def test_what_ends_a_run_and_what_a_failure_costs_are_said_of_these_settings() -> None:
    plain, timed = named(base(40), ""), named(base(600), "", until="time", method="data-parallel")
    assert _ends([plain]) == (
        "a run ends after the tokens of 40 steps of each learner, of which faster ones and guests take more"
    )
    assert _ends([timed]) == "a run ends after the time of 600 steps of its fastest learner"
    assert "the tokens of 1 step of each learner" in _ends([named(base(1), "")])
    both = _ends([plain, named(base(75), ""), timed])
    assert "the tokens of 40 to 75 steps" in both
    assert both.endswith("; or a run ends after the time of 600 steps of its fastest learner")
    assert not _failing([plain, timed])
    failures = Failures(every_s=10.0)
    (said,) = _failing([named(plain, "", failures=failures), timed])
    assert "then reads its checkpoint and the newest version over its link" in said
    (said,) = _failing([plain, named(timed, "", failures=failures)])
    assert "from a checkpoint in memory" in said


def test_a_function_is_tried_once_beside_settings_that_differ_only_in_their_merge() -> None:
    few = beside(EXPERIMENTS["merge"].settings(9), "mine:rule")
    twins = [s for s in few if s.own_merge]
    assert [s.name for s in twins] == [f"M = {m}: Avg → mine:rule" for m in (4, 8, 16)]
    assert [s.learners for s in twins] == [4, 8, 16]
    assert {(s.rules.outer_lr, s.rules.outer_momentum) for s in twins} == {(0.4, 0.8)}
    attacked = [s for s in beside(EXPERIMENTS["hostile"].settings(9), "mine:rule") if s.own_merge]
    assert {s.variant for s in attacked} == {s.variant for s in EXPERIMENTS["hostile"].settings(9)}
    assert not any(s.own_merge for s in beside([named(base(9), "", method="data-parallel")], "mine:rule"))
