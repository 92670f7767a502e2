"""The report of `make gpu` keeps what each part has found, however the part ends, and goes into a page unchanged."""

import sys
import time
from pathlib import Path

import pytest

from gpu import parts, run
from gpu.run import DONE, FAILED, LATE, NO_GPU, Part, Result
from gpu.training import Curve
from isthmus_lab.bench.measure import row

ROW = row("machine", "copy", "1M", [2.0], "GB/s", limits=[4.0])


def a_part(name: str, code: str, monkeypatch: pytest.MonkeyPatch, limit_s: float = 60.0) -> Part:
    """Return a part whose process runs this code instead."""
    part = Part(name, "a part", limit_s, lambda folder, seconds: iter(()))
    monkeypatch.setattr(run, "command", lambda part, out, limit_s: [sys.executable, "-c", code, str(out)])
    return part


FINDS = """
import sys, json, subprocess, time, pathlib
out = pathlib.Path(sys.argv[1])
(out / "p").mkdir(exist_ok=True)
(out / "p" / "learner.log").write_text("what the learner said")
(out / "p.rows").write_text(ROWS)
"""


def finds() -> str:
    import json

    import msgspec

    rows = json.dumps(msgspec.to_builtins(ROW)) + "\n" + json.dumps(vars(Curve("one", [1, 2], [3.0, 2.0]))) + "\n"
    return FINDS.replace("ROWS", repr(rows))


def test_a_part_that_ends_well_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = a_part("p", finds(), monkeypatch)
    monkeypatch.setattr(parts, "HAS_GPU", False)
    result = run.run_apart(part, tmp_path, 60.0)
    assert (result.state, result.rows, result.said) == (NO_GPU, [ROW], "")
    assert result.curves == [Curve("one", [1, 2], [3.0, 2.0])]
    monkeypatch.setattr(parts, "HAS_GPU", True)
    assert run.run_apart(part, tmp_path, 60.0).state == DONE
    assert not (tmp_path / "p").exists(), "the part's folder is deleted, as it would fill the disk"


def test_a_part_that_fails_keeps_its_rows_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = a_part("p", finds() + "\nraise SystemExit('no such thing')", monkeypatch)
    result = run.run_apart(part, tmp_path, 60.0)
    assert (result.state, result.rows) == (FAILED, [ROW])
    assert "no such thing" in result.said
    assert "what the learner said" in result.said


def test_a_part_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = finds() + (
        "\nchild = subprocess.Popen(['sleep', '600'])\n(out / 'pid').write_text(str(child.pid))\ntime.sleep(600)"
    )
    result = run.run_apart(a_part("p", started, monkeypatch), tmp_path, 5.0)
    assert (result.state, result.rows) == (LATE, [ROW])
    child = Path("/proc", (tmp_path / "pid").read_text())
    for _ in range(1000):
        if not child.exists() or " Z " in (child / "stat").read_text():
            break
        time.sleep(0.01)
    else:
        pytest.fail("its child goes on")


def test_without_time_a_part_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run.run_apart(a_part("p", finds(), monkeypatch), tmp_path, 4.0)
    assert (result.state, result.rows) == (LATE, [])
    assert not (tmp_path / "p.log").exists()


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="test_x[1]" time="2.5"/>
<testcase classname="tests.gpu.test_a" name="test_x[2]" time="1"><failure message="bad">def f():
    there
&gt;   assert x
E   it was not</failure></testcase>
<testcase classname="tests.gpu.test_a" name="test_y" time="0"><skipped message="no GPU"/></testcase>
<testcase classname="tests.gpu.test_a" name="test_z" time="0"><skipped message="no compiler"/></testcase>
</testsuite></testsuites>"""


def test_the_outcome_of_every_test_is_read(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(JUNIT)
    found = run.tests_in(tmp_path / "tests.xml")
    assert [t["outcome"] for t in found] == ["passed", "failure", NO_GPU, "skipped"]
    assert found[1]["detail"] == ">   assert x\nE   it was not"
    assert run.summed(found) == {
        "gpu.test_a.test_x": "1 passed, 1 failure", "gpu.test_a.test_y": "1 no GPU", "gpu.test_a.test_z": "1 skipped",
    }  # fmt: skip
    assert run.tests_in(tmp_path / "missing") == []


def test_where_pytest_was_stopped_its_lines_are_read() -> None:
    said = "[gw0] [ 3%] PASSED tests/gpu/test_a.py::test_x[a b]\n[gw1] [ 5%] FAILED tests/gpu/test_a.py::test_y\nFAILED"
    assert {t["name"]: t["outcome"] for t in run.tests_said(said)} == {
        "gpu/test_a.py::test_x[a b]": "passed",
        "gpu/test_a.py::test_y": "failed",
    }


def test_a_report_goes_into_a_page_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = [{"name": "t.a[1]", "outcome": "failure", "message": "", "seconds": 1.0, "detail": "E   why"}]
    results = [
        Result("machine", "What it does", DONE, 3.0, 40.0, [ROW], [Curve("one", [1, 2], [3.0, 2.0])]),
        Result("tests", "The tests", FAILED, 9.0, 130.0, tests=tests, said="all of it"),
        Result("kill", "A kill", LATE, 60.0, 60.0, said="it went on"),
    ]
    run.write(tmp_path, {"GPU": "a GPU", "torch": "2"}, results)
    said = (tmp_path / "report.md").read_text()
    assert "| machine | done | 3 | 40 |" in said
    assert "| copy | 1M | 2 | GB/s | 4 | 0.50 |" in said
    assert "| `t.a` | 1 failure |" in said
    assert "E   why" in said
    assert "it went on" in said
    assert "all of it" not in said, "if failed tests are listed, their output is left out"
    assert "figures mean nothing" not in said
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- gpu -->\nold\n<!-- end gpu -->\nafter\n")
    assert run.into_page(page, tmp_path) == 0
    whole = page.read_text()
    assert (
        whole == f"before\n<!-- gpu -->\n{said.replace('losses.png', 'images/gpu-losses.png')}<!-- end gpu -->\nafter\n"
    )
    page.write_text("no place")
    assert run.into_page(page, tmp_path) == 1
    assert "has no place for it" in capsys.readouterr().err
    run.write(tmp_path, {"GPU": NO_GPU}, results)
    assert "figures mean nothing" in (tmp_path / "report.md").read_text()
