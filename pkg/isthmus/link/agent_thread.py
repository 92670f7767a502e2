"""The thread of a learner's agent: it runs the agent on its own event loop, beside the training thread."""

# ruff: noqa: TID251  (threads: this is one of their places)
import asyncio
import atexit
import difflib
import logging
import math
import os
import platform
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, TypeVar

from isthmus.agent.ports import TRUSTING, Find, Ports, open_ports
from isthmus.codecs import kernels
from isthmus.errors import Fenced, IsthmusError, RankLost, first_cause
from isthmus.format.records.fields import require_name
from isthmus.format.rules import MemberRole, Pace
from isthmus.interrupts import held_back
from isthmus.learner import LearnerAgent, Replica
from isthmus.learner.agent import WAIT_S
from isthmus.learner.backend import Arrays
from isthmus.learner.checkpoint import WITHOUT_STEP, Checkpoint, Saver
from isthmus.learner.manifest import Statement
from isthmus.learner.ranks.client import Assembled
from isthmus.learner.resume import History
from isthmus.link.loop_thread import EXIT_S, LoopThread
from isthmus.log import Log
from isthmus.log.run import Run
from isthmus.log.trust import Trust
from isthmus.runtime.clock import clock
from isthmus.sinks import CLOSE_S, Feeder, Sink

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

FindDonor = Callable[[LearnerAgent], Awaitable[Checkpoint | None]]

Assemble = Callable[[Ports], AbstractAsyncContextManager[Assembled]]


DRAIN_S = 10.0
"""When a learner leaves, uploads that have begun get this many seconds."""

LAST_S, LAST_BYTES_S = 60.0, 4e6
"""When a learner leaves, its last checkpoint gets this many seconds, plus one second for each so many bytes."""

LEAVE_S = 5.0
"""After that, publishing the leave message and closing connections may take this many seconds."""

COMPILES_S = 2.0
"""Seconds after which a learner that waits for its kernels says so."""

ALIKE = 0.74
"""A new name that has more in common with a known one may be a misspelling: us1 and us-1, su-1 and us-1."""

STILL_S = 10.0
"""Seconds between two log lines about what a closing learner waits for."""


class AgentThread:
    """The thread of a learner's agent, and the ways for the training thread to talk to it."""

    def __init__(
        self,
        run_url: str,
        bus_url: str,
        learner: str,
        adopt: str,
        steps: int,
        pace: Pace | None,
        checkpoint_s: float,
        sink: Sink | None,
        trust: Trust = TRUSTING,
        manifest: Statement | None = None,
        takeover: bool = False,
    ) -> None:
        require_name("learner name", learner)
        self.feeder: Feeder | None = None
        self._sink = sink
        self.donor: Checkpoint | None = None
        self.joined_at: list[int] = []
        """The version of each fragment when the learner joined."""
        self.run: Run
        self._log: Log
        self.agent: LearnerAgent
        self._urls = run_url, bus_url
        self._trust = trust
        self._manifest, self._takeover = manifest, takeover
        self._settings = learner, adopt, steps, pace, checkpoint_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._abandoned = threading.Event()
        self.news = threading.Event()
        """Set whenever the agent has something for the training thread."""
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """While joining: work for the training thread, given by the agent; None when there is no more."""
        self._attached = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, enter: Find, find_donor: FindDonor, assemble: Assemble) -> None:
        """Start the thread; return once the run is joined and a donor, if one is needed, was looked for.

        `assemble` gets the ranks of this learner ready to keep their share of its arrays.

        Until then, the calling thread, which is the training thread, does what the agent asks for (see
        `on_training_thread`). Raises the error that ended the agent.
        """
        self._thread = threading.Thread(
            target=self._main, args=(enter, find_donor, assemble), name="isthmus-agent", daemon=True
        )
        self._thread.start()
        try:
            while (work := self._asked.get()) is not None:
                work()
            self.check()
        except BaseException:  # Ctrl-C, or an error in work for the training thread
            self.abandon()
            raise

    async def on_training_thread(self, work: Callable[[], Result]) -> Result:
        """Run work on the training thread while it waits in `start`: only that thread may touch the model."""
        return await asyncio.wrap_future(self._handed(work))

    def ask_training_thread(self, work: Callable[[], Result]) -> Result:
        """Run work on the training thread, and wait for it on this thread, which must not be the agent's."""
        return self._handed(work).result()

    def _handed(self, work: Callable[[], Result]) -> "Future[Result]":
        done: Future[Result] = Future()

        def doing() -> None:
            if not done.set_running_or_notify_cancel():
                return  # the caller does not wait for it any more
            try:
                result = work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)  # not in the `try`: a Ctrl-C here must be raised, as the result may be set

        self._asked.put(doing)
        return done

    def ask_agent(self, work: Callable[[Log], Coroutine[None, None, Result]]) -> Result:
        """Run a coroutine with the log on the agent's thread, after joining. Raises its errors."""
        assert self._loop is not None, "joined without a loop"
        return asyncio.run_coroutine_threadsafe(work(self._log), self._loop).result()

    def attach(self, replica: Replica, arrays: Arrays | None, saver: Saver) -> None:
        """Write the newest values, or the local work on them, into the model, and let the agent run.

        `arrays`: makes the arrays that fragments are copied into; None: arrays of this process.
        """
        loop, agent = self._loop, self.agent
        assert loop is not None, "joined without a loop"

        def notify() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(agent.wake)

        self.donor = None  # free it, since it may be as large as the model
        agent.attach(replica, notify, saver, arrays).news = self.news.set
        agent.history.let_go()
        self._attached.set()

    def abandon(self) -> None:
        """End the thread, since joining failed or was interrupted."""
        atexit.unregister(self._at_exit)
        self._abandoned.set()
        self._attached.set()
        self._end()

    def check(self) -> None:
        """Raise the error that ended the agent, if there was one.

        An `IsthmusError` says all in its message and is raised without its traceback. An unexpected error keeps the
        traceback of the agent's thread.
        """
        if isinstance(self._failure, IsthmusError):
            raise self._failure.with_traceback(None) from None
        if self._failure is not None:
            raise self._failure

    def close(self, *, done: bool, keep: bool, orderly: bool, wait_s: float | None) -> None:
        """Let the agent finish what is under way, then end the thread.

        `keep`: store a last checkpoint, if the training loop holds the state of a step boundary. `orderly`: the caller
        is between two steps, as far as it knows. `wait_s`: seconds to wait for answers to the last updates, whether or
        not a syncer is heard; None: `WAIT_S`, while a syncer is heard.

        Raises `KeyboardInterrupt` if that ends the wait.
        """
        atexit.unregister(self._at_exit)
        loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive() or loop.is_closed():
            self._say_failure()
            return
        stores = keep and self.agent.boundary is not None and math.isfinite(self._settings[4])
        step = self.agent.boundary.step if self.agent.boundary is not None else 0
        if stores:
            with held_back():
                stores = self._copy_last(orderly)
        with suppress(RuntimeError):  # the loop may end at this moment
            loop.call_soon_threadsafe(lambda: self.agent.drain(done=done, wait_s=wait_s))
        self._closing = True
        try:
            self._wait_for_the_end(thread, stores, WAIT_S if wait_s is None else wait_s)
        finally:
            if thread.is_alive():
                self._end()
            if stores and self.agent.stored_step != step:
                logger.warning(
                    "%s: no checkpoint of step %d was stored, its last: a restart goes on after %s",
                    self._settings[0], step, self._newest(),
                )  # fmt: skip
            self.agent.vitals.rest()
            self._say_failure()

    def let_go(self) -> None:
        """Have the agent leave once everything under way has finished. Do not wait for that."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.agent.drain)

    def hurry(self) -> None:
        """If the agent is about to end, let it wait for no more answers. May be called by a signal handler."""
        if self._closing and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self.agent.hurry)

    def _copy_last(self, orderly: bool) -> bool:
        boundary = self.agent.boundary
        assert boundary is not None, "attached"
        why = boundary.why_not_whole(orderly)
        if why is None:
            boundary.freeze()
            return True
        order = "; a loop that calls link.step before optimizer.step() ends so each time: call it after"
        order = order if orderly and WITHOUT_STEP not in why else ""
        logger.warning(
            "%s: it ends in the middle of a step (%s), so no checkpoint is taken there: a restart goes on after %s%s",
            self._settings[0], why, self._newest(), order,
        )  # fmt: skip
        return False

    def _newest(self) -> str:
        step = self.agent.stored_step
        return "step 0, since no checkpoint was stored" if step is None else f"step {step}"

    def _wait_for_the_end(self, thread: threading.Thread, stores: bool, wait_s: float) -> None:
        began = said = clock()
        while thread.is_alive():
            now = clock()
            # The checkpoint's size is known once it is packed, so the limit is computed each time.
            for_last = LAST_S + self.agent.last_bytes / LAST_BYTES_S if stores else 0.0
            most = max(DRAIN_S, for_last) + wait_s + CLOSE_S + LEAVE_S
            if now - began > most:
                logger.warning(
                    "%s: uploads and checkpoints under way did not finish within %.0f s", self._settings[0], most
                )
                return
            if now - said > STILL_S:
                said = now
                what = self.agent.under_way
                logger.info("%s: closing, for %.0f s: %s (at most %.0f s)", self._settings[0], now - began, what, most)
            thread.join(0.2)

    def _end(self) -> None:
        """Cancel the agent's work and wait up to `EXIT_S` for the thread. The loop may not exist yet."""
        loop, thread = self._loop, self._thread
        if thread is None:
            return
        if loop is not None:
            with suppress(RuntimeError):  # the loop may end at this moment
                loop.call_soon_threadsafe(self._give_up)
        thread.join(EXIT_S)

    def _say_failure(self) -> None:
        if self._failure is not None:
            # Training is over, so no error is raised any more. Without this line, nothing would explain the silence.
            logger.warning(
                "%s: its agent ended before it could publish the leave message: %s",
                self._settings[0], self._failure,
                exc_info=None if isinstance(self._failure, IsthmusError) else self._failure,
            )  # fmt: skip

    def _at_exit(self) -> None:
        """End the thread before the interpreter exits, which would tear down requests under way."""
        # Where another process has the name, that one goes on, and the error has said so.
        if self._attached.is_set() and not isinstance(self._failure, Fenced):
            logger.warning(
                "%s: this process ends, and link.close() was not called: no last checkpoint is stored, and a restart "
                "goes on after %s; use «with isthmus.join(…) as link:», or call link.close() at the end",
                self._settings[0], self._newest(),
            )  # fmt: skip
        self._end()

    def _give_up(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _main(self, *arguments: Any) -> None:
        from isthmus.torch.model import keep_denormals

        try:
            keep_denormals()  # before the pool starts threads from this one, which inherit the mode
            asyncio.run(self._agent(*arguments))
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._failure = first_cause(error)
        finally:
            # Release the training thread before waiting for the sink: training must not go on without its agent.
            self._asked.put(None)
            if (
                self._failure is None
            ):  # A failure may be that of an exit, which closes thread pools before the handlers.
                atexit.unregister(self._at_exit)
            if self.feeder is not None:
                self.feeder.close()

    async def _agent(self, enter: Find, find_donor: FindDonor, assemble: Assemble) -> None:
        self._loop = asyncio.get_running_loop()
        if self._abandoned.is_set():
            return
        run_url, bus_url = self._urls
        learner, adopt, steps, pace, checkpoint_s = self._settings
        started = self._loop.time()
        async with open_ports(run_url, bus_url, enter, self._trust) as ports, assemble(ports) as ranks:
            # Exit handlers run last in, first out. The store client's handler must run when there are no more requests.
            atexit.register(self._at_exit)
            self.run, self._log = ports.log.run, ports.log
            self._trust.take_part(self.run, ports.log.members, bus_url, MemberRole.LEARNER, learner)
            self.agent = LearnerAgent(
                ports.log, ports.store, ports.bus, ports.runtime, learner,
                adopt=adopt, steps_target=steps, pace=pace, checkpoint_s=checkpoint_s,
                make_backend=ranks.backend, manifest=self._manifest, takeover=self._takeover,
            )  # fmt: skip
            # Warm up now: it holds the interpreter for tenths of a second, and the first update would wait for it.
            warming = asyncio.ensure_future(ports.runtime.offload(kernels.warm))
            # No time limit: the values and a checkpoint of a large model are many bytes.
            await self.agent.join()
            if not (await asyncio.wait([warming], timeout=COMPILES_S))[0]:
                logger.info("%s compiles its kernels, once on each machine, and sends nothing before", learner)
            await warming
            self.joined_at = [known.version for known in self.agent.downlink.known]
            if self.agent.history.checkpoint is None and any(self.joined_at):
                self.donor = await find_donor(self.agent)
            history, gone = self.agent.history, self.agent.uplink.lost
            logger.log(
                # Nobody expects a learner to begin anew whose earlier starts trained something.
                logging.WARNING if (anew := _anew(history, gone)) else logging.INFO,
                "%s joined %s (start %d of this name): goes on after step %d (%.0f tokens lost in all), in %.2f s, as "
                "process %d on %s%s",
                learner,
                run_url,
                self.agent.incarnation,
                history.step,
                gone,
                self._loop.time() - started,
                os.getpid(),
                platform.node(),
                anew,
            )
            if self.agent.incarnation == 1 and (meant := mistaken(learner, await self.agent.others())):
                logger.warning(
                    "%s is new in this run, in which %s trains: if that is a mistyped name, stop this learner, which "
                    "begins anew", learner, meant,
                )  # fmt: skip
            if self._sink is not None:
                self.feeder = Feeder(self._sink, self.agent.scalars)
            self._asked.put(None)
            await ports.runtime.offload(self._attached.wait)
            if self._abandoned.is_set():
                return
            running = asyncio.ensure_future(self.agent.run())
            lost = asyncio.ensure_future(ranks.until_one_is_lost())
            try:
                await asyncio.wait([running, lost], return_when=asyncio.FIRST_COMPLETED)
                if lost.done() and not running.done():
                    lost.result()
                await running
            finally:
                running.cancel()
                lost.cancel()
                await asyncio.gather(running, lost, return_exceptions=True)


def mistaken(name: str, others: Iterable[str]) -> str:
    """Return the one of these names that a new name may be a misspelling of; empty if there is none.

    Names of one scheme (eu-west-1 and us-west-1, gpu-1 and gpu-11) differ in their digits, or in letters in the same
    places. A mistyped name lacks a letter, has one too many, or has them in another order or case.
    """

    def like(other: str) -> bool:
        a, b = name.casefold(), other.casefold()
        digits = [[c for c in text if c.isdigit()] for text in (a, b)]
        moved = len(a) != len(b) or sorted(a) == sorted(b)
        return digits[0] == digits[1] and moved and difflib.SequenceMatcher(None, a, b).ratio() > ALIKE

    return next((other for other in sorted(others) if like(other) and other != name), "")


def _anew(history: History, gone: float) -> str:
    """Return why a learner begins anew although it has trained before, and what to do; empty if it does not."""
    if not history.unread:
        return "; no checkpoint of it is stored (see checkpoint_s)" if gone and history.checkpoint is None else ""
    which = "the only stored checkpoint" if history.unread == 1 else f"none of its {history.unread} stored checkpoints"
    how = "cannot" if history.unread == 1 else "can"
    return (
        f"; {which} {how} be used (the lines before say why): restore one from a backup, and start it again; one that "
        "an earlier key signed counts if the owner vouched for it, as isthmus members rotate does, and members add "
        "does not"
    )


class OwnerThread:
    """The thread in which a following rank that owns fragments serves the leading rank."""

    def __init__(self, work: Callable[..., Coroutine[None, None, None]]) -> None:
        """`work` serves until there is nothing more to do. It passes the run's log to its argument `opened`."""
        self._log: Future[Log] = Future()
        self._loop_thread = LoopThread("isthmus-owner", lambda: self._served(work), self._lost, self._ended)

    def ask(self, work: Callable[[Log], Coroutine[None, None, Result]]) -> Result:
        """Run a coroutine with the log on this thread, and wait for it. Raises its errors."""
        return self._loop_thread.ask(work(self._log.result()))

    def close(self) -> None:
        """Wait up to `EXIT_S` for the thread to end by itself, as it does when the leading rank ends; then stop it."""
        self._loop_thread.join(EXIT_S)
        self.stop()

    def stop(self) -> None:
        """Stop the thread."""
        self._loop_thread.stop()

    async def _served(self, work: Callable[..., Coroutine[None, None, None]]) -> None:
        from isthmus.torch.model import keep_denormals

        keep_denormals()  # before the pool starts threads from this one, which inherit the mode
        await work(opened=self._log.set_result)

    def _lost(self, error: BaseException) -> None:
        # The first rank notices the lost connection and ends the learner.
        logger.error("this rank cannot keep its fragments: %s", error, exc_info=error)

    def _ended(self) -> None:
        if not self._log.done():
            self._log.set_exception(RankLost("its thread has ended"))
