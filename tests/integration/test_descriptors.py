"""A process without file descriptors says so, and does not send anybody to its store or its bus."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isthmus.bus import open_bus
from isthmus.errors import Unavailable
from isthmus.runtime.clock import single_threaded
from isthmus.store import open_store
from isthmus_services.servers import Server


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing. What is open stays open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


SAID = r"no file descriptors left: raise its limit of 3 \(ulimit -n, LimitNOFILE= of a systemd service\), and start it"


@pytest.mark.parametrize("scheme", ["s3", "s3+aiobotocore"])
async def test_a_request_to_a_bucket(scheme: str, seaweedfs: Server, use: Callable[[Server], None]) -> None:
    use(seaweedfs)
    run, runtime = f"{scheme}://descriptors/run", single_threaded(0)
    async with open_store(run, runtime, make=True) as first, open_store(run, runtime) as store:
        await first.list("")  # the client's own threads have started
        with no_descriptors(), pytest.raises(Unavailable, match=SAID) as caught:
            await store.list("")
        assert "start the store" not in str(caught.value)
        assert await store.list("") == []


async def test_a_request_to_the_bus(redis: Server) -> None:
    async with open_bus(redis.url, b"r" * 32, None) as bus:
        with no_descriptors(), pytest.raises(Unavailable, match=SAID) as caught:
            await bus.append("s", b"x")
        assert "is started there" not in str(caught.value)
        await bus.append("s", b"x")


async def test_a_folder(tmp_path: Path) -> None:
    async with open_store(str(tmp_path / "run"), single_threaded(0)) as store:
        await store.put("a", b"x")
        with no_descriptors(), pytest.raises(Unavailable, match=SAID):
            await store.get("a")
        assert bytes(await store.get("a")) == b"x"
