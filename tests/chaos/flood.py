"""A learner that sends 1200 announcements a second, each on a base that does not exist, until it is killed."""

import asyncio
import sys

from isthmus.agent.ports import open_log
from isthmus.bus import open_bus
from isthmus.format.records.keys import update_key
from isthmus.format.records.messages import Announce, encode, learner_stream
from isthmus.log.run import Run

BATCH, PAUSE_S = 60, 0.05


def announcement(run: Run, learner: str, fragment: int, number: int) -> bytes:
    """Return a well-formed announcement of an update that does not exist."""
    base, digest = 10**6 + number, number.to_bytes(32, "big")
    return encode(
        Announce(
            run=run.digest, id=f"{number:016x}", learner=learner, incarnation=1, fragment=fragment, base=base,
            key=update_key(fragment, learner, base, digest), digest=digest,
            size=4 * run.layout.fragments[fragment].size + 256, steps=1, tokens=1, step=1, tokens_seen=1, due=True,
            age_s=0.0, step_s=0.02, upload_s=0.01, sync_s=0.01,
        )
    )  # fmt: skip


async def main(url: str, bus_url: str, learner: str) -> None:
    """Send announcements until the process is killed."""
    async with open_log(url, threads=1) as log:
        run = log.run
    number = 0
    async with open_bus(bus_url, run.digest, None) as bus:
        while True:
            fragments = len(run.layout.fragments)
            bodies = [announcement(run, learner, (number + i) % fragments, number + i) for i in range(BATCH)]
            await bus.append(learner_stream(learner), *bodies)
            number += BATCH
            await asyncio.sleep(PAUSE_S)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
