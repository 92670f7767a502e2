"""Creating a run: first version 0 of every fragment, and the run object last."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgpack
import msgspec
import numpy as np

from isthmus.codecs import kernels
from isthmus.codecs.kernels import F32
from isthmus.errors import InputError, RecordInvalid, RunExists, RunMissing
from isthmus.format import memory
from isthmus.format.layout import Layout, Spec, Tensor, first_difference, partition
from isthmus.format.records import frame
from isthmus.format.records.keys import RUN_KEY, snapshot_key
from isthmus.format.records.objects import SCHEMA, RunHeader
from isthmus.format.rules import BOUNDS, Bounds, MergeRule, Pace, Rules
from isthmus.format.signing import Signer, fingerprint
from isthmus.log import merge
from isthmus.log.run import Run, described, parsed, read_run
from isthmus.runtime.clock import Runtime
from isthmus.store import Store

Take = Callable[[Tensor], Awaitable[F32]]
"""Returns the flat initial values of a piece of a tensor, float32. It is called twice for each piece, and the values
are not kept: a model need not fit into this process."""


@dataclass(frozen=True, slots=True)
class Seed:
    """What a run is created from."""

    specs: Sequence[Spec]
    values: "Sequence[F32] | Take"
    """Flat initial values of each tensor, float32, in the order of `specs`; or a function that returns those of a
    piece."""
    frozen: dict[str, bytes]
    rules: Rules
    pace: Pace
    model: str = ""
    seed: int = 0
    bounds: Bounds = BOUNDS
    signer: Signer | None = None
    """The key of the run's owner, who authorises all other keys; None: nothing in the run is signed."""


async def create_run(store: Store, runtime: Runtime, seed: Seed) -> Run:
    """Create the run, version 0 first and the run object last. Return it, or an equal run that already exists.

    A process that loses the race to create the run returns the winner's, if that is equal. Raises `RunExists` if the
    existing run differs, for example in its layout, rules or owner, `RunMissing` if only
    the run object is missing of a run, and `InputError` for a model that cannot be merged.
    Creating the same run twice is harmless.
    """
    return (await create_or_find(store, runtime, seed))[0]


async def create_or_find(store: Store, runtime: Runtime, seed: Seed) -> tuple[Run, bool]:
    """Return what `create_run` does, and whether this call has created it. Raises the same."""
    # Part of a matrix has only part of its directions. Isotropic merges need matrices whole, at some cost in balance.
    layout = partition(seed.specs, seed.rules.check().fragments, finer=seed.rules.merge != MergeRule.ISO)
    seed.pace.check()
    seed.bounds.check()
    try:
        return _same(await read_run(store), seed), False
    except RunMissing as missing:
        if missing.beside:
            raise
    created_at = runtime.wall()
    # Whatever can fail is checked before anything is written. The run object's size does not depend on the digests.
    try:
        parsed(_run_object(seed, layout, [bytes(32)] * len(layout.fragments), created_at))
    except (RecordInvalid, msgspec.ValidationError, ValueError) as error:
        raise InputError(f"the run cannot be described: {error}") from None
    take = seed.values if callable(seed.values) else _from(seed.specs, seed.values)
    for fragment in layout.fragments:
        for t in fragment.tensors:
            if not kernels.all_finite(await take(t)):
                raise InputError(f"the initial values of {t.spec.name!r} (fragment {fragment.index}) are not finite")
    # Snapshots hold the run's digest, and the run object names its snapshots. Those of version 0 therefore hold zeros
    # as the run's digest.
    digests = []
    for fragment in layout.fragments:
        flat = memory.empty(fragment.size)
        for t in fragment.tensors:
            flat[t.start : t.stop] = await take(t)
        blob = merge.snapshot(merge.initial(flat), fragment.index, bytes(32))
        await runtime.offload(frame.seal, blob, seed.signer)
        digests.append(await runtime.offload(frame.digest, blob))
        await store.put(snapshot_key(fragment.index, 0, digests[-1]), blob)
    ours = await store.create(RUN_KEY, _run_object(seed, layout, digests, created_at))
    return _same(await read_run(store), seed), ours


def _same(run: Run, seed: Seed) -> Run:
    """Return the run if it is the one that was to be created. Raises `RunExists` if not."""
    difference = first_difference(seed.specs, run.layout.specs)
    if difference is not None:
        raise RunExists(run.url, difference)
    run.require_rules(seed.rules)
    owner = run.header.owner
    if seed.signer is not None and owner is None:
        raise RunExists(run.url, "nothing in it is signed, and a key is given")
    if seed.signer is not None and owner not in (None, seed.signer.author):
        assert owner is not None, "it is another's"
        raise RunExists(
            run.url, f"it belongs to {fingerprint(owner)}, and the key given is {fingerprint(seed.signer.author)}"
        )
    if run.header.bounds != seed.bounds:
        raise RunExists(run.url, f"its bounds are {run.header.bounds}")
    return run


def _run_object(seed: Seed, layout: Layout, digests: Sequence[bytes], created_at: float) -> frame.Body:
    """Return the bytes of the run object. Raises `ValueError` if its header is over the limit."""
    cut = described(layout, seed.frozen)
    payload = msgpack.packb(msgspec.to_builtins(cut, builtin_types=(bytes,)), use_bin_type=True)
    header = RunHeader(
        schema=SCHEMA,
        rules=seed.rules,
        pace=seed.pace,
        arithmetic=kernels.ARITHMETIC,
        model=seed.model,
        seed=seed.seed,
        created_at=created_at,
        snapshots=tuple(digests),
        layout=frame.digest(payload),
        bounds=seed.bounds,
        owner=seed.signer.author if seed.signer else None,
        states_at_snapshots=True,
    )
    out = frame.draft(frame.Kind.RUN, header, len(payload))
    out.payload[:] = payload
    frame.seal(out.blob, seed.signer)
    return out.blob


def _from(specs: Sequence[Spec], values: Sequence[F32]) -> Take:
    named = dict(zip((s.name for s in specs), values, strict=True))

    async def take(t: Tensor) -> F32:
        return np.ascontiguousarray(named[t.spec.name][t.origin : t.origin + t.size], np.float32)

    return take
