"""Three institutions with a charter: the page that leads through it, and the demo that shows it."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from isthmus_services.demo import consortium
from isthmus_services.processes import isthmus_command
from support.docs_blocks import ROOT, Shell, blocks
from support.permitted import seaweedfs_of

pytestmark = [pytest.mark.tier("all"), pytest.mark.timeout(600)]  # some forty commands and processes each


def environment() -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "ISTHMUS_"))}
    return plain | {"OMP_NUM_THREADS": "1"}


def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "pkg").symlink_to(ROOT / "pkg")
    with Shell(tmp_path, environment()) as shell:
        shell.page("docs/consortium.md")
    said = "".join(shell.said.values())
    assert "membership 1 is in force, approved by 2" in said
    assert "not promoted: no version has numbers of 2 evaluators" in said
    assert "promoted: version 2 of" in said
    assert "membership 2 is in force, approved by 2" in said
    audit = json.loads((tmp_path / "audit.json").read_text())
    assert audit["replay"]["differences"] == []
    check = next(line for line in said.splitlines() if "ssh-keygen" in line and "audit.json" in line)
    done = subprocess.run(["bash", "-c", check], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


AS = """#!{python}
import os, sys

words = sys.argv[1:]
named = words[words.index("--learner") + 1] if "--learner" in words else ""
identity = {{
    "init": "owner", "charter": "owner", "members": "owner", "learner": f"learner-{{named}}", "syncer": "syncer",
    "follow": "follower-held-out", "promote": "follower-held-out", "export": "follower-held-out", "audit": "reader",
}}.get(words[0], "nobody")
if words[:2] == ["charter", "show"]:
    identity = "reader"
os.environ["AWS_SHARED_CREDENTIALS_FILE"] = f"{folder}/{{identity}}/aws-credentials"
os.execv("{python}", ["{python}", "-m", "isthmus_services.main", *words])
"""
"""A program that runs `isthmus` with the rights to the bucket that the page's table gives to who runs the command."""


def test_the_page_goes_through_a_bucket_with_the_rights_of_its_table(tmp_path: Path) -> None:
    url, folder = "s3://consortium/run", tmp_path / "access"
    learners = [word for name in consortium.LEARNERS for word in ("--learner", name)]
    made = isthmus_command("access", str(folder), "--run", url, *learners, "--series", "held-out")
    subprocess.run(made, env=environment(), check=True, stdout=subprocess.DEVNULL)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"export PATH={programs}:$PATH\n")
    for name, text in (("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'), ("isthmus", AS)):
        (programs / name).write_text(text.format(python=sys.executable, folder=folder) if text is AS else text)
        (programs / name).chmod(0o755)
    (tmp_path / "pkg").symlink_to(ROOT / "pkg")
    with (
        seaweedfs_of(tmp_path, folder, "consortium") as store,
        Shell(tmp_path, environment() | {"AWS_ENDPOINT_URL": store.server.url, "AWS_REGION": "us-east-1"}) as shell,
    ):
        shell.page("docs/consortium.md", was="out/run", now=url)
        said = "".join(shell.said.values())
    assert "membership 2 is in force, approved by 2" in said
    assert "promoted: version 2 of" in said
    assert json.loads((tmp_path / "audit.json").read_text())["replay"]["differences"] == []


def test_the_demo_uses_the_charter_and_the_evaluation_of_the_page() -> None:
    page = {block.title: block.text for block in blocks("docs/consortium.md") if block.title}
    assert tomllib.loads(page["charter.toml"]) == tomllib.loads(consortium.CHARTER)
    assert page["evaluate.py"] == consortium.EVALUATE


def test_the_demo_tells_its_story(tmp_path: Path) -> None:
    done = subprocess.run(
        isthmus_command("demo", "--consortium", "--steps", "400", "--out", "out"), cwd=tmp_path, env=environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["refused"].startswith("not promoted")
    assert [said.startswith("promoted: version") for said in report["promoted"]] == [True, True]
    assert set(report["learner_status"].values()) == {0}
    assert "not-a-member" in report["expelled"]
    assert report["differ"] == 0
    assert "removed: east-1" in done.stdout


def test_the_demo_says_how_long_it_takes_and_how_it_differs() -> None:
    said = consortium._begins(1500)
    assert "docs/consortium.md: about 4 minutes on two cores" in said
    assert "South and North expel east-1 instead of south-1" in said
