"""Detect whether the store shows every process the same log, by comparing the digests of the commits that they read.

No two commits can be created under one key, but a store could return one commit to one process and another commit to
the next. Each process therefore states in signed messages which commits it has read, and a fork becomes visible.
"""

import logging
from collections.abc import Callable

from isthmus.format.records.keys import commit_key

logger = logging.getLogger(__name__)

KEPT = 64
"""Newest versions of a fragment whose digests are kept: messages are about commits that were read recently."""

KEPT_EACH = 8
"""Statements kept per author about versions not yet known here. Each author has its own, so none displaces
another's."""

AUTHORS_MAX = 4096

UNSAID = bytes(32)


class ForkDetection:
    """Compares, for one fragment, the commits that were read here with those that other processes say they read."""

    def __init__(self, fragment: int, found: Callable[[], None]) -> None:
        """`found` is called for each version of which two different commits are known."""
        self._fragment = fragment
        self._found = found
        self._here: dict[int, bytes] = {}
        self._said: dict[str, dict[int, bytes]] = {}
        """By author: the digests that it stated, by version. Only versions that are not known here yet."""
        self._told: set[int] = set()

    def know(self, version: int, digest: bytes) -> None:
        """Note a commit that was read or written here."""
        self._here[version] = digest
        _forget(self._here, KEPT)
        for by, words in self._said.items():
            if (said := words.pop(version, digest)) != digest:
                self._tell(version, said, by)

    def contradicts(self, version: int, digest: bytes, by: str) -> bool:
        """Note the commit that an author says it has read; return whether it contradicts the commit known here."""
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
            "%s is commit %s here, and %s says that it read %s there: the store shows two histories, or %s reports a "
            "false digest; stop merging and compare the two objects",
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
