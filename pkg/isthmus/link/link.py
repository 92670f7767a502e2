"""A learner's hold on a run: `step` after each optimizer step, `close` at the end."""

import logging
import math
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, SupportsFloat, SupportsInt

from isthmus.agent.health import Vitals
from isthmus.errors import InputError
from isthmus.interrupts import held_back
from isthmus.learner import Boundary
from isthmus.learner.agent import WAIT_S
from isthmus.learner.step_arguments import loss_of, tokens_of
from isthmus.learner.summary import Summary
from isthmus.link.agent_thread import AgentThread
from isthmus.log.run import Run
from isthmus.runtime.metrics import LearnerMetrics

if TYPE_CHECKING:
    from isthmus.torch.loop import Loop
    from isthmus.torch.sharded import Sharded


logger = logging.getLogger(__name__)

NEWS_S = 1.0
"""A learner that waits for a version looks up this often, whether there is news or not."""


class Link:
    """A learner's hold on a run. Made by `join`; used from the training thread only.

    `step` is the only place where the model changes under the loop: there fragments are copied out, at the cost of a
    copy each every H steps, and newer versions are copied in, two at a time at most. Whatever store and bus do, `step`
    returns; it raises only what training on could not mend. Everything else happens in a thread of its own, which
    compresses, sends, fetches and repeats while the loop computes.

    When the process dies, nothing that was merged is lost, and nobody else notices beyond a round's grace. Leave with
    `close`, or use it as a context manager: an exception then leaves the run as something that is not done.
    """

    def __init__(
        self, thread: AgentThread, loop: "Loop", moments: str, warmup: int, sharded: "Sharded | None" = None
    ) -> None:
        self._thread = thread
        self._loop = loop
        self._sharded = sharded
        self._closed = False
        self._said_nonfinite = False
        self._warmup = warmup
        self._first_step = thread.agent.history.step
        # Who drops a link without closing it lets the agent go, too.
        self._dropped = weakref.finalize(self, thread.let_go)
        self._dropped.atexit = False
        self.moments = moments
        """Where the inner optimizer's state came from: `own` checkpoint, `peer` (another learner's), or `fresh`."""

    @property
    def speaks(self) -> bool:
        """Whether this process speaks for the learner; of a job of several ranks the first does. `metrics`, `vitals`,
        `versions` and `summary` are its own."""
        return True

    @property
    def run(self) -> Run:
        """The run: layout, rules, pace."""
        return self._thread.run

    @property
    def metrics(self) -> LearnerMetrics:
        """What this learner counts; `metrics.registry` is a Prometheus registry."""
        return self._thread.agent.metrics

    @property
    def vitals(self) -> Vitals:
        """Whether the agent behind this link is well; may be asked from any thread."""
        return self._thread.agent.vitals

    @property
    def steps_done(self) -> int:
        """Optimizer steps this learner's name has behind it, over all restarts: where the training loop goes on."""
        return self._boundary.step

    @property
    def rate(self) -> float:
        """Multiply the learning rate with this: it rises to 1 over the warm-up after a start with fresh moments into a
        run in flight, where the first steps of an Adam without a past are too long. Otherwise 1."""
        fresh_into_flight = self.moments == "fresh" and any(self._thread.joined_at)
        return rate_of(fresh_into_flight, self.steps_done - self._first_step, self._warmup)

    @property
    def tokens_seen(self) -> int:
        """Tokens of those steps."""
        return self._boundary.tokens_seen

    @property
    def versions(self) -> list[int]:
        """The global version each fragment of the model is based on."""
        return [slot.base for slot in self._boundary.slots]

    @property
    def incarnation(self) -> int:
        """How often this name has joined the run, this time included."""
        return self._thread.agent.incarnation

    @property
    def summary(self) -> Summary:
        """What the stay came to: steps, versions, where the work went; `str` of it is one line. Whole after `close`."""
        return self._thread.agent.summary()

    @property
    def figures(self) -> Mapping[str, float]:
        """What the last heartbeat said, as sinks get it; empty before the first. At any time, unlike `summary`."""
        said = self._thread.agent.scalars()
        return {} if said is None else said[1]

    @property
    def _boundary(self) -> Boundary:
        boundary = self._thread.agent.boundary
        assert boundary is not None, "a link exists only once it has joined"
        return boundary

    def step(self, tokens: SupportsInt, *, loss: SupportsFloat | None = None) -> None:
        """Report one optimizer step over this many tokens; call it right after `optimizer.step()`.

        Copies a few fragments out of the model and into it, and now and then what a checkpoint holds. A store or bus
        that is away does not hold it up. `loss` is shown by `status`; while it is not finite no checkpoint is written,
        for none could be gone on from. Both may be numbers of Python or NumPy, or tensors of one element; a tensor on
        a GPU is waited for.

        Raises `InputError` for a token count that is no whole number of at least one, for a loss that is no number, and
        for a model or an optimizer that holds other parameters than at `join`; and whatever ended the agent for good:
        `Denied` (credentials were revoked) or `Fenced` (this name was started again elsewhere), for example.
        """
        tokens, loss = tokens_of(tokens), loss_of(loss)
        if self._closed:
            raise InputError("the link is closed: join again under the same name to go on")
        self._look_at_model(self.steps_done)
        with self._all_ranks("STEP", self.steps_done + 1, tokens):
            self._thread.check()
            with held_back(), self.metrics.hold_seconds.time():
                self._boundary.after_step(tokens, loss)
            while self._boundary.overdue():  # only where the run's pace has a lead
                self._thread.news.wait(NEWS_S)
                self._thread.news.clear()
                self._thread.check()
                with held_back():
                    self._boundary.wait_on()
        self.metrics.steps.inc()
        self.metrics.tokens.inc(tokens)
        if loss is not None and math.isfinite(loss):
            self.metrics.loss.set(loss)
            self._said_nonfinite = False
        elif loss is not None:
            self.metrics.losses_nonfinite.inc()
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

    def _look_at_model(self, step: int) -> None:
        """Check once a period that model and optimizer hold the parameters that they held at `join`."""
        if step % self.run.rules.sync_every == 0:
            self._loop.require_same()

    def of_all_ranks(self, count: int) -> int:
        """Return the sum of what every rank of this learner has counted, as `step` wants tokens. Called by all of them.

        In a learner of one process, the count itself.
        """
        if self._sharded is None or self._sharded.ranks.size == 1:
            return count
        said = self._sharded.ranks.exchange(count.to_bytes(8, "little", signed=True))
        return sum(int.from_bytes(words, "little", signed=True) for words in said)

    def let_go(self) -> None:
        """Wait for no version any more; only a run whose pace has a `lead` ever waits.

        For signal handlers: a loop that stands at its boundary goes on within a second and can then be ended.
        """
        self._boundary.let_go()

    def close(self, *, done: bool = True, wait: float = WAIT_S) -> None:
        """Finish the uploads, store a last checkpoint, wait for answers to the last updates, leave, and log a summary.

        `done` says that this learner has trained all its steps. Call `close` between two steps, as `step`. The
        checkpoint may take a minute, and a second more for each 4 MB of its size; a warning says if it was not stored.
        `wait`: seconds to wait after that for the answers to the last updates, while a syncer is heard. Without the
        answers a short run would lose much of its work. Ctrl-C leaves at once.
        """
        if not wait >= 0:
            raise InputError(f"wait={wait!r}: say for how many seconds, 0 or more")
        self._leave(done, keep=True, wait_s=wait)

    def _leave(self, done: bool, keep: bool, *, orderly: bool = True, wait_s: float = 0.0) -> None:
        if not self._closed:
            self._closed = True
            self._dropped.detach()
            # Ranks of which one fails are not at one step: no checkpoint can be taken of them.
            try:
                with self._all_ranks("CLOSE", self.steps_done) if keep else nullcontext():
                    self._thread.close(done=done, keep=keep, orderly=orderly, wait_s=wait_s)
            finally:
                self._loop.close()
            found = self.summary
            logger.log(logging.WARNING if found.never_merged or found.diverged else logging.INFO, "%s", found)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        well = kind is None
        self._leave(well, keep=well or self._sharded is None, orderly=well, wait_s=WAIT_S if well else 0.0)

    def _all_ranks(self, call: str, number: int, tokens: int = 0) -> AbstractContextManager[object]:
        """Meet the other ranks of this learner, if it has any; when all is done here, let them go on."""
        return nullcontext() if self._sharded is None else self._sharded.call(call, number, tokens)


def rate_of(fresh_into_flight: bool, steps: int, warmup: int) -> float:
    """Return the factor on the learning rate so many steps after a start; see `Link.rate`."""
    if not fresh_into_flight:
        return 1.0
    from isthmus.torch.moments import warmth

    return warmth(steps, warmup)
