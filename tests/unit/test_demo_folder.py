"""`isthmus demo --out DIR` replaces the files of an earlier demo, which left its mark there, and no other files."""

import json
from pathlib import Path

import pytest

from isthmus.errors import InputError
from isthmus.format.records import keys
from isthmus_services.demo import mark
from isthmus_services.main import main

ALL = (mark.RUN, mark.LOGS, mark.SERVERS, mark.KEYS)


def earlier(out: Path) -> None:
    """Create the files that a demo leaves."""
    mark.claim(out, ALL)
    files = "run/commits/00000/1 run/bus.sqlite run/.scratch/x logs/learner-0.log servers/redis.log keys/owner.pub"
    for name in files.split():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    (out / "run" / "run").touch()
    (out / "report.json").write_text("{}")


def test_an_earlier_demo_is_replaced_and_what_lies_beside_it_stays(tmp_path: Path) -> None:
    earlier(tmp_path / "d")
    (tmp_path / "d" / "notes.txt").write_text("mine")
    mark.claim(tmp_path / "d", ALL)
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == [mark.MARK, "notes.txt", "report.json"]
    assert json.loads((tmp_path / "d" / mark.MARK).read_text())["made_by"] == mark.MADE_BY


@pytest.mark.parametrize("theirs", ["run/thesis.txt", "logs/app.log", "report.json", "loss.png", "run"])
def test_what_no_demo_marked_is_refused_and_kept(theirs: str, tmp_path: Path) -> None:
    path = tmp_path / "d" / theirs
    path.parent.mkdir(parents=True)
    path.write_text("ten years")
    with pytest.raises(InputError, match=r"no mark of a demo .*: nothing was deleted; choose another folder"):
        mark.claim(tmp_path / "d", ALL)
    assert path.read_text() == "ten years"
    assert not (tmp_path / "d" / mark.MARK).exists()


@pytest.mark.parametrize("theirs", ["run/thesis.txt", "logs/app.log", "servers/data", "keys/id_ed25519"])
def test_in_a_marked_folder_what_a_demo_does_not_write_keeps_all_of_it(theirs: str, tmp_path: Path) -> None:
    out = tmp_path / "d"
    earlier(out)
    (out / theirs).write_text("ten years")
    with pytest.raises(InputError, match="was not written by a demo: nothing was deleted"):
        mark.claim(out, ALL)
    assert (out / theirs).read_text() == "ten years"
    assert (out / "run" / "run").exists()
    assert (out / "keys" / "owner.pub").exists()
    assert (out / "logs" / "learner-0.log").exists()


def test_a_folder_that_points_elsewhere_is_not_followed(tmp_path: Path) -> None:
    out = tmp_path / "d"
    earlier(out)
    elsewhere = tmp_path / "elsewhere"
    (out / "run").rename(elsewhere)
    (out / "run").symlink_to(elsewhere)
    with pytest.raises(InputError, match="was not created by a demo"):
        mark.claim(out, ALL)
    assert (elsewhere / "run").exists()


def test_a_run_in_a_store_of_its_own_leaves_the_folder_run_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").touch()
    mark.claim(tmp_path, (mark.LOGS,))
    assert (tmp_path / "run" / "thesis.txt").exists()


def test_every_folder_of_a_run_is_known_to_be_a_demos() -> None:
    d = bytes(32)
    all_keys = [
        keys.RUN_KEY,
        keys.update_key(0, "a", 0, d),
        keys.value_key(0, 1, d),
        keys.snapshot_key(0, 1, d),
        keys.commit_key(0, 1),
        keys.segment_key(0, 1, d),
        keys.claim_key("a", 1),
        keys.SCRATCH,
    ]
    for key in all_keys:
        assert mark._OURS[mark.RUN].fullmatch(key.partition("/")[0]), key


def test_the_command_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").touch()
    assert main(["demo", "--out", str(tmp_path), "--steps", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"isthmus demo: --out {tmp_path}: {tmp_path}/run exists, but no mark of a demo")
    assert (tmp_path / "run" / "thesis.txt").exists()
