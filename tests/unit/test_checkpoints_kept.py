"""Of an incarnation's checkpoints the newest are kept, also if two of them are stored at once."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from isthmus.format.rules import CHECKPOINTS_KEPT
from isthmus.learner.incarnation import Incarnation
from isthmus.runtime.clock import single_threaded


async def test_a_last_checkpoint_beside_a_periodic_one_is_stored_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored: list[str] = []

    async def put(key: str, data: bytes) -> None:
        await asyncio.sleep(0)
        stored.append(key)

    async def delete(key: str) -> None:
        await asyncio.sleep(0.01)  # both are being deleted at once
        stored.remove(key)

    async def digest(blob: bytes) -> bytes:
        return blob.rjust(32, b"\0")

    store = SimpleNamespace(put=put, delete=delete)

    async def refresh(_: object) -> None: ...

    members = SimpleNamespace(signed=False, current=None, refresh=refresh)
    log = cast(Any, SimpleNamespace(run=None, store=store, sealed_digest=digest, signer=None, members=members))
    nobody = cast(Any, SimpleNamespace(incarnation=1))
    kept = Incarnation(
        log, single_threaded(), "a", nobody, nobody, nobody,
        heartbeat_s=1.0, checkpoint_s=60.0, tell=lambda _: None, through=lambda: None,
    )  # fmt: skip

    def drafted(step: int) -> Any:
        return SimpleNamespace(
            header=SimpleNamespace(step=step), leaves=(), parts=lambda: (), pack=lambda _: b"%d" % step
        )

    for step in range(CHECKPOINTS_KEPT):
        await kept._store_one(drafted(step))
    await asyncio.gather(kept._store_one(drafted(100)), kept._store_one(drafted(200)))
    assert [key.rpartition("/")[2].partition("-")[0] for key in sorted(stored)] == ["000000000100", "000000000200"]
    assert list(kept._keys) == sorted(stored)
    assert not caplog.records
