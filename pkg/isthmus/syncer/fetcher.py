"""Fetching announced updates: reads an update from the store and checks it. Its author is not trusted."""

import asyncio
import logging
from dataclasses import replace

from isthmus.codecs.base import PIECE
from isthmus.errors import Denied, ObjectMissing, RecordInvalid, Unavailable
from isthmus.format.layout import Fragment
from isthmus.format.records.keys import RUN_KEY
from isthmus.log import Log
from isthmus.log.manifests import Manifests, are_required, require
from isthmus.log.updates import Update, verify_update
from isthmus.reasons import Reason
from isthmus.rounds.events import Pointer
from isthmus.runtime.clock import Runtime, SmallWork
from isthmus.store import Store, checked
from isthmus.syncer.fairness import FairSlots

logger = logging.getLogger(__name__)

FETCH_S, FETCH_BYTES_S = 30.0, 1 << 20
"""The time limit of fetching an update: these seconds, and a second more for so many bytes. Bodies may be slow, or
never end."""


class Fetcher:
    """Fetches the updates of one fragment."""

    def __init__(
        self, log: Log, store: Store, fragment: Fragment, runtime: Runtime, slots: FairSlots, manifests: Manifests
    ) -> None:
        """`store`: where updates are read. `slots` and `manifests` are shared by all fragments."""
        self._log = log
        self._store = store
        self._fragment = fragment
        self._runtime = runtime
        self._slots = slots
        self._manifests = manifests
        self._compute = SmallWork(runtime, small=fragment.size <= PIECE)

    async def fetch(self, pointer: Pointer) -> tuple[Update | None, Reason | None]:
        """Return the update, or the reason why it is rejected; neither if it cannot be read for now.

        The caller holds a slot of the learner until the result was handled.
        """
        try:
            async with asyncio.timeout(FETCH_S + pointer.size / FETCH_BYTES_S):
                # Read at most one byte more than announced: a larger object is noticed, and never read whole.
                blob = await checked.read(self._store, self._runtime, pointer.key, pointer.size + 1, cut=True)
            self._slots.judge(pointer.learner, slow=False)
            if len(blob) != pointer.size:
                return None, Reason.OVERSIZED if len(blob) > pointer.size else Reason.TRUNCATED
            update = await self._compute(
                verify_update,
                self._log.verifier,
                blob,
                pointer.key,
                pointer.digest,
                self._fragment,
                pointer.learner,
                pointer.base,
                self._runtime.compute,
                self._log.members.current.version,
            )
            if (update.header.steps, update.header.tokens) != (pointer.steps, pointer.tokens):
                return None, Reason.MALFORMED
            return await self._with_manifest(update), None
        except ObjectMissing:
            return None, Reason.MISSING
        except RecordInvalid as error:
            self._warn("rejected: %s", pointer, error)
            return None, error.reason
        except Denied as error:
            self._warn("may not be read: %s", pointer, error)
            if not await self._is_refused():
                # Only this object is denied: it may belong to another account, use another key, or be archived.
                return None, Reason.UNREADABLE
        except TimeoutError as error:
            self._slots.judge(pointer.learner, slow=True)
            self._warn("takes too long%s", pointer, error)
        except Unavailable as error:
            self._warn("cannot be fetched for now: %s", pointer, error)
        return None, None

    async def _with_manifest(self, update: Update) -> Update:
        """Return an update with its manifest, if the charter asks for one. Raises `RecordInvalid` if it may not be
        merged with that manifest."""
        judge, h = self._log.members.current, update.header
        if are_required(judge) and h.manifest is not None:
            async with asyncio.timeout(FETCH_S):
                update = replace(update, manifest=await self._manifests.of(h.learner, h.manifest))
        require(judge, h.learner, h.manifest, update.manifest)
        return update

    async def _is_refused(self) -> bool:
        """Return whether the store denies this syncer everything, not just one object: then the run object is denied
        too."""
        try:
            await self._log.store.get_range(RUN_KEY, 0, 1)
        except (Unavailable, Denied):
            return True
        return False

    def _warn(self, text: str, pointer: Pointer, error: Exception) -> None:
        about = {"fragment": self._fragment.index, "learner": pointer.learner}
        text = f"fragment %d: %s of %s {text}"
        logger.warning(text, self._fragment.index, pointer.key, pointer.learner, error, extra=about)
