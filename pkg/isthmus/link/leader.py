"""The leading rank of a learner: it takes steps with the boundary, while its agent's thread does the rest."""

import logging
import math
from contextlib import nullcontext
from dataclasses import replace

import msgspec
from typing_extensions import override

from isthmus.interrupts import held_back
from isthmus.learner import Boundary, LearnerAgent
from isthmus.learner.summary import Summary
from isthmus.link.agent_thread import AgentThread
from isthmus.link.group import Group
from isthmus.link.link import Side
from isthmus.log.run import Run

logger = logging.getLogger(__name__)

NEWS_S = 1.0
"""A learner that waits for a version looks for news at least this often, in seconds."""


class Joined(msgspec.Struct, frozen=True):
    """What the first rank tells the others when it has joined."""

    step: int
    tokens_seen: int
    moments: str
    fresh_into_flight: bool
    incarnation: int


class Leader(Side):
    """The first rank of a learner, once it has joined."""

    leads = True

    def __init__(self, thread: AgentThread, group: Group, moments: str) -> None:
        self._thread = thread
        self._group = group
        self._said_nonfinite = False
        self.loop = group.loop
        self.moments = moments
        self.first_step = thread.agent.history.step
        self.fresh_into_flight = moments == "fresh" and any(thread.joined_at)

    def joined(self) -> Joined:
        """Return what to tell the other ranks."""
        return Joined(self.steps_done, self.tokens_seen, self.moments, self.fresh_into_flight, self.incarnation)

    @property
    @override
    def run(self) -> Run:
        return self._thread.run

    @property
    @override
    def steps_done(self) -> int:
        return self._boundary.step

    @property
    @override
    def tokens_seen(self) -> int:
        return self._boundary.tokens_seen

    @property
    @override
    def incarnation(self) -> int:
        return self._thread.agent.incarnation

    @override
    def agent(self, what: str) -> LearnerAgent:
        return self._thread.agent

    @override
    def summary(self) -> Summary:
        return replace(
            self._thread.agent.summary(), uncounted=self.loop.uncounted, never_stepped=self.loop.never_stepped
        )

    @property
    def _boundary(self) -> Boundary:
        boundary = self._thread.agent.boundary
        assert boundary is not None, "a link exists only once it has joined"
        return boundary

    @override
    def step(self, tokens: int, loss: float | None) -> None:
        with self._group.call("STEP", self.steps_done + 1, tokens):
            self._thread.check()
            self.loop.count()
            with held_back(), self._thread.agent.metrics.hold_seconds.time():
                self._boundary.after_step(tokens, loss)
            while self._boundary.overdue():  # this happens only if the run's pace has a lead
                self._thread.news.wait(NEWS_S)
                self._thread.news.clear()
                self._thread.check()
                with held_back():
                    self._boundary.wait_on()
        self._report(tokens, loss)

    def _report(self, tokens: int, loss: float | None) -> None:
        metrics = self._thread.agent.metrics
        metrics.steps.inc()
        metrics.tokens.inc(tokens)
        if loss is not None and math.isfinite(loss):
            metrics.loss.set(loss)
            self._said_nonfinite = False
        elif loss is not None:
            metrics.losses_nonfinite.inc()
            if not self._said_nonfinite:
                self._said_nonfinite = True
                logger.warning(
                    "%s: the loss of step %d is %s: training goes on; differences that are not finite are not sent, "
                    "and no checkpoint is written until it is a number again",
                    self._thread.agent.name, self.steps_done, loss,
                )  # fmt: skip
        if self._thread.feeder is not None:
            values = {"train/tokens": float(self.tokens_seen)} | ({} if loss is None else {"train/loss": loss})
            self._thread.feeder.note(self.steps_done, values)

    @override
    def sum(self, count: int) -> int:
        return self._group.sum(count)

    @override
    def let_go(self) -> None:
        self._boundary.let_go()
        self._thread.hurry()

    @override
    def drop(self) -> None:
        self._thread.let_go()

    @override
    def leave(self, done: bool, well: bool, wait_s: float | None) -> None:
        # If one rank fails, the ranks are not at the same step, so no checkpoint can be taken.
        keep = well or self._group.alone
        try:
            with self._group.call("CLOSE", self.steps_done) if keep else nullcontext():
                self._thread.close(done=done, keep=keep, orderly=well, wait_s=wait_s)
        finally:
            self.loop.close()
            found = self.summary()
            logger.log(logging.WARNING if found.stands_out else logging.INFO, "%s", found)
