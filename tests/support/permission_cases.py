"""Permissions written by hand a second time: keys of every kind, and the users that may read or change them.

`isthmus.format.permissions` must agree with this table, and so must servers with the policies made from it.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from isthmus.format.permissions import Participant
from isthmus.format.records.keys import (
    RUN_KEY,
    checkpoint_key,
    claim_key,
    commit_key,
    evaluation_key,
    manifest_key,
    part_key,
    promotion_key,
    proposal_key,
    segment_key,
    snapshot_key,
    update_key,
    value_key,
)
from isthmus.format.records.messages import SYNCER_STREAM, learner_stream
from isthmus_services.policies import Identity

DIGEST = bytes(range(32))
LEARNERS = ("eu-1", "us-1")
SERIES = "held-out"
IDENTITIES = {
    who.user: who
    for who in (
        Identity(Participant.OWNER),
        Identity(Participant.SYNCER),
        Identity(Participant.COLLECTOR),
        Identity(Participant.READER),
        Identity(Participant.FOLLOWER, SERIES),
        *(Identity(Participant.LEARNER, name) for name in LEARNERS),
    )
}
OWNER, SYNCER, COLLECTOR, READER, FOLLOWER, EU, US = IDENTITIES
ALL = frozenset(IDENTITIES)
NOBODY: frozenset[str] = frozenset()


class Who(NamedTuple):
    """Users that may read a key, only create it, replace it, delete it."""

    read: Collection[str]
    create: Collection[str] = NOBODY
    replace: Collection[str] = NOBODY
    delete: Collection[str] = NOBODY


def _checkpoint(*own: str) -> Who:
    return Who({OWNER, EU, US, READER, FOLLOWER, COLLECTOR}, NOBODY, own, {COLLECTOR, *own})


RUN, BOX = "0123456789abcdef", "fedcba9876543210"

KEYS: Mapping[str, Who] = {
    RUN_KEY: Who(ALL, {OWNER}),
    "members/000000000001": Who(ALL, {OWNER}),
    proposal_key(2, DIGEST, DIGEST): Who({OWNER, READER}, {OWNER}),
    commit_key(3, 8): Who(ALL, {SYNCER}, {COLLECTOR}),
    segment_key(3, 1, DIGEST): Who(ALL, NOBODY, {COLLECTOR}),
    value_key(3, 8, DIGEST): Who(ALL, NOBODY, {SYNCER}, {COLLECTOR}),
    snapshot_key(3, 8, DIGEST): Who(ALL, NOBODY, {SYNCER}, {COLLECTOR}),
    snapshot_key(3, 0, DIGEST): Who(ALL, NOBODY, {OWNER, SYNCER}, {COLLECTOR}),
    update_key(3, "eu-1", 7, DIGEST): Who({EU, SYNCER, READER}, {EU}, NOBODY, {COLLECTOR}),
    update_key(3, "us-1", 7, DIGEST): Who({US, SYNCER, READER}, {US}, NOBODY, {COLLECTOR}),
    "updates/00003/us-1/eu-1/x": Who({US, SYNCER, READER}, {US}, NOBODY, {COLLECTOR}),
    "updates/eu-1/x": Who({SYNCER, READER}, NOBODY, NOBODY, {COLLECTOR}),
    claim_key("eu-1", 1): Who({EU, READER}, {EU}),
    claim_key("us-1", 1): Who({US, READER}, {US}),
    "learners/eu-1/000001/elsewhere": Who({EU, READER}),
    "learners/eu-10/000001/claim": Who({READER}),
    checkpoint_key("eu-1", 1, 40, DIGEST): _checkpoint(EU),
    checkpoint_key("us-1", 1, 40, DIGEST): _checkpoint(US),
    part_key("us-1", 1, 40, 3, DIGEST): _checkpoint(US),
    "learners/us-1/doctor/checkpoints/x": _checkpoint(US),
    manifest_key("eu-1", DIGEST): Who({EU, SYNCER, READER}, {EU}),
    manifest_key("us-1", DIGEST): Who({US, SYNCER, READER}, {US}),
    evaluation_key(SERIES, 8, DIGEST): Who({FOLLOWER, READER, COLLECTOR}, {FOLLOWER}),
    evaluation_key("other", 8, DIGEST): Who({FOLLOWER, READER, COLLECTOR}),
    promotion_key(3): Who({FOLLOWER, READER, COLLECTOR}, {FOLLOWER}),
    "scratch/x": Who({OWNER, SYNCER, COLLECTOR}, NOBODY, {OWNER, SYNCER, COLLECTOR}, {OWNER, SYNCER, COLLECTOR}),
    f"bus/{RUN}/syncer/{BOX}": Who({EU, US, SYNCER, READER}, NOBODY, {SYNCER}, {SYNCER, COLLECTOR}),
    f"bus/{RUN}/learner/eu-1/{BOX}": Who({EU, SYNCER, READER}, NOBODY, {EU}, {EU, COLLECTOR}),
    f"bus/{RUN}/learner/us-1/{BOX}": Who({US, SYNCER, READER}, NOBODY, {US}, {US, COLLECTOR}),
    "elsewhere": Who(NOBODY),
}

LISTS: Mapping[str, Collection[str]] = {
    "": NOBODY,
    "commits/00003/": {SYNCER, READER},
    "segments/00003/": NOBODY,
    "members/": ALL,
    "proposals/000000000002/": {OWNER, READER},
    "snapshots/00003/": ALL,
    "values/00003/": {COLLECTOR, READER},
    "updates/": {READER},
    "updates/00003/": {COLLECTOR, READER},
    "updates/00003/eu-1/": {EU, READER},
    "updates/00003/us-1/": {US, READER},
    "learners/": {OWNER, COLLECTOR, READER, EU, US, FOLLOWER},
    "learners/eu-1/": {EU, READER},
    "manifests/": {SYNCER, READER},
    "manifests/eu-1/": {EU, SYNCER, READER},
    "evaluations/": {READER, FOLLOWER},
    "promotions/": {READER, FOLLOWER},
    f"evaluations/{SERIES}/": {FOLLOWER, READER},
    "scratch/": {OWNER, SYNCER, COLLECTOR},
    "bus/": {COLLECTOR},
    f"bus/{RUN}/": {SYNCER, READER},
    f"bus/{RUN}/syncer/": {EU, US, SYNCER, READER},
    f"bus/{RUN}/learner/eu-1/": {EU, SYNCER, READER},
}

STREAMS = (SYNCER_STREAM, learner_stream("eu-1"), learner_stream("us-1"))
HEARS: Mapping[str, Collection[str]] = {
    SYNCER: set(STREAMS),
    READER: set(STREAMS),
    EU: {SYNCER_STREAM, learner_stream("eu-1")},
    US: {SYNCER_STREAM, learner_stream("us-1")},
}
SPEAKS: Mapping[str, Collection[str]] = {
    SYNCER: {SYNCER_STREAM},
    READER: NOBODY,
    EU: {learner_stream("eu-1")},
    US: {learner_stream("us-1")},
}
"""A participant that is in neither table has no user on the bus."""
