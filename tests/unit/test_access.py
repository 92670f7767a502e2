"""`isthmus access` creates passwords, the ACL and policies once, readable by their owner only; later runs only add."""

import configparser
import hashlib
import json
import re
from pathlib import Path

import pytest

from isthmus_services.commands import access as command
from isthmus_services.main import main
from isthmus_services.policies import AWS, MINIO, acl_rules, policy
from support.permission_cases import HEARS, IDENTITIES, LEARNERS, SERIES

EVERYBODY = [*(word for name in LEARNERS for word in ("--learner", name)), "--series", SERIES]


def access(folder: Path, *words: str) -> None:
    assert main(["access", str(folder), *words]) == 0


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def secrets_of(files: dict[str, str]) -> list[str]:
    """Every password and key that the files hold."""
    found = [text.strip() for name, text in files.items() if name.endswith("password")]
    for name, text in files.items():
        if name.endswith(command.CREDENTIALS):
            parsed = configparser.ConfigParser()
            parsed.read_string(text)
            found.append(parsed["default"]["aws_secret_access_key"])
    return found


def test_every_secret_is_its_own_and_nobody_elses_to_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "access"
    access(folder, *EVERYBODY, "--run", "s3://bucket/team/run")
    found = secrets_of(contents(folder))
    # Store keys of all identities and of the administrator, bus passwords of those that use the bus, and Grafana's.
    assert len(found) == len(set(found)) == len(IDENTITIES) + len(HEARS) + 2
    assert all(len(secret) >= 32 for secret in found)
    assert {p.stat().st_mode & 0o777 for p in folder.rglob("*") if p.is_file()} == {0o600}
    printed = capsys.readouterr()
    assert not any(secret in printed.out + printed.err for secret in found)


def test_a_participants_folder_has_its_own_secrets_and_no_others(tmp_path: Path) -> None:
    access(tmp_path, *EVERYBODY, "--run", "s3://bucket/team/run")
    files = contents(tmp_path)
    for user in IDENTITIES:
        own = {name: text for name, text in files.items() if name.startswith(f"{user}/")}
        assert {Path(name).name for name in own} == {
            command.CREDENTIALS,
            *((command.BUS_USER, command.BUS_PASSWORD) if user in HEARS else ()),
        }
        others = secrets_of({name: text for name, text in files.items() if name not in own})
        assert not any(secret in text for secret in others for text in own.values())
    policies = "".join(text for name, text in files.items() if name.startswith("policies/")) + files["README"]
    assert not any(secret in policies for secret in secrets_of(files))


def test_the_acl_holds_digests_and_what_the_table_gives(tmp_path: Path) -> None:
    access(tmp_path, *EVERYBODY)
    files = contents(tmp_path)
    lines = dict(re.findall(r"^user (\S+) (.*)$", files[command.ACL_FILE], re.MULTILINE))
    assert lines.pop("default") == "off"
    assert set(lines) == set(HEARS)
    for user, line in lines.items():
        password = files[f"{user}/{command.BUS_PASSWORD}"].strip()
        assert password not in files[command.ACL_FILE]
        assert line == f"on #{hashlib.sha256(password.encode()).hexdigest()} {acl_rules(IDENTITIES[user])}"
        assert files[f"{user}/{command.BUS_USER}"].strip() == user


def test_policies_are_written_for_everybody_in_the_words_of_each_store(tmp_path: Path) -> None:
    access(tmp_path, *EVERYBODY, "--run", "s3://bucket/team/run")
    for who in IDENTITIES.values():
        for name, dialect in (("aws", AWS), ("minio", MINIO)):
            found = json.loads((tmp_path / "policies" / name / f"{who.access_key}.json").read_text())
            assert found == policy(who, "bucket", "team/run", dialect)
    ceph = json.loads((tmp_path / "policies" / "ceph.json").read_text())["Statement"]
    assert {s["Principal"]["AWS"][0].rpartition("/")[2] for s in ceph} == {w.access_key for w in IDENTITIES.values()}
    weed = json.loads((tmp_path / command.SEAWEEDFS_FILE).read_text())
    keys = {i["credentials"][0]["accessKey"]: i["credentials"][0]["secretKey"] for i in weed["identities"]}
    users = dict(line.split() for line in (tmp_path / command.USERS_FILE).read_text().splitlines())
    assert users == {key: secret for key, secret in keys.items() if key != command.ROOT}
    assert {p["name"] for p in weed["policies"]} == set(users)


def test_doing_it_again_changes_nothing_and_a_new_learner_is_added(tmp_path: Path) -> None:
    access(tmp_path, "--learner", "eu-1", "--run", "s3://bucket/team/run", "--strict")
    before = contents(tmp_path)
    access(tmp_path)
    assert contents(tmp_path) == before
    access(tmp_path, "--learner", "us-1")
    after = contents(tmp_path)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {command.ACL_FILE, command.USERS_FILE, command.SEAWEEDFS_FILE, "policies/ceph.json"}
    assert after[command.ACL_FILE].startswith(before[command.ACL_FILE])
    assert "user learner-us-1 " in after[command.ACL_FILE]
    added = json.loads(after["policies/aws/isthmus-learner-us-1.json"])
    assert "team/run/learners/*/checkpoints" not in str(added), "the earlier --strict is kept"


def test_who_is_taken_out_is_not_made_again(tmp_path: Path) -> None:
    access(tmp_path, *EVERYBODY, "--run", "s3://bucket/run")
    for path in (tmp_path / "learner-eu-1").iterdir():
        path.unlink()
    (tmp_path / "learner-eu-1").rmdir()
    access(tmp_path)
    assert "learner-eu-1" not in (tmp_path / command.ACL_FILE).read_text()
    assert "learner-eu-1" not in (tmp_path / command.SEAWEEDFS_FILE).read_text()
    assert "learner-eu-1" not in (tmp_path / "policies" / "ceph.json").read_text()
    assert [*(tmp_path / "policies").rglob("*learner-us-1*")]
    assert not [*tmp_path.rglob("*learner-eu-1*")]


@pytest.mark.parametrize("flag", ["--learner", "--series"])
@pytest.mark.parametrize("name", ["a b", "*", "x/y", "", "a?", "a\nb"])
def test_a_name_that_could_open_more_than_its_own_is_refused(
    tmp_path: Path, flag: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["access", str(tmp_path / "new"), flag, name]) == 2
    assert flag in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("run", ["/a/folder", "s3://", "file:///run"])
def test_a_run_that_is_in_no_bucket_has_no_policies(
    tmp_path: Path, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["access", str(tmp_path / "new"), "--run", run]) == 2
    assert "--run" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["access", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
