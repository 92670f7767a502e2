"""Influence: what the model would have been without a member or an institution: the newest rounds are folded again
without their updates.

The other updates are taken as recorded, from their original bases, with the weights and cuts that they had. The other
model begins at a recorded state, with its momentum, so what was contributed before the first of these rounds stays in
it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from isthmus.codecs.kernels import F32
from isthmus.errors import InputError, LogCorrupt
from isthmus.format.records.frame import Body
from isthmus.inspect import export, whatif
from isthmus.inspect.audit_sums import rounded
from isthmus.log import Log
from isthmus.log.listing import ShareDone
from isthmus.store import Layer, Store

Evaluate = Callable[[Sequence[F32], Sequence[int]], Awaitable[float | None]]
"""Returns the held-out loss of a model, from the published value [n] and the version of each fragment; None: the
evaluation failed."""


@dataclass(frozen=True, slots=True)
class Influence:
    """How far the model would be from the recorded one without a member, or without all members of an institution."""

    name: str
    """The member's or the institution's."""
    members: Sequence[str]
    """Those left out together."""
    learners: Sequence[str]
    """Their learners whose updates were left out."""
    rounds: int
    """The newest rounds of each fragment that were folded again; 0: all that can be."""
    starts: Sequence[int]
    heads: Sequence[int]
    """By fragment: the version after which updates were left out, and the last version."""
    foldable: Sequence[int]
    """By fragment: how many of its newest rounds can be folded again."""
    left_out: int
    """Number of updates that were left out."""
    distance: float | None
    """‖Θ' − Θ‖ of the published values at the heads; None: it could not be computed."""
    movement: float | None
    """‖Θ − Θ_start‖: how far the recorded run moved in these rounds."""
    relative: float | None
    """Distance / movement; None without movement."""
    cosine: float | None
    """Cosine between the two movements."""
    loss: float | None
    loss_without: float | None
    """Held-out losses of the recorded model and of the other one; None: not evaluated."""
    folds: int
    seconds: float
    bytes_read: int
    """What computing this took: rounds folded again, wall time with the evaluations, and bytes from the store."""
    fault: str
    """Why it could not be computed; empty if it was."""


class _Counted(Layer):
    """Counts the bytes that are read."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.bytes = 0

    @override
    async def get(self, key: str) -> Body:
        return self._counted(await super().get(key))

    @override
    async def get_range(self, key: str, start: int, stop: int) -> Body:
        return self._counted(await super().get_range(key, start, stop))

    def _counted(self, data: Body) -> Body:
        self.bytes += len(data)
        return data


async def without(
    log: Log,
    name: str,
    members: Sequence[str],
    learners: set[str],
    starts: Mapping[int, int],
    heads: Sequence[int],
    foldable: Sequence[int],
    *,
    rounds: int,
    evaluate: Evaluate | None = None,
    losses: dict[tuple[int, ...], float | None],
    progress: ShareDone = lambda _: None,
) -> Influence:
    """Return the influence of members together. A log that cannot be folded is the result's fault, and not raised.

    `name`: theirs together. `learners`: those of their learners that were merged after `starts`, which has each
    fragment's version to begin at, and `heads` its newest one. `foldable`: see `Influence`. `losses`: of the recorded
    model, by its versions; it is evaluated once and added.
    """
    store, began = _Counted(log.store), log.runtime.now()
    reading, settings = log.through(store), whatif.Settings(without=frozenset(learners))
    row, left_out, folds, fault = None, 0, 0, ""
    loss, loss_without = None, None
    try:
        if not learners:
            raise InputError("none of its updates is merged in these rounds")
        found = await whatif.what_if(reading, settings, starts=starts, progress=progress)
        heads, row = found.heads, found.rows[-1] if found.rows else None
        folds = sum(heads) - sum(starts.values())
        left_out = sum(r.inputs_recorded - r.inputs_other for r in found.rows)
        if evaluate is not None:
            if (at := tuple(heads)) not in losses:
                losses[at] = await evaluate(await export.published(reading, heads), heads)
            other = [found.states[p].published for p in sorted(found.states)]
            loss, loss_without = losses[at], await evaluate(other, heads)
    except (LogCorrupt, InputError) as error:
        fault = str(error)
    return Influence(
        name=name,
        members=members,
        learners=sorted(learners),
        rounds=rounds,
        starts=[starts[p] for p in sorted(starts)],
        heads=heads,
        foldable=foldable,
        left_out=left_out,
        distance=rounded(row.difference) if row else None,
        movement=rounded(row.way) if row else None,
        relative=rounded(row.difference / row.way) if row and row.way else None,
        cosine=rounded(row.cosine) if row and row.cosine == row.cosine else None,
        loss=loss,
        loss_without=loss_without,
        folds=folds,
        seconds=log.runtime.now() - began,
        bytes_read=store.bytes,
        fault=fault,
    )
