"""Settings come from flags, environment, file or defaults, in this order: typed, checked, shown with their source."""

import argparse
import re
from pathlib import Path
from typing import Annotated

import pytest
import yaml
from rich.console import Console

from isthmus.errors import InputError
from isthmus.format.rules import Pace, Rules, metadata
from isthmus.runtime.urls import as_environment_says
from isthmus_services.main import main
from isthmus_services.settings import declared, shared
from isthmus_services.settings import resolve as s
from isthmus_services.settings.command import Command, installed, names


@s.settings_class
class Kiln:
    """Settings of an imaginary command."""

    clay: Annotated[str, s.Setting("what", positional=True)]
    heat: Annotated[float, s.Setting("°C", gt=0, le=2000)] = 900.0
    hours: Annotated[int | None, s.Setting("hours", ge=1)] = None
    glaze: Annotated[str, s.Setting("colour", choices=("ash", "salt"))] = "ash"
    vented: Annotated[bool, s.Setting("whether")] = False
    marks: Annotated[list[str] | None, s.Setting("marks", name="mark")] = None
    key: Annotated[str | None, s.Setting("of the shed", secret=True)] = None
    fire: Annotated[bool, s.Setting("now", flag_only=True)] = False


def test_settings_have_their_defaults_and_do_not_change() -> None:
    kiln = Kiln(clay="red", hours=2)
    assert (kiln.clay, kiln.heat, kiln.hours, kiln.marks) == ("red", 900.0, 2, None)
    with pytest.raises(AttributeError, match="heat"):
        kiln.heat = 1.0  # type: ignore[misc]
    with pytest.raises(AttributeError, match="heat"):
        del kiln.heat
    with pytest.raises(TypeError, match="clay"):
        Kiln()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="oven"):
        Kiln(clay="red", oven=1)  # type: ignore[call-arg]


NAMES = {"kiln": {f.name for f in s.fields(Kiln) if not f.flag_only}, "other": {"wheel"}}


def resolved(
    *words: str, environment: dict[str, str] | None = None, file: str | None = None, tmp_path: Path | None = None
) -> s.Resolved[Kiln]:
    parser = argparse.ArgumentParser()
    s.add_flags(parser, Kiln, environment or {})
    if file is not None:
        assert tmp_path is not None
        (tmp_path / "k.toml").write_bytes(file.encode(errors="surrogateescape"))
        words = (*words, "--config", str(tmp_path / "k.toml"))
    return s.resolve(Kiln, "kiln", parser.parse_args(words), environment or {}, lambda: NAMES)


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = 'heat = 1.0\nglaze = "salt"\n[kiln]\nheat = 2\nhours = 3\n'
    found = resolved("c", "--hours", "5", environment={"ISTHMUS_HEAT": "4"}, file=file, tmp_path=tmp_path)
    assert (found.values.hours, found.values.heat, found.values.glaze, found.values.vented) == (5, 4.0, "salt", False)
    assert found.sources["hours"] == "--hours"
    assert found.sources["heat"] == "ISTHMUS_HEAT"
    assert found.sources["glaze"] == str(tmp_path / "k.toml")
    assert found.sources["vented"] == "default"
    assert resolved("c", file=file, tmp_path=tmp_path).values.heat == 2.0, "a command's table beats shared settings"


def test_the_file_may_be_named_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "k.toml").write_text("hours = 7")
    assert resolved("c", environment={"ISTHMUS_CONFIG": str(tmp_path / "k.toml")}).values.hours == 7


def test_a_positional_a_switch_and_a_list() -> None:
    found = resolved("red", "--vented", "--mark", "a", "--mark", "b").values
    assert (found.clay, found.vented, found.marks) == ("red", True, ["a", "b"])
    assert resolved("c", "--hours", "2", "--hours", "3").values.hours == 3.0, "the last counts"


@pytest.mark.parametrize("command", [("replay", "run"), ("simulate", "training", "conditions")])
def test_two_rules_of_ones_own_are_refused(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--merge", "mine:one", "--merge", "mine:other"])
    assert "--merge is given twice: mine:one and mine:other" in capsys.readouterr().err


def test_settings_from_the_environment() -> None:
    found = resolved(environment={"ISTHMUS_CLAY": "grey", "ISTHMUS_VENTED": "true"}).values
    assert (found.clay, found.vented) == ("grey", True)


def test_an_empty_variable_is_none_at_all() -> None:
    assert resolved("c", environment={"ISTHMUS_HOURS": ""}).values.hours is None


def test_what_is_asked_for_once_comes_from_its_flag_only() -> None:
    assert not resolved("c", environment={"ISTHMUS_FIRE": "1"}).values.fire
    assert resolved("c", "--fire").values.fire


@pytest.mark.parametrize(("word", "number"), [(".5", 0.5), ("2.", 2.0), ("+3", 3.0), ("1e-3", 0.001), (" 4 ", 4.0)])
def test_a_number_is_read_in_its_usual_spellings(word: str, number: float, tmp_path: Path) -> None:
    assert resolved("c", "--heat", word).values.heat == number
    assert resolved("c", environment={"ISTHMUS_HEAT": word}).values.heat == number
    assert resolved("c", file=f"heat = '{word}'", tmp_path=tmp_path).values.heat == number


def test_a_secret_has_no_flag_and_is_never_shown() -> None:
    with pytest.raises(SystemExit):
        resolved("c", "--key", "x")
    found = resolved("c", environment={"ISTHMUS_KEY": "sesame"})
    assert found.values.key == "sesame"
    console = Console(record=True, width=150)
    s.show(found, console, {"AWS_SECRET_ACCESS_KEY": "hush", "AWS_REGION": "eu-west-1"})
    text = console.export_text()
    assert "sesame" not in text
    assert "hush" not in text
    assert "eu-west-1" in text
    assert "ISTHMUS_KEY" in text
    assert s.public(found.values)["key"] == "(set, not shown)"


@pytest.mark.parametrize(
    ("words", "environment", "file", "message"),
    [
        (["c", "--heat", "hot"], {}, None, "--heat hot: must be a number"),
        (["c", "--hours", "0"], {}, None, "--hours 0: must be at least 1"),
        (["c", "--heat", "0"], {}, None, "--heat 0: must be more than 0"),
        (["c"], {"ISTHMUS_HEAT": "3000"}, None, "ISTHMUS_HEAT 3000: must be at most 2000"),
        (["c"], {"ISTHMUS_GLAZE": "lead"}, None, "ISTHMUS_GLAZE lead: choose one of ash, salt"),
        (["c"], {"ISTHMUS_VENTED": "perhaps"}, None, "must be true or false"),
        (["c"], {}, "[kiln]\nhours = 1.5", "k.toml [kiln], hours 1.5: must be"),
        (["c"], {}, "heet = 3", "unknown setting heet: did you mean heat?"),
        (["c"], {}, "[kiln]\nwheel = 3", "unknown setting wheel"),
        (["c"], {}, "[oven]\nheat = 3", "there is no command [oven]"),
        (["c"], {}, "[kilm]\nheat = 3", "there is no command [kilm]: did you mean [kiln]?"),
        (["c", "--heat", "nan"], {}, None, "--heat nan: must be a number"),
        (["c", "--heat", "2.5k"], {}, None, "--heat 2.5k: must be a number, without a letter: 2500"),
        (["c", "--heat", "3 M"], {}, None, "--heat 3 M: must be a number"),
        (["c"], {}, "heat = ", "k.toml: "),
        (["c"], {}, "heat = '\udcff'", "k.toml: "),
        ([], {}, None, "missing: CLAY (or ISTHMUS_CLAY)"),
    ],
)
def test_a_bad_setting_is_named_with_its_source(
    words: list[str], environment: dict[str, str], file: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as error:
        resolved(*words, environment=environment, file=file, tmp_path=tmp_path)
    assert message in str(error.value)


def test_a_variable_that_nobody_reads_is_pointed_out() -> None:
    found = resolved("c", environment={"ISTHMUS_HAET": "1", "ISTHMUS_WHEEL": "2", "HEAT": "3"})
    # A setting of another command is not used here, but it is not stray.
    assert found.stray == ("ISTHMUS_HAET is not a setting of any command: did you mean ISTHMUS_HEAT?",)


def test_a_table_is_a_commands_even_where_a_setting_has_its_name(tmp_path: Path) -> None:
    """In the file of docs/deploy.md, [learner] is a table, and `learner` is a setting of two commands."""
    (tmp_path / "i.toml").write_text('run = "r"\n[learner]\nlearner = "eu-1"\nsteps = 7\n')
    for name, expected in (("learner", "eu-1"), ("doctor", "doctor")):
        command = next(c for c in installed()[0] if c.name == name)
        parser = argparse.ArgumentParser()
        s.add_flags(parser, command.settings, {})
        arguments = parser.parse_args(["--config", str(tmp_path / "i.toml")])
        assert s.resolve(command.settings, name, arguments, {}, names).values.learner == expected


@pytest.mark.parametrize(
    ("words", "environment", "run", "what"),
    [
        (["r", "3/17"], {}, "r", "3/17"),
        (["r", "--json", "x", "3/17"], {}, "r", "3/17"),
        (["3/17"], {"ISTHMUS_RUN": "r"}, "r", "3/17"),
        (["q", "3/17"], {"ISTHMUS_RUN": "r"}, "q", "3/17"),
    ],
)
def test_the_run_comes_before_what_is_to_be_explained(
    words: list[str], environment: dict[str, str], run: str, what: str
) -> None:
    parser = argparse.ArgumentParser()
    s.add_flags(parser, declared.Explain, environment)
    found = s.resolve(declared.Explain, "explain", parser.parse_args(words), environment, names).values
    assert (found.run, found.what) == (run, what)


# --- the commands' own ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", installed()[0], ids=lambda c: c.name)
def test_every_command_shows_its_settings(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISTHMUS_RUN", "s3://bucket/run")
    words = {
        "explain": ["1/2"],
        "simulate training": ["codecs"],
        "keys new": ["eu-1"],
        "keys show": ["key"],
        "keys verify": ["commits/00000/000000000001"],
        "charter propose": ["charter.toml"],
        "charter approve": ["0123abcd"],
        "members add": ["eu-1", "--public-key", "key.pub"],
        "members remove": ["eu-1"],
    }.get(command.name, [])
    assert main([*command.name.split(), *words, "--show-settings"]) == 0
    shown = capsys.readouterr().out
    for setting in s.fields(command.settings):
        assert setting.name in shown
    blank = [line for line in shown.splitlines() if re.match(r"│ \S+\s+│ {2,}│", line)]
    assert blank == [], "every setting has a value, or is shown as not set"


def shown_of(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    """Return value and source of each setting as --show-settings prints them."""
    assert main([*words, "--show-settings"]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    return {row[1].strip(): (row[2].strip(), row[3].strip()) for row in rows if row[1].strip()}


def test_what_was_not_given_is_shown_as_it_holds(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["init", str(folder), "--quorum", "2", "--staleness", "3", "--seed", "5"]) == 0
    capsys.readouterr()
    monkeypatch.setenv("ISTHMUS_GRACE", "0.25")
    shown = shown_of("syncer", str(folder), "--overlap", "4", capsys=capsys)
    assert shown["quorum"] == ("2", "run")
    assert shown["staleness"] == ("3", "run")
    assert shown["snapshot_every"] == ("8", "run")
    assert shown["lead"] == ("never", "run")
    assert shown["grace"] == ("0.25", "ISTHMUS_GRACE")
    assert shown["overlap"] == ("4.0", "--overlap")
    assert shown_of("learner", str(folder), "--learner", "a", capsys=capsys)["seed"] == ("5", "run")


def test_before_there_is_a_run_its_values_are_said_to_be_its(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = shown_of("syncer", str(tmp_path / "run"), capsys=capsys)
    assert shown["quorum"] == ("not set", "run (there is none yet)")
    assert not (tmp_path / "run").exists()


def test_what_a_new_run_would_get_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_of("init", "r", "--sync-every", "48", capsys=capsys)
    assert {shown[name] for name in ("merge", "outer_lr", "outer_momentum")} == {("by the model", "default")}
    shown = shown_of("init", "r", "--sync-every", "48", "--merge", "rda", capsys=capsys)
    assert (shown["outer_lr"], shown["outer_momentum"]) == (("0.6", "default"), ("0.7", "default"))
    assert shown["quorum"] == (str(Pace().quorum), "default")
    assert shown["source" if "source" in shown else "from"][0] == "not set"


def test_names_mean_the_same_in_every_command() -> None:
    """A variable or file key that commands share must not be a number for one and a path for another."""
    types: dict[str, set[str]] = {}
    for command in installed()[0]:
        for f in s.fields(command.settings):
            if not f.flag_only:
                types.setdefault(f.name, set()).add(str(f.type.__origin__))
    assert {name for name, kinds in types.items() if len(kinds) > 1} == set()


def test_the_manifests_name_settings_that_exist() -> None:
    from infra.graph import ROOT

    known = {s.PREFIX + name.upper() for of_command in names().values() for name in of_command}
    for path in sorted((ROOT / "infra" / "kubernetes").rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            assert _isthmus_names(document) <= known, path


def _isthmus_names(node: object) -> set[str]:
    if isinstance(node, dict):
        own = {k for k in node if isinstance(k, str) and k.startswith(s.PREFIX)}
        named = {node["name"]} if isinstance(node.get("name"), str) and node["name"].startswith(s.PREFIX) else set()
        return set().union(own, named, *(_isthmus_names(v) for v in node.values()))
    return set().union(*(_isthmus_names(v) for v in node)) if isinstance(node, list) else set()


def bus_of(bus: str | None, run: str = "s3://b/r", **more: str) -> str:
    return shared.bus_of(shared.OnBus(bus=bus, **more), run)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:SECRET@host:6379/0",
        "redis://host?password=SECRET",
        "user:SECRET@host:6379",
        "https://user:SECRET@host",
        "redis://:SE/SECRET@host",
        "redis://:SECRET[x@host",
        "redis://:SECRET#x@host",
        "s3://SECRET@bucket/run",
    ],
)
def test_no_url_is_shown_or_refused_with_its_password(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    assert main(["syncer", "r", "--bus", url, "--show-settings"]) in (0, 2)
    assert main(["status", str(tmp_path / "r"), "--bus", url]) in (0, 2)
    main(["doctor", str(tmp_path / "r"), "--bus", url, "--size", "0.01", "--json", str(tmp_path / "d.json")])
    said = capsys.readouterr()
    assert "SECRET" not in said.out + said.err
    assert "SECRET" not in ((tmp_path / "d.json").read_text() if (tmp_path / "d.json").exists() else "")


def test_user_and_password_of_the_bus_come_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("a/b@c\n")
    assert bus_of("redis://h:1") == "redis://h:1"
    assert bus_of("redis://h:1/2", bus_user="u", bus_password="p:w") == "redis://u:p%3Aw@h:1/2"
    assert bus_of("rediss://h", bus_user="u", bus_password_file=str(tmp_path / "p")) == "rediss://u:a%2Fb%40c@h"
    assert bus_of(None, "/runs/a").startswith("sqlite:///runs/a")
    assert bus_of(None, "s3://bucket/run") == "store:"


def test_a_loop_of_ones_own_takes_user_and_password_of_the_bus_from_the_same_variables(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("a/b@c\n")
    said = {"ISTHMUS_BUS_USER": "u", "ISTHMUS_BUS_PASSWORD_FILE": str(tmp_path / "p")}
    assert as_environment_says("rediss://h:1", said) == "rediss://u:a%2Fb%40c@h:1"
    assert as_environment_says("redis://v:w@h", said) == "redis://v:w@h", "the user in the URL is kept"
    assert as_environment_says("sqlite:///run/bus.sqlite", said) == "sqlite:///run/bus.sqlite"
    assert as_environment_says("redis://h", {}) == "redis://h"


@pytest.mark.parametrize(
    ("bus", "more", "message"),
    [
        ("redis://u:p@h", {"bus_password": "x"}, "leave one out"),
        ("redis://h", {"bus_password": "x", "bus_password_file": "y"}, "leave one out"),
        ("redis://h", {"bus_password_file": "/nonexistent/p"}, "--bus-password-file /nonexistent/p: No such file"),
        ("sqlite:///x", {"bus_user": "u"}, "takes no user or password"),
    ],
)
def test_what_does_not_fit_together_is_said(bus: str | None, more: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as error:
        bus_of(bus, **more)
    assert message in str(error.value)


WITHOUT_FLAG = {"merge_embeddings", "feedback_down"}
"""Rules that follow from the flags `--merge` and `--feedback`."""


@pytest.mark.parametrize("kind", [Pace, Rules])
def test_flags_are_made_from_the_fields_of_rules_and_pace(kind: type[Pace] | type[Rules]) -> None:
    """Every value that a flag accepts is valid in the struct, too."""
    group = shared.PaceOfRun if kind is Pace else shared.ArithmeticOfRun
    flags = {field.of: field for field in s.fields(group)}
    assert set(kind.__struct_fields__) - WITHOUT_FLAG == flags.keys()
    for name, flag in flags.items():
        declared, limits = metadata(kind, name), flag.type.__metadata__[0]
        assert flag.description.startswith(declared.get("description", "")), name
        assert flag.metavar == declared.get("title", flag.metavar), name
        assert all(getattr(limits, at) == declared.get(at) for at in ("ge", "gt", "le", "lt")), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Pace(quorum=0), "pace.quorum 0: must be at least 1"),
        (Pace(overlap=-0.5), "pace.overlap -0.5: must be at least 0"),
        (Pace(lead=-1.0), "pace.lead -1.0: must be at least 0"),
        (Pace(heartbeat_s=float("nan")), "pace.heartbeat_s nan: must be a finite number"),
        (Pace(grace="much"), "pace.grace much: must be a number"),  # type: ignore[arg-type]
        (Rules(fragments=5000), "rules.fragments 5000: must be at most 4096"),
        (Rules(outer_momentum=1.0), "rules.outer_momentum 1.0: must be less than 1"),
        (Rules(error_feedback="no"), "rules.error_feedback no: must be true or false"),  # type: ignore[arg-type]
    ],
)
def test_rules_and_pace_say_it_in_the_same_words(settings: Pace | Rules, message: str) -> None:
    with pytest.raises(InputError) as error:
        settings.check()
    assert str(error.value) == message


def test_a_pace_changes_only_what_was_given() -> None:
    found = shared.pace_of(shared.PaceOfRun(grace=0.1, heartbeat_s=2.0), Pace(quorum=3))
    assert (found.grace, found.heartbeat_s, found.quorum) == (0.1, 2.0, 3)


def test_a_word_for_another_commands_variable_is_found_too() -> None:
    found = resolved("c", environment={"ISTHMUS_WHEL": "2"})
    assert found.stray[0].endswith("did you mean ISTHMUS_WHEEL?")
