"""Commits of a syncer that lies: each could follow the newest commit, except for one lie."""

from collections.abc import Callable
from typing import Any

import msgspec

from isthmus.format.records.keys import update_key, value_key
from isthmus.format.records.objects import CommitHeader
from isthmus.format.rules import MergeRule
from isthmus.log import Commit

Lie = Callable[[Commit], CommitHeader]


def following(newest: Commit, **changed: Any) -> CommitHeader:
    """Return a copy of the newest commit as the next version, with changes."""
    h, version = newest.header, newest.version + 1
    inputs = tuple(
        msgspec.structs.replace(i, base=h.version, key=update_key(h.fragment, i.learner, h.version, i.digest))
        for i in h.inputs
    )
    plausible = msgspec.structs.replace(
        h,
        version=version,
        previous=newest.digest,
        inputs=inputs,
        value_key=value_key(h.fragment, version, h.value_digest),
    )
    return msgspec.structs.replace(plausible, **changed)


def _outer(**changed: Any) -> Lie:
    return lambda newest: following(newest, dense=msgspec.structs.replace(newest.header.dense, **changed))


def _input(**changed: Any) -> Lie:
    def lie(newest: Commit) -> CommitHeader:
        honest = following(newest)
        first, *rest = honest.inputs
        return msgspec.structs.replace(honest, inputs=(msgspec.structs.replace(first, **changed), *rest))

    return lie


def _of_tomorrow(newest: Commit) -> CommitHeader:
    given, base = newest.header.inputs[0], newest.version + 1
    return _input(base=base, key=update_key(newest.header.fragment, given.learner, base, given.digest))(newest)


def _other_rule(newest: Commit) -> CommitHeader:
    other = MergeRule.RDA if newest.header.dense.merge == MergeRule.AVG else MergeRule.AVG
    return _outer(merge=other)(newest)


def _other_codec(newest: Commit) -> CommitHeader:
    return following(newest, codec_down="bf16" if newest.header.codec_down == "int8" else "int8")


REFUSED: dict[str, tuple[Lie, str]] = {
    "another rate": (_outer(learning_rate=-1e4), "other rules"),
    "no momentum": (_outer(momentum=0.0), "other rules"),
    "another rule": (_other_rule, "other rules"),
    "another codec": (_other_codec, "published in "),
    "a period beyond all": (lambda c: following(c, period=1e6), "says a period"),
    "a weight of its own": (_input(weight=1e12, clipped=()), "nothing is said of why"),
    "more than was asked": (_input(weight=1e18, clipped=("tokens",)), "asked for"),
    "one update twice": (lambda c: following(c, inputs=following(c).inputs * 2), "two updates of one learner"),
    "a base of tomorrow": (_of_tomorrow, "was not there yet"),
    "a key that leads elsewhere": (_input(key="updates/00001/x/000000000000-0000000000000000"), "is not where"),
    "a value elsewhere": (lambda c: following(c, value_key="values/00001/x"), "cannot be"),
    "nothing": (lambda c: following(c, inputs=()), "merges nothing"),
}
"""By name, the lies that every reader detects, and a part of the reader's error."""
