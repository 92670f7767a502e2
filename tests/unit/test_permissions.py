"""The table of permissions agrees with the cases written down for these tests, and with the page that shows it."""

from pathlib import Path

import pytest

from isthmus.format.permissions import (
    CREATE,
    DELETE,
    LIST,
    READ,
    REPLACE,
    STREAMS,
    Operation,
    Participant,
    may,
    streams,
)
from isthmus.format.records import keys
from isthmus.format.records.messages import SYNCER_STREAM, learner_stream
from isthmus_services.policies import AWS, CEPH, MINIO, Dialect, Identity, acl_rules, has_bus, policy
from support.permission_cases import ALL, DIGEST, HEARS, IDENTITIES, KEYS, LISTS, SPEAKS
from support.permission_page import page

PAGE = Path(__file__).parents[2] / "docs" / "permissions.md"


def who_may(operation: Operation, key: str) -> set[str]:
    return {user for user, who in IDENTITIES.items() if may(who.participant, operation, key, who.name)}


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_read_and_written_by_whom_it_should_be(key: str) -> None:
    expected = KEYS[key]
    assert who_may(READ, key) == set(expected.read)
    assert who_may(CREATE, key) == {*expected.create, *expected.replace}
    assert who_may(REPLACE, key) == set(expected.replace)
    assert who_may(DELETE, key) == set(expected.delete)


def test_listing_is_for_those_who_look() -> None:
    assert {prefix: who_may(LIST, prefix) for prefix in LISTS} == {p: set(who) for p, who in LISTS.items()}


def test_no_kind_of_key_is_forgotten() -> None:
    """A new kind of object needs a line in the table, and one in the cases."""
    made = {name for name in vars(keys) if name.endswith(("_key", "_KEY"))}
    assert made == {
        *("RUN_KEY", "update_key", "value_key", "snapshot_key", "commit_key", "segment_key"),
        *("claim_key", "checkpoint_key", "part_key", "evaluation_key", "members_key", "proposal_key"),
        *("manifest_key", "promotion_key"),
    }
    prefixes = {key.split("/")[0] for key in KEYS} - {"elsewhere"}
    assert prefixes >= {"run", "members", "scratch"}
    assert {p for p in prefixes if any(who_may(READ, key) for key in KEYS if key.split("/")[0] == p)} == prefixes


def test_a_strict_learner_reads_nothing_of_another() -> None:
    theirs = keys.checkpoint_key("us-1", 1, 40, DIGEST)
    assert may(Participant.LEARNER, READ, theirs, "eu-1")
    assert not may(Participant.LEARNER, READ, theirs, "eu-1", checkpoints=False)
    assert not may(Participant.LEARNER, LIST, "learners/", "eu-1", checkpoints=False)
    assert may(Participant.LEARNER, READ, keys.checkpoint_key("eu-1", 1, 40, DIGEST), "eu-1", checkpoints=False)


def test_a_strict_follower_reads_nothing_of_a_learner() -> None:
    theirs = keys.checkpoint_key("us-1", 1, 40, DIGEST)
    assert may(Participant.FOLLOWER, READ, theirs, "held-out")
    assert not may(Participant.FOLLOWER, READ, theirs, "held-out", checkpoints=False)
    assert not may(Participant.FOLLOWER, READ, keys.claim_key("us-1", 1), "held-out")


def test_a_name_that_begins_like_anothers_is_somebody_else() -> None:
    for operation in (READ, CREATE, DELETE):
        for key in (keys.update_key(3, "eu-10", 7, DIGEST), keys.claim_key("eu-10", 1)):
            assert not may(Participant.LEARNER, operation, key, "eu-1")


def test_streams_are_heard_and_written_by_whom_they_should_be() -> None:
    assert {user for user, who in IDENTITIES.items() if has_bus(who.participant)} == set(HEARS)
    for user in HEARS:
        who = IDENTITIES[user]
        read, written = streams(who.participant, who.name)
        assert set(written) == set(SPEAKS[user])
        assert read == ["*"] or set(read) == set(HEARS[user])
    assert set(STREAMS) == set(Participant)
    assert streams(Participant.LEARNER, "x") == ([SYNCER_STREAM, learner_stream("x")], [learner_stream("x")])


def test_no_policy_reaches_outside_its_run_or_past_its_operations() -> None:
    granted = {"s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListBucket", "s3:AbortMultipartUpload"}
    for dialect in (AWS, CEPH, MINIO):
        for who in IDENTITIES.values():
            for statement in policy(who, "bucket", "team/run", dialect)["Statement"]:
                assert statement["Effect"] == "Allow"
                assert set(statement["Action"]) <= granted
                for resource in statement["Resource"]:
                    below = resource.startswith("arn:aws:s3:::bucket/team/run/")
                    assert below or (resource == "arn:aws:s3:::bucket" and statement["Action"] == ["s3:ListBucket"])
                (prefixes,) = [c["s3:prefix"] for c in statement.get("Condition", {}).values() if "s3:prefix" in c] or [
                    []
                ]
                assert all(p.startswith("team/run/") for p in prefixes)


def test_a_run_that_is_its_bucket_has_no_prefix() -> None:
    reads = policy(Identity(Participant.SYNCER), "bucket", "", MINIO)["Statement"][0]["Resource"]
    assert "arn:aws:s3:::bucket/run" in reads


@pytest.mark.parametrize("dialect", [MINIO, CEPH])
def test_only_aws_is_asked_for_what_only_aws_can_say(dialect: Dialect) -> None:
    for who in IDENTITIES.values():
        assert "if-none-match" not in str(policy(who, "bucket", "run", dialect))
    creates = [s for s in policy(IDENTITIES["syncer"], "bucket", "run", AWS)["Statement"] if s["Sid"] == "Create"]
    assert [s["Condition"] for s in creates] == [{"Null": {"s3:if-none-match": "false"}}]


def test_rules_of_redis_name_commands_and_keys_one_by_one() -> None:
    for user in HEARS:
        rules = acl_rules(IDENTITIES[user])
        words = rules.split()
        assert words[:3] == ["resetkeys", "resetchannels", "-@all"]
        assert not any(word.startswith(("+@", "~")) for word in words)
        assert ("+zrevrangebyscore" in words) == (set(HEARS[user]) == {"syncer", "learner/eu-1", "learner/us-1"})
        assert ("+xadd" in words) == bool(SPEAKS[user])
        run = "isthmus:" + 16 * "?"
        naming = f" (+zadd %W~{run}:names)"
        tidying = f" (+zremrangebyscore +expire %W~{run}:names) (+expire %W~{run}:syncer %W~{run}:learner/*)"
        assert rules.endswith(tidying) == (user == "syncer")
        rules = rules.removesuffix(tidying)
        assert rules.endswith(naming) == bool(SPEAKS[user])
        assert "names" not in rules.removesuffix(naming), "no participant can use the list of streams as a stream"
        assert "+expire" not in rules, "only a syncer may set an expiry"
        assert all(key.count(run) == 1 for key in rules.split() if "~" in key), "a key pattern names one run, not two"


def test_the_page_says_what_the_table_says() -> None:
    assert PAGE.read_text() == page(), (
        "rebuild the page: python -m support.permission_page > docs/permissions.md, with tests on PYTHONPATH"
    )
    assert len(ALL) == 7
