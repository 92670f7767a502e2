"""`make check`, `make test` and `make test-all` each run the tests of their tier, and fail if any part fails."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from support import checks, tiers


def item(
    nodeid: str, *, own: Sequence[str] = (), module: str = "", fixtures: Sequence[str] = (), **params: str
) -> pytest.Item:
    """Return a test with its own marks (those of parameters last), its module's mark, its fixtures and parameters."""
    marks = [pytest.mark.tier(name).mark for name in own]
    inherited = pytest.mark.tier(module).mark if module else None
    made = SimpleNamespace(
        nodeid=nodeid,
        own_markers=marks,
        get_closest_marker=lambda _: marks[0] if marks else inherited,
        fixturenames=fixtures,
        callspec=SimpleNamespace(params=params),
    )
    return cast(pytest.Item, made)


@pytest.mark.parametrize(
    ("test", "tier"),
    [
        (item("tests/unit/test_x.py::t"), "check"),
        (item("tests/integration/test_x.py::t"), "test"),
        (item("tests/e2e/test_x.py::t"), "all"),
        (item("tests/e2e/test_x.py::t", module="test"), "test"),
        (item("tests/e2e/test_x.py::t", module="test", own=["all"]), "all"),
        (item("tests/e2e/test_x.py::t", own=["test", "all"]), "all"),
        (item("tests/unit/test_x.py::t", own=["test"]), "test"),
        (item("tests/conformance/test_x.py::t", kind="files"), "check"),
        (item("tests/conformance/test_x.py::t", kind="moto by aiobotocore"), "test"),
        (item("tests/unit/test_x.py::t", fixtures=["redis"]), "test"),
        (item("tests/e2e/test_x.py::t", fixtures=["redis"]), "all"),
    ],
)
def test_the_directory_decides_unless_a_mark_or_a_server_does(test: pytest.Item, tier: str) -> None:
    assert tiers.tier_of(test) == tier


def test_a_tier_holds_those_before_it() -> None:
    tests = [item(f"tests/{name}/test_x.py::t") for name in ("unit", "integration", "e2e")]
    assert [len(tiers.split(tests, highest)[0]) for highest in tiers.TIERS] == [1, 2, 3]


def test_every_directory_of_tests_has_a_tier_and_the_first_looks_at_its_own_alone() -> None:
    folders = {path.parent.relative_to(tiers.TESTS).parts[0] for path in tiers.TESTS.glob("*/**/test_*.py")}
    assert folders == set(tiers.DIRECTORIES)
    above = {folder for folder in folders if tiers.is_above(tiers.TESTS / folder, "check")}
    assert above == {folder for folder, tier in tiers.DIRECTORIES.items() if tier != "check"}
    assert not any(tiers.is_above(tiers.TESTS / folder, "test") for folder in folders), "a mark may add a test"


def test_a_module_without_a_test_of_the_tier_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "TESTS", tmp_path)
    for place, text in (("e2e/test_a.py", ""), ("e2e/test_b.py", 'tier("test")'), ("unit/test_c.py", "")):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(text)
    (tmp_path / "e2e/processes.py").touch()
    files = sorted(tmp_path.glob("*/*.py"))
    assert [path.name for path in files if tiers.is_above(path, "test")] == ["test_a.py"]
    assert [path.name for path in files if tiers.is_above(path, "check")] == ["test_a.py", "test_b.py"]
    assert not any(tiers.is_above(path, "all") for path in files)
    assert not tiers.is_above(Path("/elsewhere/test_x.py"), "test")


def outcome(monkeypatch: pytest.MonkeyPatch, *codes: int, beside: int = 0, words: Sequence[str] = ("test",)) -> int:
    def parts(_tier: str, _arguments: Sequence[str]) -> tuple[list[checks.Part], list[checks.Part]]:
        def part(name: str, code: int) -> checks.Part:
            return checks.Part(name, ([sys.executable, "-c", f"print('{name} ran'); raise SystemExit({code})"],))

        return [part(f"part{n}", code) for n, code in enumerate(codes)], [part("beside", beside)]

    monkeypatch.setattr(checks, "parts", parts)
    monkeypatch.setattr(sys, "argv", ["checks.py", *words])
    return checks.main()


def test_one_part_that_fails_is_enough_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert outcome(monkeypatch, 0, 0) == 0
    assert "FAILED" not in capfd.readouterr().out
    assert outcome(monkeypatch, 1, 0) == 1
    said = capfd.readouterr().out
    assert said.count("FAILED") == 1
    for name in ("part0", "part1", "beside"):
        assert f"{name} ran" in said
    assert outcome(monkeypatch, 0, 0, beside=3) == 1


def test_a_part_that_cannot_run_here_is_not_called_passed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert outcome(monkeypatch, 0, checks.NOT_RUN) == 0
    said = capfd.readouterr().out
    assert re.search(r"part1\s+not run", said)
    assert re.search(r"part0\s+passed", said)


def test_single_parts_can_be_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert outcome(monkeypatch, 1, 0, words=("all", "--only", "part1")) == 0
    assert "part0 ran" not in capfd.readouterr().out
    with pytest.raises(SystemExit):
        outcome(monkeypatch, 0, words=("all", "--only", "prat0"))


def test_each_tier_runs_style_types_and_its_tests() -> None:
    for tier in tiers.TIERS:
        alone, beside = checks.parts(tier, ["-x"])
        assert [part.name for part in beside] == ["style", "types"]
        *before, command = alone[0].commands
        assert command[-3:] == ["--tier", tier, "-x"]
        assert [words[-1] for words in before] == ([] if tier == "check" else ["support.compiled"])
        assert [part.name for part in alone[1:]] == (
            ["simulation", "mutants", "chaos", "compose"] if tier == "all" else []
        )
