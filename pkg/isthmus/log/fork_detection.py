"""Whether all are shown the same log: the digests of commits as they are here, beside those that others say they read.

A store could show one participant one commit under a key and another one to the next, as no two can be created there.
Whoever says which commits it has read, in words that it signs, makes that show.
"""

import logging
from collections.abc import Callable

from isthmus.format.records.keys import commit_key

logger = logging.getLogger(__name__)

KEPT = 64
"""Newest versions of a fragment whose digests are kept: words are of what was read last."""

KEPT_EACH = 8
"""Words of one author about versions that are not known here yet: nobody's push out another's."""

AUTHORS_MAX = 4096

UNSAID = bytes(32)


class ForkDetection:
    """Of one fragment: which commits there are here, and which ones others say there are."""

    def __init__(self, fragment: int, found: Callable[[], None]) -> None:
        """`found` is called for each version of which two commits are known."""
        self._fragment = fragment
        self._found = found
        self._here: dict[int, bytes] = {}
        self._said: dict[str, dict[int, bytes]] = {}
        """By author."""
        self._told: set[int] = set()

    def know(self, version: int, digest: bytes) -> None:
        """Note a commit that was read, or written, here."""
        self._here[version] = digest
        _forget(self._here, KEPT)
        for by, words in self._said.items():
            if (said := words.pop(version, digest)) != digest:
                self._tell(version, said, by)

    def said(self, version: int, digest: bytes, by: str) -> bool:
        """Note which commit somebody says it has read; return whether it is another than the one here."""
        if digest == UNSAID:
            return False
        known = self._here.get(version)
        if known is None:
            if version > max(self._here, default=0):
                if by not in self._said and len(self._said) == AUTHORS_MAX:
                    return False
                words = self._said.setdefault(by, {})
                words.setdefault(version, digest)
                _forget(words, KEPT_EACH)
            return False
        if known != digest:
            self._tell(version, digest, by)
        return known != digest

    def _tell(self, version: int, digest: bytes, by: str) -> None:
        if version in self._told:
            return
        self._told = {version, *sorted(self._told)[-KEPT:]}
        self._found()
        logger.error(
            "%s is commit %s here, and %s says that it read %s there: the store shows two histories, or %s does not "
            "say the truth; compare the object with theirs before anything is merged on",
            commit_key(self._fragment, version),
            self._here[version].hex()[:16],
            by,
            digest.hex()[:16],
            by,
            extra={"fragment": self._fragment, "version": version},
        )


def _forget(of: dict[int, bytes], kept: int) -> None:
    while len(of) > kept:
        del of[min(of)]
