"""Objects and messages of a participant with a prefix and a stream: plausible except for what a test changes."""

from typing import Any

import msgspec
import numpy as np

from isthmus.codecs import codec, pack
from isthmus.codecs.kernels import F32
from isthmus.format.records import frame
from isthmus.format.records.keys import update_key
from isthmus.format.records.messages import Announce, encode, learner_stream
from isthmus.format.records.objects import UpdateHeader
from support.world import World

replace = msgspec.structs.replace


def announcement(w: World, learner: str = "evil", **changes: Any) -> Announce:
    """Return the announcement of an honest learner, with changes."""
    plausible = Announce(
        run=w.run.digest,
        id="x",
        learner=learner,
        incarnation=1,
        fragment=0,
        base=0,
        key="updates/x",
        digest=bytes(32),
        size=1,
        steps=5,
        tokens=500,
        step=5,
        tokens_seen=500,
        due=True,
        age_s=0.0,
        step_s=0.01,
        upload_s=0.01,
        sync_s=0.01,
    )
    return replace(plausible, **changes)


async def post(
    w: World,
    learner: str,
    blob: bytes,
    *,
    base: int = 0,
    fragment: int = 0,
    put: bool = True,
    **changes: Any,
) -> None:
    """Store an update and announce it, both exactly as given."""
    digest = frame.digest(blob)
    key = update_key(fragment, learner, base, digest)
    if put:
        await w.store.put(key, blob)
    said = announcement(w, learner, fragment=fragment, base=base, key=key, digest=digest, size=len(blob))
    await w.bus.append(learner_stream(learner), encode(replace(said, **changes)))


def forged(w: World, learner: str = "evil", *, values: F32 | None = None, fragment: int = 0, **changes: Any) -> bytes:
    cut = w.run.layout.fragments[fragment]
    plausible = UpdateHeader(
        schema=1,
        run=w.run.digest,
        fragment=fragment,
        learner=learner,
        incarnation=1,
        base=0,
        codec=w.run.rules.codec_up,
        steps=5,
        tokens=500,
        step=5,
        tokens_seen=500,
        train_s=1.0,
    )
    code = codec(w.run.rules.codec_up)
    values = np.full(cut.size, 1e-3, np.float32) if values is None else values
    return bytes(frame.written(frame.Kind.UPDATE, replace(plausible, **changes), pack(code, cut, values)))
