"""A run's health from messages and commits that a test makes."""

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from isthmus.bus import BusItem
from isthmus.format.records.messages import (
    SYNCER_STREAM,
    Alive,
    FromLearner,
    Heartbeat,
    Leave,
    Tally,
    encode,
    learner_stream,
)
from isthmus.inspect.bus_view import BusView
from isthmus.inspect.health_summary import Health, health
from isthmus.inspect.status import Status
from isthmus.log import Commit

RUN = bytes(range(32))


NOW = time.mktime((2026, 11, 22, 12, 10, 0, 0, 0, -1))


COMMITTED_AT = NOW - 336.0
"""12:04:24 on the day of `NOW`."""


LEDGER = Tally(processed=10.0, merged=10.0, overwritten=0.0, late=0.0, pending=0.0, rejected=0.0, lost=0.0)


def beat(learner: str, waiting_for: str = "") -> Heartbeat:
    return Heartbeat(
        run=RUN, id="h", learner=learner, incarnation=1, step=3, steps_target=0, tokens_seen=30, loss=None, step_s=0.1,
        upload_s=0.1, sync_s=0.1, versions=(1,), bytes_up=1, bytes_down=1, tokens_lost=0, ledger=LEDGER,
        waiting_for=waiting_for,
    )  # fmt: skip


def alive(**other: object) -> Alive:
    return msgspec.structs.replace(
        Alive(
            run=RUN, id="v", syncer="s", commits=0, heads=(1,), rejected={}, waiting_for="", lag_ms=0.0, held=1,
            fold_s=0.0, broken=(), stopping=False,
        ),
        **other,
    )  # fmt: skip


def left(learner: str, done: bool) -> Leave:
    return Leave(run=RUN, id="l", learner=learner, incarnation=1, step=3, done=done)


def commit(
    written_at: float,
    fragment: int = 0,
    version: int = 0,
    rejected: Sequence[tuple[str, str]] = (),
    healed: object = None,
    **scales: float,
) -> Commit:
    """Return a commit written at this time. `scales`: learners merged, and the share of their updates' length;
    `rejected`: learners whose updates were rejected, and why."""
    turned = [SimpleNamespace(learner=name, reason=reason) for name, reason in rejected]
    inputs = [
        SimpleNamespace(learner=name, scale=scale, weight=1.0, tokens=1, loss=None, norm=0.0, clipped=())
        for name, scale in scales.items()
    ]
    return cast(
        Commit,
        SimpleNamespace(
            header=SimpleNamespace(
                written_at=written_at, fragment=fragment, inputs=inputs, rejected=turned, healed=healed, writer="s"
            ),
            version=version,
        ),
    )


def of(
    *messages: Alive | FromLearner,
    silent: Sequence[Alive | FromLearner] = (),
    bus_error: str = "",
    committed: bool = True,
    expected: int = 0,
) -> Health:
    hearing = BusView(RUN)
    for at, said in [(None, silent), (1.0, messages)]:
        for message in said:
            stream = SYNCER_STREAM if isinstance(message, Alive) else learner_stream(message.learner)
            hearing.take(stream, BusItem("1-0", encode(message)), at)
    head = commit(COMMITTED_AT) if committed else None
    return health(Status(hearing, [head], bus_error, 0.0, NOW), "s3://b/run", "redis://h", expected)


def looked(*messages: Alive | FromLearner, version: int = 0, **found: Any) -> Health:
    hearing = BusView(RUN)
    for message in messages:
        stream = SYNCER_STREAM if isinstance(message, Alive) else learner_stream(message.learner)
        hearing.take(stream, BusItem("1-0", encode(message)), 1.0)
    return health(Status(hearing, [commit(COMMITTED_AT, 0, version)], "", 0.0, NOW, **found), "r", "b")
