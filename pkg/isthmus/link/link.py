"""A learner's connection to a run: `step` after each optimizer step, `close` at the end."""

import logging
import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, SupportsFloat, SupportsInt

from isthmus.agent.health import Vitals
from isthmus.errors import InputError
from isthmus.learner import LearnerAgent
from isthmus.learner.step_arguments import loss_of, tokens_of
from isthmus.learner.summary import Summary
from isthmus.log.run import Run
from isthmus.runtime.metrics import LearnerMetrics

if TYPE_CHECKING:
    from isthmus.torch.loop import Loop


logger = logging.getLogger(__name__)


class Side(Protocol):
    """The implementation of a link: the leading rank (`link.leader`) or a following rank (`link.follower_rank`)."""

    leads: bool
    loop: "Loop"
    moments: str
    first_step: int
    """Steps that the learner had done when it joined."""
    fresh_into_flight: bool
    """Whether the learner started with fresh moments in a run under way."""

    @property
    def run(self) -> Run:
        """The run."""
        ...

    @property
    def steps_done(self) -> int:
        """Steps of the learner's name, over all restarts."""
        ...

    @property
    def tokens_seen(self) -> int:
        """Tokens trained in those steps."""
        ...

    @property
    def incarnation(self) -> int:
        """How many times the learner's name has joined."""
        ...

    def summary(self) -> Summary:
        """Return the learner's work so far."""
        return self.agent("summary").summary()

    def agent(self, what: str) -> LearnerAgent:
        """Return the agent. Raises `InputError`, which names `what` the caller wants, on a following rank."""
        ...

    def step(self, tokens: int, loss: float | None) -> None:
        """Take one step together with all ranks."""
        ...

    def sum(self, count: int) -> int:
        """Return the sum of the counts of all ranks."""
        ...

    def let_go(self) -> None:
        """Stop waiting for versions."""
        ...

    def drop(self) -> None:
        """Let go of the run, since nothing refers to the link any more."""
        ...

    def leave(self, done: bool, well: bool, wait_s: float | None) -> None:
        """Leave the run. `well`: all ranks are between two steps, as far as they know."""
        ...


class Link:
    """A learner's connection to a run. Made by `join`; used from the training thread only.

    Only `step` changes the model while the loop trains. It copies each fragment out once every H steps, and copies
    newer versions in, at most a few at a time. `step` returns even if store and bus are away, unless the run's pace has
    a `lead`; it raises only errors that further training cannot mend. Everything else happens in a thread of its own,
    which compresses, sends, fetches and repeats while the loop computes.

    If the process dies, nothing that was merged is lost, and the other learners wait no longer than a round's grace.
    Leave with `close`, or use the link as a context manager: after an exception, the learner leaves as not done.
    """

    def __init__(self, side: Side, warmup: int) -> None:
        self._side = side
        self._closed = False
        self._warmup = warmup
        self._process = os.getpid()
        # A link that is dropped without `close` lets the agent go, too.
        self._dropped = weakref.finalize(self, side.drop)
        self._dropped.atexit = False
        self.moments = side.moments
        """Where the inner optimizer's state came from: `own` checkpoint, `peer` (another learner's), or `fresh`."""
        self.wait: float | None = None
        """Seconds for which `close`, and the end of a `with` block, wait for answers if `close` is not given any; None:
        20 s, while a syncer is heard."""

    @property
    def speaks(self) -> bool:
        """Whether this process speaks for the learner, as the first rank of a job does.

        Only that process has `metrics`, `vitals`, `versions` and `summary`.
        """
        return self._side.leads

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def run(self) -> Run:
        """The run: layout, rules, pace."""
        return self._side.run

    @property
    def metrics(self) -> LearnerMetrics:
        """This learner's metrics; `metrics.registry` is a Prometheus registry."""
        return self._side.agent("metrics").metrics

    @property
    def vitals(self) -> Vitals:
        """Whether the agent of this link is well. May be read from any thread."""
        return self._side.agent("vitals").vitals

    @property
    def steps_done(self) -> int:
        """Optimizer steps that this learner's name has done, over all restarts. The training loop goes on from here."""
        return self._side.steps_done

    @property
    def rate(self) -> float:
        """Factor for the learning rate: below 1 during the warm-up, otherwise 1.

        The warm-up follows a start with fresh moments in a run under way, since the first steps of an Adam without
        history are too long.
        """
        if not self._side.fresh_into_flight:
            return 1.0
        from isthmus.torch.moments import warmth

        return warmth(self.steps_done - self._side.first_step, self._warmup)

    @property
    def tokens_seen(self) -> int:
        """Tokens trained in those steps."""
        return self._side.tokens_seen

    @property
    def versions(self) -> list[int]:
        """The global version on which each fragment of the model is based."""
        boundary = self._side.agent("versions").boundary
        assert boundary is not None, "a link exists only once it has joined"
        return [slot.base for slot in boundary.slots]

    @property
    def incarnation(self) -> int:
        """How often this name has joined the run, this time included."""
        return self._side.incarnation

    @property
    def summary(self) -> Summary:
        """The learner's work so far: steps, versions, where the tokens went. `str` makes one line. Final after
        `close`."""
        return self._side.summary()

    @property
    def figures(self) -> Mapping[str, float]:
        """The scalars of the last heartbeat, as sinks get them; empty before the first. May be read at any time, unlike
        `summary`."""
        said = self._side.agent("figures").scalars()
        return {} if said is None else said[1]

    def step(self, tokens: SupportsInt, *, loss: SupportsFloat | None = None) -> None:
        """Report one optimizer step over this many tokens; call it right after `optimizer.step()`.

        It copies a few fragments out of the model and into it, and sometimes the content of a checkpoint. It does not
        wait for a store or bus that is away. `loss` is shown by `status`; while it is not finite, no checkpoint is
        written, since training could not resume from it. `tokens` and `loss` may be numbers of Python or NumPy, or
        tensors of one element; for a tensor on a GPU, this waits.

        Raises `InputError` if the token count is not a whole number of at least one, if the loss is not a number, or if
        model or optimizer hold other parameters than at `join`. Raises the error that ended the agent for good, for
        example `Denied` (credentials were revoked) or `Fenced` (this name was started again elsewhere).
        """
        tokens, loss = tokens_of(tokens), loss_of(loss)
        if self._closed:
            raise InputError("the link is closed: join again under the same name to go on")
        if self._process != os.getpid():
            raise InputError(
                f"this link is of process {self._process}, and this one was forked from it, without the thread that "
                "sends and receives: call join in the process that trains"
            )
        if self.steps_done % self.run.rules.sync_every == 0:
            self._side.loop.require_same()  # the parameters are those of `join`
        self._side.step(tokens, loss)

    def of_all_ranks(self, count: int) -> int:
        """Return the sum of the counts of all ranks of this learner, for the tokens of `step`. All ranks must call it.

        In a learner of one process, this is the count itself.
        """
        return self._side.sum(count)

    def let_go(self) -> None:
        """Stop waiting for versions, and in `close` for answers.

        Only a run whose pace has a `lead` makes a learner wait for versions.

        For signal handlers: a loop that waits at its boundary goes on within a second and can then be ended.
        """
        self._side.let_go()

    def close(self, *, done: bool = True, wait: float | None = None) -> None:
        """Finish the uploads, store a last checkpoint, wait for answers to the last updates, leave, and log a summary.

        `done` says that this learner has trained all its steps. Like `step`, call `close` between two steps. Storing
        the checkpoint may take a minute, plus a second for each 4 MB of its size; a warning is logged if it was not
        stored. Then it waits for answers to the last updates, for 20 s while a syncer is heard. With `wait`, it waits
        for so many seconds, also for a syncer that is away. Without the answers, a short run would lose much of its
        work. Ctrl-C leaves at once.
        """
        if wait is not None and not wait >= 0:
            raise InputError(f"wait={wait!r}: say for how many seconds, 0 or more")
        self._leave(done, well=True, wait_s=self.wait if wait is None else wait)

    def _leave(self, done: bool, well: bool, wait_s: float | None) -> None:
        if not self._closed:
            self._closed = True
            self._dropped.detach()
            self._side.leave(done, well, wait_s)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        well = kind is None
        self._leave(well, well, self.wait if well else 0.0)
