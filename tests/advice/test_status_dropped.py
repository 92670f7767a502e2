"""What `isthmus status` says of a syncer that cannot keep up with the messages on the bus."""

from pathlib import Path

import msgspec
import pytest

from advice.followed import advises, isthmus, mine, says
from advice.lives import FEW
from advice.rows import row
from isthmus.format.records.messages import Progress, encode, learner_stream
from isthmus.syncer import agent as syncer_agent
from isthmus.syncer import limits
from support.world import serving, until, world


@row(
    "status",
    "syncer … dropped messages because its queue was full: …; they are sent again",
    means="More messages of one learner waited than the syncer keeps, so that the oldest were dropped. The syncer's machine is "
    "too slow for its learners, or this learner floods the bus.",
    like="For a minute, a syncer that was just started, or whose machine slept.",
    do="if this goes on for minutes, give this syncer a faster machine, or start one more",
    then="The sentence goes away a minute after the last message was dropped.",
)
async def test_a_syncer_that_cannot_keep_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here,) = mine(test_a_syncer_that_cannot_keep_up)
    monkeypatch.setattr(syncer_agent, "HEARD_EACH", 4)
    monkeypatch.setattr(limits, "DROPPED_S", 2.0)
    async with world(folder, FEW) as w, serving(w.syncer("s1")) as syncer:
        status = ("status", w.run.url, "--bus", w.bus.url)
        assert not says(here, (await isthmus(*status))[1])
        said = Progress(run=w.run.digest, id="x", learner="a", incarnation=1, step=1, tokens_seen=1)
        while not syncer.tallies.dropped:
            for number in range(64):
                await w.bus.append(learner_stream("a"), encode(msgspec.structs.replace(said, id=str(number))))
        told = ""
        while not says(here, told):
            _, told = await isthmus(*status)
        advises(here, told)
        await until(lambda: not syncer.tallies.lately_dropped(w.runtime.now()), "nothing is dropped any more")
        while says(here, told):
            _, told = await isthmus(*status)
