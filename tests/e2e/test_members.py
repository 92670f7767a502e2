"""A run's owner manages keys and members with `isthmus keys` and `isthmus members`."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from e2e.test_processes import processes, wait_for
from isthmus.format.signing import fingerprint, read_signer
from isthmus_services.main import main

pytestmark = pytest.mark.tier("test")


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    found = main(list(words))
    out = capsys.readouterr()
    assert found == code, out.out + out.err
    return out.out + out.err


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Create a signed run in a folder, and keys beside it."""
    monkeypatch.chdir(tmp_path)
    for name in ("owner", "next", "eu", "us", "syncer"):
        told(capsys, "keys", "new", name, "--folder", "k")
    assert "signed by its owner SHA256:" in told(capsys, "init", "run", "--fragments", "2", "--key", "k/owner")
    return "run"


def test_members_come_change_and_go(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    by = ("--key", "k/owner")
    said = told(capsys, "members", "add", run, "eu-1", "--public-key", "k/eu.pub", *by, "--json", "added.json")
    assert json.loads(Path("added.json").read_text()) == {"membership": 1, "proposal": None, "still_needs": ""}
    assert "membership 1: 1 members" in said
    assert re.search(r"0/64, 1/64", said), "it names the versions after which only this membership is accepted"
    told(capsys, "members", "add", run, "acme-*", "--public-key", Path("k/us.pub").read_text(), *by)
    told(capsys, "members", "add", run, "s-*", "--as", "syncer", "--public-key", "k/syncer.pub", *by)
    listed = told(capsys, "members", "list", run, "--json", "m.json")
    assert "membership 3" in listed
    found = json.loads(Path("m.json").read_text())
    assert [(m["name"], m["role"]) for m in found["members"]] == [
        ("acme-*", "learner"), ("eu-1", "learner"), ("s-*", "syncer"),
    ]  # fmt: skip
    assert found["members"][1]["key"] == fingerprint(read_signer("k/eu").author)
    told(capsys, "members", "rotate", run, "--member", "eu-1", "--public-key", "k/next.pub", *by)
    told(capsys, "members", "remove", run, "acme-*", *by)
    told(capsys, "members", "list", run, "--json", "m.json")
    found = json.loads(Path("m.json").read_text())
    assert [m["name"] for m in found["members"]] == ["eu-1", "s-*"]
    assert found["members"][0]["key"] == fingerprint(read_signer("k/next").author)
    signers = told(capsys, "members", "list", run, "--allowed-signers")
    assert [line.split()[0] for line in signers.splitlines()] == ["owner", "eu-1", "s-*"]


def test_a_run_changes_hands_and_only_its_owner_says_who_takes_part(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    add = ("members", "add", run, "eu-1", "--public-key", "k/eu.pub")
    assert "is not the owner's" in told(capsys, *add, "--key", "k/eu", code=2)
    assert "use --key OWNER_KEY_FILE, the private key of an owner of the run" in told(capsys, *add, code=2)
    told(capsys, "members", "rotate", run, "--successor", "k/next", "--key", "k/owner")
    assert "is not the owner's" in told(capsys, *add, "--key", "k/owner", code=2)
    told(capsys, *add, "--key", "k/next")
    was = fingerprint(read_signer("k/owner").author)
    assert "membership 2" in told(capsys, "members", "list", run, "--owner", was), "the first owner still names the run"
    other = fingerprint(read_signer("k/eu").author)
    assert "this is another run" in told(capsys, "members", "list", run, "--owner", other, code=2)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("add", "RUN", "eu-1", "--public-key", "k/us.pub"), "members rotate --member eu-1"),
        (("add", "RUN", "eu-1", "--public-key", "k/eu.pub"), "is already a member"),
        (("add", "RUN", "s-*", "--as", "syncer", "--public-key", "k/eu.pub"), "is the key of learner eu-1"),
        (("add", "RUN", "us-1", "--public-key", "k/eu.pub"), "if both are meant to have this key, add --shared-key"),
        (("add", "RUN", "../x", "--public-key", "k/us.pub"), "name of a member"),
        (("add", "RUN", "x", "--public-key", "k/us"), "private key, which must stay secret"),
        (("remove", "RUN", "nobody"), "nobody is not a member; members are eu-1"),
        (("rotate", "RUN", "--member", "nobody", "--public-key", "k/us.pub"), "nobody is not a member"),
        (("rotate", "RUN"), "use either --member NAME"),
        (("rotate", "RUN", "--member", "eu-1"), "--member needs the member's new key"),
    ],
)
def test_what_cannot_be_is_said_and_changes_nothing(
    run: str, words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told(capsys, "members", "add", run, "eu-1", "--public-key", "k/eu.pub", "--key", "k/owner")
    given = [run if word == "RUN" else word for word in words]
    assert why in told(capsys, "members", *given, "--key", "k/owner", code=2)
    assert "membership 1" in told(capsys, "members", "list", run)


def test_a_syncer_of_one_name_takes_that_name_and_one_that_was_removed_is_told_what_adds_it(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status` prints the command without a name: it does not know to whom it is printed."""
    told(capsys, "members", "add", run, "first", "--as", "syncer", "--public-key", "k/syncer.pub", "--key", "k/owner")
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run, "--key", "k/syncer")
        wait_for(lambda: "first serves" in p.said("s"), "it serves under the name of its key")
    assert "no syncer can take part" in told(capsys, "members", "remove", run, "first", "--key", "k/owner")
    said = told(capsys, "syncer", run, "--key", "k/syncer", code=2)
    assert f"isthmus members add {run} NAME --as syncer --public-key FILE.pub" in said.replace(str(tmp_path / run), run)
    assert "syncer-" not in said, "it has no name of its own yet"


def test_an_object_is_proved_to_ssh_keygen(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "keys", "verify", run, "run", "--into", "proof")
    assert "signed by SHA256:" in said
    assert "the signer may write this object" in said
    command = next(line for line in said.splitlines() if line.startswith("ssh-keygen"))
    assert subprocess.run(command, shell=True, capture_output=True, check=False).returncode == 0
    Path("proof/message").write_bytes(Path("proof/message").read_bytes() + b"!")
    assert subprocess.run(command, shell=True, capture_output=True, check=False).returncode != 0
    assert "nothing is stored" in told(capsys, "keys", "verify", run, "commits/00000/000000000001", code=2)
    blob = bytearray(Path("run/run").read_bytes())
    blob[70] ^= 1
    Path("run/evaluations").mkdir()
    Path("run/evaluations/x").write_bytes(blob)
    assert "not trusted: it belongs to another run" in told(capsys, "keys", "verify", run, "evaluations/x", code=1)


def test_a_run_without_a_key_has_no_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    told(capsys, "init", "plain", "--fragments", "2")
    assert "has no members" in told(capsys, "members", "list", "plain", code=2)
    told(capsys, "keys", "new", "eu", "--folder", "k")
    assert "nothing in this run is signed" in told(capsys, "syncer", "plain", "--key", "k/eu", code=2)


def test_a_key_is_shown_by_either_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = told(capsys, "keys", "new", "eu", "--folder", "k")
    assert "PRIVATE" not in made
    assert told(capsys, "keys", "show", "k/eu") == told(capsys, "keys", "show", "k/eu.pub")
    assert "there is a key already" in told(capsys, "keys", "new", "eu", "--folder", "k", code=2)
    assert "No such file" in told(capsys, "keys", "show", "k/nobody", code=2)
