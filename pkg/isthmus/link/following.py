"""Bring a run's global model to a process that does not train it: `follow` gives new cuts to a module or a function.

    following = isthmus.follow("s3://bucket/run", model)
    while serving:
        ...
        following.update()          # between two requests: writes the newest cut, at the price of a copy
    following.close()

It needs permission to read the store and nothing else. `isthmus.inspect.follow` says what a cut is.
"""

# ruff: noqa: TID251  (threads: the caller's thread waits for the following thread)
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.agent.ports import TRUSTING, open_log
from isthmus.codecs import kernels
from isthmus.errors import InputError, Unavailable, told
from isthmus.format.signing import Signer
from isthmus.inspect.follow import Cut, cuts
from isthmus.learner.global_local import Buffers
from isthmus.link.loop_thread import LoopThread
from isthmus.log import Log, evaluations
from isthmus.log.promotions import require_named
from isthmus.log.trust import Trust, trust_of

if TYPE_CHECKING:
    from torch import nn


Judge = Callable[[Cut], Mapping[str, float] | None]
"""Uses a cut. It may return measurements of the cut, by the names of series."""


logger = logging.getLogger(__name__)


class Following:
    """Follows a run on a thread of its own. Made by `follow`; used from the caller's thread."""

    def __init__(
        self,
        run: str,
        target: "nn.Module | Judge",
        every: int,
        apart_s: float,
        fragments: Sequence[int] | None,
        mixed: bool,
        promoted: bool = False,
        name: str | None = None,
        trust: Trust = TRUSTING,
    ) -> None:
        from torch import nn

        self._run = run
        self._trust = trust
        self._promoted, self._name = promoted, name
        self._module = target if isinstance(target, nn.Module) else None
        self._function = None if isinstance(target, nn.Module) else target
        self._how = every, apart_s, fragments, mixed
        self._changed = threading.Condition()
        self._brought: Cut | None = None
        self._given: Cut | None = None
        self._failure: BaseException | None = None
        self._over = False
        self._log: Log | None = None
        self._loop_thread = LoopThread("isthmus-follow", self._follow, self._fail, self._end)

    @property
    def cut(self) -> int:
        """Number of the cut that the module holds, or that the function was given last; -1 before the first."""
        return -1 if self._given is None else self._given.number

    def update(self, wait_s: float = 0.0) -> bool:
        """Write the newest cut into the module if the module does not hold it yet. Return whether it was written.

        Call this while the module is not in use. It copies on this thread and fetches nothing. `wait_s`: seconds to
        wait for the first or next cut. Raises the error that ended the following: `RunMissing`, `Denied`, `LogCorrupt`,
        or `LayoutMismatch` if the module does not fit the run.
        """
        if self._module is None:
            raise InputError("update() writes into a module, but this follower was given a function")
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._brought is not self._given, wait_s)
            self._check()
            cut = self._brought
            if cut is None or cut is self._given:
                return False
        from isthmus.torch.model import load_local
        from isthmus.torch.serving import load_cut

        load_cut(self._module, cut)
        load_local(self._module, cut.local)
        self._given = cut
        return True

    def note(self, series: str, value: float) -> None:
        """Store a number measured of this cut in the run, as the next of a series. `isthmus status` shows it.

        It needs permission to write below `evaluations/` in the store. Raises `InputError`, `Unavailable`, `Denied`.
        """
        if self._given is None or self._log is None:
            raise InputError(f"no cut has been received yet, so {series} cannot be a measurement of one")
        self._loop_thread.ask(self._noted(self._log, self._given, series, value))

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the following ends, for at most `seconds`. Raises the error that ended it, if there was one."""
        with self._changed:
            self._changed.wait_for(lambda: self._over, seconds)
            self._check()

    def close(self) -> None:
        """Stop following. Raises the error that ended it before, if there was one."""
        self._loop_thread.stop()
        self._check()

    def __enter__(self) -> "Following":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._loop_thread.stop()
        if kind is None:
            self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- on its own thread --------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        from isthmus.torch.model import keep_denormals
        from isthmus.torch.unmerged_state import local_tensors

        keep_denormals()  # before the pool starts threads from this one, which inherit the mode
        every, apart_s, fragments, mixed = self._how
        async with open_log(self._run, self._trust) as log:
            self._log = log
            await log.runtime.offload(kernels.warm)
            buffers = Buffers(log)
            wants_local = fragments is None if self._module is None else bool(local_tensors(self._module))
            async for merged in cuts(
                log, log.runtime, every=every, apart_s=apart_s, fragments=fragments, mixed=mixed,
                promoted=self._promoted,
            ):  # fmt: skip
                cut = replace(merged, local=await buffers.newest()) if wants_local else merged
                with self._changed:
                    self._brought = cut
                    self._changed.notify_all()
                if self._function is not None:
                    found = await log.runtime.offload(self._function, cut)
                    for series, value in (found or {}).items():
                        try:
                            await self._noted(log, cut, series, value)
                        except Unavailable as error:
                            logger.warning("could not store %s of cut %d: %s", series, cut.number, told(error))
                    self._given = cut

    async def _noted(self, log: Log, cut: Cut, series: str, value: float) -> None:
        require_named(log.members, log.signer, self._name)
        await evaluations.note(log, series, cut.number, value, by=self._name, published=cut.published)

    def _fail(self, error: BaseException) -> None:
        self._failure = error

    def _end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()


def follow(
    run: str,
    target: "nn.Module | Judge",
    *,
    every: int = 1,
    at_most_every_s: float = 0.0,
    fragments: Sequence[int] | None = None,
    mixed: bool = False,
    promoted: bool = False,
    name: str | None = None,
    key: str | Path | Signer | None = None,
    owner: str | None = None,
    run_digest: str | None = None,
) -> Following:
    """Follow a run's global model.

    Args:
        run: the run's location: `s3://bucket/prefix` or a folder.
        target: a module or a function. `Following.update` writes the newest cut into a module when it is called. A
            function is called with a cut on another thread; when it returns, it is called with the newest cut of that
            time. It may return numbers by the names of series, which are stored in the run as by `Following.note`. A
            module has the run's tensors under their names, on any device, in any dtype, trained or not, sharded or
            whole. Its other parameters must be frozen in the run. Its buffers get those of the global model: means over
            the learners' newest checkpoints, read once a minute at most. A function finds them in `cut.buffers()`.
        every: only cuts whose version is a multiple of this number.
        at_most_every_s: least time between two cuts, in seconds.
        fragments: only the tensors in these fragments; by default all.
        mixed: take each fragment at its newest version, instead of one version of all.
        promoted: only cuts that have passed the charter's gate (`isthmus promote`); `every` must be 1, `mixed` False.
        name: the member that measures, whose key signs measurements; needed if the run's charter has a gate.
        key: an OpenSSH private key of a member, which signs measurements; by default the one that `ISTHMUS_KEY` names.
        owner: who must own the run, as in `isthmus.join`.
        run_digest: which run it must be, as in `isthmus.join`.

    Raises `InputError`. Later errors are raised by `update`, `wait` and `close`.
    """
    if every < 1 or not at_most_every_s >= 0:
        raise InputError(f"every={every} must be at least 1, at_most_every_s={at_most_every_s:g} at least 0")
    if promoted and (mixed or every > 1):
        raise InputError("promoted=True takes every promoted cut: leave out every and mixed")
    trust = trust_of(key, owner, run_digest=run_digest)
    return Following(run, target, every, at_most_every_s, fragments, mixed, promoted, name, trust)
