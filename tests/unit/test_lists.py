"""Every setting that is a list takes `--n 1 2`, `--n 1,2`, `--n 1 --n 2` and any mixture, in every command."""

import argparse
from typing import Any

import pytest

from isthmus.errors import InputError
from isthmus_services.settings import resolve as s
from isthmus_services.settings.command import Command, installed, names
from isthmus_services.settings.resolve import Setting

LISTS = [(c, f) for c in installed()[0] for f in s.fields(c.settings) if f.is_list]


def parsed(name: str, *words: str, environment: dict[str, str] | None = None) -> Any:
    command = next(c for c in installed()[0] if c.name == name)
    parser = argparse.ArgumentParser(exit_on_error=False)
    s.add_flags(parser, command.settings, environment or {})
    return s.resolve(command.settings, name, parser.parse_args(words), environment or {}, names).values


@pytest.mark.parametrize(
    "words",
    [
        ["--chips", "1", "2", "3"],
        ["--chips", "1,2,3"],
        ["--chips", "1", "--chips", "2", "--chips", "3"],
        ["--chips=1,2", "--chips", "3"],
        ["--chips", "1", "2", "--learners", "4", "--chips", "3"],
        ["--chips", "1,", "2,", "3"],
        ["--chips", "1, 2", "3"],
    ],
    ids=" ".join,
)
def test_several_values_are_taken_as_people_type_them(words: list[str]) -> None:
    assert parsed("simulate goodput", *words).chips == [1, 2, 3]


@pytest.mark.parametrize(("command", "setting"), LISTS, ids=lambda x: x.name)
def test_every_list_of_every_command_takes_them(command: Command, setting: Setting) -> None:
    one, two, three = ("a=1", "b=2", "c=3") if setting.item is str else ("1", "2", "3")
    before = ["--params", "1e9"] if command.name == "simulate bandwidth" else []
    before += [f.choices[0] if f.choices else f.flag for f in s.fields(command.settings) if f.positional]
    joined = [] if setting.with_commas else [[f"{one},{two},{three}"], [f"{one},{two}", setting.flag, three]]
    for words in ([one, two, three], [one, two, setting.flag, three], *joined):
        found = getattr(parsed(command.name, *before, setting.flag, *words), setting.field)
        assert found == [setting.item(word) for word in (one, two, three)]


@pytest.mark.parametrize(
    "words",
    [
        ["RUN", "--fragment", "1", "2", "--set", "merge=avg", "quorum=2"],
        ["--fragment", "1", "2", "RUN", "--set", "merge=avg,quorum=2"],
        ["--fragment", "1,2", "--set", "merge=avg", "--set", "quorum=2", "RUN"],
        ["--set", "merge=avg", "quorum=2", "--fragment", "1", "--fragment", "2", "--threads", "2", "RUN"],
    ],
    ids=" ".join,
)
def test_the_run_is_found_wherever_it_stands(words: list[str]) -> None:
    found = parsed("replay", *words)
    assert (found.run, found.fragment, found.set) == ("RUN", [1, 2], ["merge=avg", "quorum=2"])


def test_names_leave_the_folder_alone() -> None:
    assert parsed("access", "DIR", "--learner", "a", "b", "c").learner == ["a", "b", "c"]
    found = parsed("access", "--learner", "a,b", "DIR")
    assert (found.folder, found.learner) == ("DIR", ["a", "b"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learner", "a", "b", "DIR"], "put FOLDER before --learner and its values"),
        (["--learner", "a", "b", "--json", "x", "DIR"], "FOLDER is given twice: b and DIR"),
    ],
)
def test_what_could_be_either_is_not_guessed(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed("access", *words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chips", "1", "x"], "--chips x: must be a whole number"),
        (["--chips", "3b"], "--chips 3b: must be a whole number, without a letter: 3000000000"),
        (["--chips", "1,2.5"], "--chips 2.5: must be a whole number"),
        (["--chips", ","], "--chips ,: must be a whole number"),
    ],
)
def test_a_bad_value_is_named_alone(words: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        parsed("simulate goodput", *words)
    assert str(error.value) == message
