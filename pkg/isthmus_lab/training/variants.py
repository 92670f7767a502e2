"""Other arithmetic that the lab tries in place of the library's; no real run uses it.

A variant applies to the whole process of the lab while one setting runs. It need not be exact to the bit.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.codecs import kernels
from isthmus.codecs.kernels import F32
from isthmus.codecs.packed import plain
from isthmus.errors import InputError
from isthmus.format import layout
from isthmus.format.layout import Fragment
from isthmus.inspect.own_merge import OwnMerge
from isthmus.learner import backend
from isthmus.learner.backend import local_array
from isthmus.learner.boundary import Boundary, Captured
from isthmus.log import fold
from isthmus.log.merge import Accumulator, Publication, State
from isthmus.syncer import round_sum
from isthmus.syncer.coordinator import FragmentCoordinator
from isthmus.syncer.inbox import Fetched
from isthmus_lab.training import hostile
from isthmus_services.settings.shared import callable_of

Vector = NDArray[np.floating[Any]]

Step = Callable[[Accumulator, State, F32], tuple[Vector, Vector]]
"""Returns the master and the momentum after a round, given the round, the state before it and the merged difference Δ
[n]."""


def variant(name: str) -> AbstractContextManager[None]:
    """Apply a variant while the context lasts; the empty name is the library's own arithmetic.

    Raises `InputError` for a name that does not exist.
    """
    if not name:
        return nullcontext()
    if name not in VARIANTS:
        raise InputError(f"unknown variant {name!r}: choose one of {', '.join(VARIANTS)}")
    return VARIANTS[name]()


@contextmanager
def merged_by(path: str) -> Iterator[None]:
    """Merge by a function MODULE:FUNCTION while the context lasts; with an empty text, by the library's rules.

    Raises `InputError` if there is no such function, and where it fails.
    """
    if not path:
        yield
        return
    rule = OwnMerge(f"merge {path}", callable_of(path, "merge"))
    with _in_place_of(round_sum, "Accumulator", rule.accumulator), _in_place_of(fold, "Accumulator", rule.accumulator):
        yield


@contextmanager
def _in_place_of(owner: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    missing = object()
    own = vars(owner).get(name, missing)
    setattr(owner, name, other)
    try:
        yield
    finally:
        if own is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _stepping(step: Step) -> AbstractContextManager[None]:
    def outer_step(round_: Accumulator, state: State, publication: Publication | None = None) -> tuple[F32, F32, int]:
        deltas, cancelled = round_.deltas()
        merged = np.concatenate([delta * np.float32(scale) for delta, scale in deltas])
        master, momentum = (x.astype(np.float32) for x in step(round_, state, merged))
        if publication is not None:
            publication.take(slice(0, master.size), master, momentum)
        return master, momentum, cancelled

    return _in_place_of(Accumulator, "outer_step", outer_step)


def _nesterov(round_: Accumulator, state: State, merged: F32, mu: float, before: Vector) -> tuple[Vector, Vector]:
    (rate,) = {outer.learning_rate for outer in round_.outer.values()}
    momentum = mu * before + merged
    return state.master - rate * (merged + mu * momentum), momentum


def _mu(round_: Accumulator) -> float:
    (mu,) = {outer.momentum for outer in round_.outer.values()}
    return mu


def restart_every(versions: int) -> AbstractContextManager[None]:
    """Reset a fragment's momentum at every `versions`-th version."""

    def step(round_: Accumulator, state: State, merged: F32) -> tuple[Vector, Vector]:
        kept = 0.0 if (state.version + 1) % versions == 0 else 1.0
        return _nesterov(round_, state, merged, _mu(round_), kept * state.momentum)

    return _stepping(step)


def restart_where_opposed() -> AbstractContextManager[None]:
    """Reset a fragment's momentum if the merged difference opposes it (O'Donoghue and Candès, arXiv 1204.3982)."""

    def step(round_: Accumulator, state: State, merged: F32) -> tuple[Vector, Vector]:
        kept = 0.0 if float(merged @ state.momentum) < 0.0 else 1.0
        return _nesterov(round_, state, merged, _mu(round_), kept * state.momentum)

    return _stepping(step)


def momentum_of_lag(most: float = 0.9) -> AbstractContextManager[None]:
    """Set a fragment's momentum μ to the mean cosine of its successive merged differences, at most `most`.

    The mean decays over about ten versions. The outer rate changes with the momentum, so that the effective rate stays
    that of the rules.
    """
    last: dict[int, F32] = {}
    alike: defaultdict[int, float] = defaultdict(float)

    def step(round_: Accumulator, state: State, merged: F32) -> tuple[Vector, Vector]:
        p = round_.fragment.index
        if p in last:
            lengths = float(np.linalg.norm(merged) * np.linalg.norm(last[p]))
            alike[p] += 0.1 * ((float(merged @ last[p]) / lengths if lengths else 0.0) - alike[p])
        last[p] = merged
        mu = min(most, max(0.0, alike[p]))
        (rate,) = {outer.learning_rate for outer in round_.outer.values()}
        momentum = mu * state.momentum + merged
        effective = rate / (1.0 - _mu(round_))
        return state.master - effective * (1.0 - mu) * (merged + mu * momentum), momentum

    return _stepping(step)


def schedule_free() -> AbstractContextManager[None]:
    """Step z, average it in x, and train at y between z and x (Defazio et al., arXiv 2405.15682).

        z ← z − η Δ;  x ← (1 − 1/t) x + z / t;  y = (1 − β) z + β x

    β is the rules' momentum. The master holds y, the momentum holds x. The lab evaluates y, which is close to x at
    β = 0.9.
    """

    def step(round_: Accumulator, state: State, merged: F32) -> tuple[Vector, Vector]:
        (rate,) = {outer.learning_rate for outer in round_.outer.values()}
        beta, y = _mu(round_), state.master
        x: Vector = state.momentum if state.version else y
        z = (y - beta * x) / (1.0 - beta) - rate * merged
        x = x + (z - x) / (state.version + 1)
        return (1.0 - beta) * z + beta * x, x

    return _stepping(step)


def filtered(gradient: F32, momentum: F32, fragment: Fragment, kept: float = 0.0) -> F32:
    """Return an outer gradient [n] that keeps, per tensor, only the share `kept` of its part against the momentum."""
    gradient = gradient.copy()
    for t in fragment.tensors:
        piece, before = gradient[t.start : t.stop], momentum[t.start : t.stop]
        along = float(piece @ before)
        if along < 0.0:
            piece -= np.float32((1.0 - kept) * along / float(before @ before)) * before
    return gradient


def late_filtered() -> AbstractContextManager[None]:
    """Filter updates whose base is older than the newest version, as HeLoCo does."""
    own = FragmentCoordinator._arrive

    async def arrive(coordinator: FragmentCoordinator, fetched: Fetched) -> Any:
        update = fetched.update
        if update is not None and coordinator.state is not None and update.header.base < coordinator.state.version:
            found = filtered(update.gradient.decode(), coordinator.state.momentum, coordinator.fragment)
            fetched = replace(fetched, update=replace(update, gradient=plain(coordinator.fragment, found)))
        return await own(coordinator, fetched)

    return _in_place_of(FragmentCoordinator, "_arrive", arrive)


@contextmanager
def tensors_cut() -> Iterator[None]:
    """Cut the lab's small tensors into rows for fragments, as the library cuts only large tensors."""
    before = layout.CUT_FROM, layout.PIECE_MIN
    layout.CUT_FROM, layout.PIECE_MIN = 1 << 10, 1 << 10
    try:
        yield
    finally:
        layout.CUT_FROM, layout.PIECE_MIN = before


# --- learners ---------------------------------------------------------------------------------------------------------


@contextmanager
def overwritten_fed_back() -> Iterator[None]:
    """Add to a learner's next update of a fragment the local work that the newest adopted version overwrote.

    This is error feedback for work that came too late for an update. The learner's own model does not keep that work.
    """
    sent: dict[tuple[Boundary, int], F32] = {}
    replaced: dict[tuple[Boundary, int], F32] = {}
    capture, adopt = Boundary._capture, Boundary._adopt

    def feeding(boundary: Boundary, fragment: int, due: bool, now: float) -> None:
        capture(boundary, fragment, due, now)
        captured = boundary.outbox[-1]
        assert isinstance(captured, Captured), "a capture says what it captured last"
        sent[boundary, fragment] = local_array(captured.values)
        if (more := replaced.get((boundary, fragment))) is not None:
            boundary.outbox[-1] = replace(captured, values=local_array(captured.values) + more)

    def keeping(boundary: Boundary, fragment: int) -> None:
        since = sent.pop((boundary, fragment), None)
        if since is not None:
            local = np.empty_like(since)
            boundary._replica.read(fragment, local)
            replaced[boundary, fragment] = local - since
        adopt(boundary, fragment)

    with _in_place_of(Boundary, "_capture", feeding), _in_place_of(Boundary, "_adopt", keeping):
        yield


def sparse(gradient: F32, fragment: Fragment, kept: int, chunk: int = 4096) -> F32:
    """Return an outer gradient [n] that keeps the `kept` largest of every `chunk` values, in two bits each.

    A kept value has its sign, and the mean magnitude of the larger or the smaller half of the kept values: SparseLoCo's
    code (arXiv 2508.15706). A chunk takes 14 bits for each kept value, its place among 4,096 included, and 64 bits for
    the two magnitudes.
    """
    found = np.zeros_like(gradient)
    for t in fragment.tensors:
        for start in range(t.start, t.stop, chunk):
            values, into = (x[start : min(start + chunk, t.stop)] for x in (gradient, found))
            count = max(1, kept * values.size // chunk)
            places = np.argpartition(-np.abs(values), count - 1)[:count]
            places = places[np.argsort(-np.abs(values[places]))]
            for half in (places[: count // 2], places[count // 2 :]):
                if half.size:
                    into[half] = np.sign(values[half]) * np.float32(np.abs(values[half]).mean())
    return found


def sent_sparse(kept: int) -> AbstractContextManager[None]:
    """Send sparse updates (see `sparse`) and feed back what is dropped; the setting's codec transports the rest."""
    own = vars(backend)["pack"]

    def pack(codec: Any, fragment: Fragment, gradient: F32, *rest: Any, **more: Any) -> Any:
        return own(codec, fragment, sparse(gradient, fragment, kept), *rest, **more)

    return _in_place_of(backend, "pack", pack)


def residuals_in_bfloat16() -> AbstractContextManager[None]:
    """Keep what learners' codecs drop in two bytes a parameter; the digits beyond bfloat16 are lost."""
    own = vars(backend)["keep_dropped"]

    def keep(fragment: Fragment, code: Any, data: Any, x: F32, *rest: Any) -> None:
        own(fragment, code, data, x, *rest)
        half = np.empty(x.size, np.uint16)
        kernels.encode_bf16(x, half)
        kernels.decode_bf16(half, x)

    return _in_place_of(backend, "keep_dropped", keep)


@contextmanager
def rounds_of(*parts: tuple[int, int]) -> Iterator[None]:
    """Let H depend on a learner's own step: each part is (the step before which it applies, H).

    The last part applies to all later steps, too.
    """

    def current(boundary: Boundary) -> int:
        return next((h for until, h in parts if boundary.step < until), parts[-1][1])

    own = vars(Boundary)["_capture"]

    def capture(boundary: Boundary, fragment: int, *rest: Any) -> None:
        boundary.slots[fragment].period = current(boundary)
        own(boundary, fragment, *rest)

    within = _in_place_of(Boundary, "_within", lambda boundary, _: current(boundary))
    with within, _in_place_of(Boundary, "_capture", capture):
        yield


VARIANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "restart every 8": lambda: restart_every(8),
    "restart every 16": lambda: restart_every(16),
    "restart where opposed": restart_where_opposed,
    "momentum of lag": momentum_of_lag,
    "schedule-free": schedule_free,
    "late filtered": late_filtered,
    "overwritten fed back": overwritten_fed_back,
    "tensors cut": tensors_cut,
    "residuals in bfloat16": residuals_in_bfloat16,
    **{f"sparse {kept}": (lambda kept=kept: sent_sparse(kept)) for kept in (64, 128, 256)},  # type: ignore[misc]
    "H 6, 12, 24": lambda: rounds_of((150, 6), (300, 12), (600, 24)),
    "H 24, 12, 6": lambda: rounds_of((300, 24), (450, 12), (600, 6)),
    **hostile.VARIANTS,
}
"""Variants by their names in a setting."""
