"""What a learner's predecessors of the same name left behind: read from its own updates in the store, at start only."""

import asyncio
from dataclasses import dataclass

from isthmus.bus import START, Bus
from isthmus.errors import ObjectMissing, RecordInvalid
from isthmus.log import Log
from isthmus.records import frame
from isthmus.records.messages import Announce, Heartbeat, Progress, decode, learner_stream
from isthmus.records.objects import UpdateHeader, updates_prefix

_READS = 8


@dataclass(slots=True)
class History:
    """Where to go on, and what was lost on the way here."""

    step: int = 0
    """Own steps that some stored update holds: training goes on after this one."""
    tokens_seen: int = 0
    last_step: int = 0
    """The last step a predecessor was heard of: those after `step` are lost."""
    last_tokens: int = 0

    @property
    def tokens_lost(self) -> int:
        """Tokens of the steps heard of that no stored update holds."""
        return max(0, self.last_tokens - self.tokens_seen)


async def read_history(log: Log, bus: Bus, learner: str) -> History:
    """Return what is known of earlier incarnations. A missing or damaged update counts as not there."""
    gate = asyncio.Semaphore(_READS)

    async def newest(fragment: int) -> UpdateHeader | None:
        async with gate:
            entries = await log.store.list(updates_prefix(fragment, learner))
            # Keys sort by base; of several updates on the newest base the longest way counts.
            base = max((e.key.rsplit("/", 1)[1].split("-")[0] for e in entries), default=None)
            best = None
            for entry in entries:
                if not entry.key.rsplit("/", 1)[1].startswith(f"{base}-"):
                    continue
                try:
                    blob = await log.store.get_range(entry.key, 0, frame.largest(frame.Kind.UPDATE, 0))
                    header = frame.parse_head(blob, frame.Kind.UPDATE, UpdateHeader)
                except (ObjectMissing, RecordInvalid):
                    continue
                if header.run == log.run.digest and (best is None or header.step > best.step):
                    best = header
            return best

    found = await asyncio.gather(*(newest(f.index) for f in log.run.layout.fragments))
    headers = [h for h in found if h is not None]
    last = max(headers, key=lambda h: h.step, default=None)
    history = History()
    if last is not None:
        history.step, history.tokens_seen = last.step, last.tokens_seen
    history.last_step, history.last_tokens = history.step, history.tokens_seen
    # Only the newest predecessor's last word: what those before it lost, it has already reported.
    position, stream, newest_heard = START, learner_stream(learner), -1
    while said := (await bus.read({stream: position}, 0.0)).get(stream):
        position = said[-1].position
        for item in said:
            try:
                message = decode(item.body)
            except RecordInvalid:
                continue
            if not isinstance(message, Announce | Heartbeat | Progress) or message.run != log.run.digest:
                continue
            if message.incarnation < newest_heard:
                continue
            if message.incarnation > newest_heard:
                newest_heard = message.incarnation
                history.last_step, history.last_tokens = history.step, history.tokens_seen
            history.last_step = max(history.last_step, message.step)
            history.last_tokens = max(history.last_tokens, message.tokens_seen)
    return history
