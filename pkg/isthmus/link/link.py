"""A learner's hold on a run: `step` after each optimizer step, `close` at the end."""

import logging
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, SupportsFloat, SupportsInt

from isthmus.agent.health import Vitals
from isthmus.errors import InputError
from isthmus.learner import LearnerAgent
from isthmus.learner.agent import WAIT_S
from isthmus.learner.step_arguments import loss_of, tokens_of
from isthmus.learner.summary import Summary
from isthmus.log.run import Run
from isthmus.runtime.metrics import LearnerMetrics

if TYPE_CHECKING:
    from isthmus.torch.loop import Loop


logger = logging.getLogger(__name__)


class Side(Protocol):
    """What stands behind a link: the rank that leads (`link.leader`), or one that follows (`link.follower`)."""

    leads: bool
    loop: "Loop"
    moments: str
    first_step: int
    """Steps that the learner had behind it when it joined."""
    fresh_into_flight: bool
    """Whether it started with fresh moments into a run in flight."""

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
        """Tokens of those steps."""
        ...

    @property
    def incarnation(self) -> int:
        """How often the learner's name has joined."""
        ...

    def agent(self, what: str) -> LearnerAgent:
        """Return the agent, of which the caller wants something. Raises `InputError` at ranks that follow."""
        ...

    def step(self, tokens: int, loss: float | None) -> None:
        """Take one step together with all ranks."""
        ...

    def sum(self, count: int) -> int:
        """Return the sum of what every rank has counted."""
        ...

    def let_go(self) -> None:
        """Wait for no version any more."""
        ...

    def drop(self) -> None:
        """Let go of the run: nobody holds the link any more."""
        ...

    def leave(self, done: bool, well: bool, wait_s: float) -> None:
        """Leave. `well`: all ranks stand between two steps, as far as they know."""
        ...


class Link:
    """A learner's hold on a run. Made by `join`; used from the training thread only.

    `step` is the only place where the model changes under the loop: there fragments are copied out, at the cost of a
    copy each every H steps, and newer versions are copied in, two at a time at most. Whatever store and bus do, `step`
    returns; it raises only what training on could not mend. Everything else happens in a thread of its own, which
    compresses, sends, fetches and repeats while the loop computes.

    When the process dies, nothing that was merged is lost, and nobody else notices beyond a round's grace. Leave with
    `close`, or use it as a context manager: an exception then leaves the run as something that is not done.
    """

    def __init__(self, side: Side, warmup: int) -> None:
        self._side = side
        self._closed = False
        self._warmup = warmup
        # Who drops a link without closing it lets the agent go, too.
        self._dropped = weakref.finalize(self, side.drop)
        self._dropped.atexit = False
        self.moments = side.moments
        """Where the inner optimizer's state came from: `own` checkpoint, `peer` (another learner's), or `fresh`."""

    @property
    def speaks(self) -> bool:
        """Whether this process speaks for the learner; of a job of several ranks the first does. `metrics`, `vitals`,
        `versions` and `summary` are its own."""
        return self._side.leads

    @property
    def run(self) -> Run:
        """The run: layout, rules, pace."""
        return self._side.run

    @property
    def metrics(self) -> LearnerMetrics:
        """What this learner counts; `metrics.registry` is a Prometheus registry."""
        return self._side.agent("metrics").metrics

    @property
    def vitals(self) -> Vitals:
        """Whether the agent behind this link is well; may be asked from any thread."""
        return self._side.agent("vitals").vitals

    @property
    def steps_done(self) -> int:
        """Optimizer steps this learner's name has behind it, over all restarts: where the training loop goes on."""
        return self._side.steps_done

    @property
    def rate(self) -> float:
        """Multiply the learning rate with this: it rises to 1 over the warm-up after a start with fresh moments into a
        run in flight, where the first steps of an Adam without a past are too long. Otherwise 1."""
        if not self._side.fresh_into_flight:
            return 1.0
        from isthmus.torch.moments import warmth

        return warmth(self.steps_done - self._side.first_step, self._warmup)

    @property
    def tokens_seen(self) -> int:
        """Tokens of those steps."""
        return self._side.tokens_seen

    @property
    def versions(self) -> list[int]:
        """The global version each fragment of the model is based on."""
        boundary = self._side.agent("versions").boundary
        assert boundary is not None, "a link exists only once it has joined"
        return [slot.base for slot in boundary.slots]

    @property
    def incarnation(self) -> int:
        """How often this name has joined the run, this time included."""
        return self._side.incarnation

    @property
    def summary(self) -> Summary:
        """What the stay came to: steps, versions, where the work went; `str` of it is one line. Whole after `close`."""
        return self._side.agent("summary").summary()

    @property
    def figures(self) -> Mapping[str, float]:
        """What the last heartbeat said, as sinks get it; empty before the first. At any time, unlike `summary`."""
        said = self._side.agent("figures").scalars()
        return {} if said is None else said[1]

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
        if self.steps_done % self.run.rules.sync_every == 0:
            self._side.loop.require_same()  # the parameters are those of `join`
        self._side.step(tokens, loss)

    def of_all_ranks(self, count: int) -> int:
        """Return the sum of what every rank of this learner has counted, as `step` wants tokens. Called by all of them.

        In a learner of one process, the count itself.
        """
        return self._side.sum(count)

    def let_go(self) -> None:
        """Wait for no version any more; only a run whose pace has a `lead` ever waits.

        For signal handlers: a loop that stands at its boundary goes on within a second and can then be ended.
        """
        self._side.let_go()

    def close(self, *, done: bool = True, wait: float = WAIT_S) -> None:
        """Finish the uploads, store a last checkpoint, wait for answers to the last updates, leave, and log a summary.

        `done` says that this learner has trained all its steps. Call `close` between two steps, as `step`. The
        checkpoint may take a minute, and a second more for each 4 MB of its size; a warning says if it was not stored.
        `wait`: seconds to wait after that for the answers to the last updates, while a syncer is heard. Without the
        answers a short run would lose much of its work. Ctrl-C leaves at once.
        """
        if not wait >= 0:
            raise InputError(f"wait={wait!r}: say for how many seconds, 0 or more")
        self._leave(done, well=True, wait_s=wait)

    def _leave(self, done: bool, well: bool, wait_s: float) -> None:
        if not self._closed:
            self._closed = True
            self._dropped.detach()
            self._side.leave(done, well, wait_s)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        well = kind is None
        self._leave(well, well, WAIT_S if well else 0.0)
