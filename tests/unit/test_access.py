"""Passwords and the ACL of an installation: made once, readable by their owner only, added to without change."""

import hashlib
import re
from pathlib import Path

import pytest

from isthmus_services.cli import main
from isthmus_services.commands.access import ACL_FILE, CREDENTIALS_FILE


def access(folder: Path, *learners: str) -> None:
    assert main(["access", str(folder), *(word for name in learners for word in ("--learner", name))]) == 0


def contents(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in folder.iterdir()}


def test_every_password_is_its_own_and_nobody_elses_to_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    access(tmp_path, "eu-1")
    files = contents(tmp_path)
    passwords = [text.strip() for name, text in files.items() if name.startswith("bus-") or name.endswith("-password")]
    assert len(set(passwords)) == len(passwords) == 6
    assert all(len(password) >= 32 for password in passwords)
    assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o600}
    printed = capsys.readouterr().out
    assert not any(password in printed for password in passwords)


def test_the_acl_holds_digests_and_each_users_only_stream(tmp_path: Path) -> None:
    access(tmp_path, "eu-1")
    files = contents(tmp_path)
    lines = dict(re.findall(r"^user (\S+) (.*)$", files[ACL_FILE], re.MULTILINE))
    assert lines.pop("default") == "off"
    written = {"syncer": "syncer", "learner": "learner/*", "learner-eu-1": "learner/eu-1", "reader": None}
    assert set(lines) == set(written)
    for user, stream in written.items():
        password = files[f"bus-{user}"].strip()
        words = lines[user].split()
        assert password not in files[ACL_FILE]
        assert f"#{hashlib.sha256(password.encode()).hexdigest()}" in words
        assert "-@all" in words
        assert not any(word.startswith("+@") for word in words), "commands are granted by name"
        keys = ["%R~isthmus:*"] + ([f"%W~isthmus:*:{stream}"] if stream else [])
        assert [word for word in words if "~" in word] == keys


def test_doing_it_again_changes_nothing_and_a_new_learner_is_added(tmp_path: Path) -> None:
    access(tmp_path, "eu-1")
    before = contents(tmp_path)
    access(tmp_path)
    assert contents(tmp_path) == before
    access(tmp_path, "us-1")
    after = contents(tmp_path)
    assert {name: after[name] for name in before if name != ACL_FILE} == {
        name: text for name, text in before.items() if name != ACL_FILE
    }
    assert after[ACL_FILE].startswith(before[ACL_FILE])
    assert "user learner-us-1 " in after[ACL_FILE]


def test_the_stores_credentials_are_where_aws_clients_look(tmp_path: Path) -> None:
    access(tmp_path)
    files = contents(tmp_path)
    assert f"aws_access_key_id = {files['store-user'].strip()}\n" in files[CREDENTIALS_FILE]
    assert f"aws_secret_access_key = {files['store-password'].strip()}\n" in files[CREDENTIALS_FILE]


@pytest.mark.parametrize("name", ["a b", "*", "x/y", ""])
def test_a_name_that_could_open_more_than_one_stream_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["access", str(tmp_path / "new"), "--learner", name]) == 2
    assert "--learner" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["access", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
