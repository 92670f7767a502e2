"""`isthmus replay --set NAME=VALUE` rejects a value that the setting does not take, and says what it takes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from isthmus.errors import InputError
from isthmus.format.records.objects import Outer
from isthmus.format.rules import MergeRule, Rules
from isthmus.inspect import whatif
from isthmus_services.main import main

pytestmark = pytest.mark.tier("test")

NAME = "up to 63 letters, digits, dots, dashes and underscores, beginning with a letter or digit"


@pytest.mark.parametrize(
    ("pair", "takes"),
    [
        ("outer.lr=abc", "outer.lr takes a number above 0 and at most 10, not 'abc'"),
        ("outer.lr=0", "outer.lr takes a number above 0 and at most 10, not '0'"),
        ("outer.lr=nan", "outer.lr takes a number above 0 and at most 10, not 'nan'"),
        ("outer.momentum=1", "outer.momentum takes a number from 0 to below 1, not '1'"),
        ("merge=mode", "merge takes one of rda, avg, trimmed, median, iso, not 'mode'"),
        ("merge.embeddings=", "merge.embeddings takes one of rda, avg, trimmed, median, iso, not ''"),
        ("trim=0.5", "trim takes a share above 0 and below 0.5, not '0.5'"),
        ("quorum=1.5", "quorum takes a whole number of learners, at least 1, not '1.5'"),
        ("quorum=0", "quorum takes a whole number of learners, at least 1, not '0'"),
        ("grace=2", "grace takes a number from 0 to 1, not '2'"),
        ("overlap=inf", "overlap takes a number of steps from 0 to 1024, not 'inf'"),
        ("without=", f"learner name '': {NAME}"),
        ("staleness=65", "staleness takes a whole number of versions from 0 to 64, not '65'"),
    ],
)
def test_it_names_the_setting_and_what_it_takes(
    pair: str, takes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    assert main(["init", run]) == 0
    assert main(["replay", run, "--set", pair]) == 2
    assert capsys.readouterr().err.splitlines() == [f"isthmus replay: --set {pair}: {takes}"]


def test_a_trim_that_nothing_is_merged_with_is_refused() -> None:
    rda = Outer(merge=MergeRule.RDA, learning_rate=0.4, momentum=0.8)
    header = SimpleNamespace(dense=rda, embedding=rda, inputs=())
    with pytest.raises(InputError, match="merged by rda; set merge=trimmed too"):
        whatif.parse(["trim=0.3"]).outers(header)  # type: ignore[arg-type]
    assert whatif.parse(["trim=0.3", "merge=trimmed"]).outers(header)["dense"].trim == 0.3  # type: ignore[arg-type]
    assert whatif.parse(["merge=trimmed"]).outers(header)["dense"].trim == Rules().trim  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ends", "beyond"),
    [
        (["outer.lr=10", "outer.momentum=0"], ["outer.lr=10.1", "outer.momentum=-0.1"]),
        (["quorum=1", "grace=0"], ["quorum=-1", "grace=-0.1"]),
        (["grace=1", "overlap=0"], ["grace=1.1", "overlap=-1"]),
        (["overlap=1024", "staleness=0"], ["overlap=1025", "staleness=-1"]),
        (["staleness=64"], ["staleness=64.5"]),
    ],
)
def test_the_ends_of_a_range_belong_to_it(ends: list[str], beyond: list[str]) -> None:
    whatif.parse(ends)
    for pair in beyond:
        with pytest.raises(InputError):
            whatif.parse([pair])
