"""Where every token went, per fragment: processed = merged + overwritten + late + pending + rejected + lost.

Tokens are local until an update holds them. They then count as sent until a commit settles their base. A base is
settled once, whatever is uploaded on it afterwards.
"""

from dataclasses import dataclass, field, replace

from isthmus.format.records.messages import PARTS, Tally


@dataclass(slots=True)
class Account:
    """One fragment's tokens at one learner, over all its incarnations."""

    merged: int = 0
    overwritten: int = 0
    """Trained after the upload, then replaced by the new global version."""
    late: int = 0
    """Sent, but not merged before their base was too old."""
    rejected: int = 0
    lost: int = 0
    """Trained after the checkpoint from which a later incarnation resumed, and not merged. They are trained again."""
    local: int = 0
    """Trained and not yet in an update. The boundary keeps this count."""
    sent: dict[int, int] = field(default_factory=dict)
    """By base that is not settled: tokens of the longest update on it."""
    settled: dict[int, int] = field(default_factory=dict)
    """By settled base: tokens already accounted for."""
    given_up: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By settled base without a merge: the tokens counted as late and as rejected. A commit may still merge a longer
    update that another incarnation sent on the base."""

    @property
    def pending(self) -> int:
        """Tokens that are not settled yet."""
        return self.local + sum(self.sent.values())

    @property
    def processed(self) -> int:
        """The sum of the other counts."""
        return sum(getattr(self, part) for part in PARTS)

    def copy(self) -> "Account":
        """Return an independent copy."""
        return replace(self, sent=dict(self.sent), settled=dict(self.settled), given_up=dict(self.given_up))

    def send(self, base: int, tokens: int) -> bool:
        """Count an update of `tokens` on a base. If the base is settled, reject the extra tokens and return False."""
        if base in self.settled:
            more = tokens - self.settled[base]
            self.rejected += more
            self.settled[base] = tokens
            if base in self.given_up:
                late, rejected = self.given_up[base]
                self.given_up[base] = late, rejected + more
            return False
        self.sent[base] = tokens
        return True

    def unsend(self, base: int, before: int | None) -> None:
        """Take back an update that was never stored. `before`: the tokens of an earlier update on the base, if any."""
        if before is None:
            self.sent.pop(base, None)
        else:
            self.sent[base] = before

    def settle(self, base: int, part: str, tokens: int | None = None) -> int:
        """Settle a base: `tokens` of those sent on it (None: all) count as `part`, the rest as rejected.

        A commit may have merged more than this incarnation knows to be sent. An earlier incarnation trained those
        tokens after the checkpoint from which this incarnation resumed, so they were counted as lost. They move from
        lost to merged. Return how many of the extra tokens were not in the lost count either.
        """
        if part != "merged" and (base in self.settled or base not in self.sent):
            return 0
        if base in self.settled and base not in self.given_up:
            return 0
        late, rejected = self.given_up.pop(base, (0, 0))
        self.late -= late
        self.rejected -= rejected
        total = self.sent.pop(base, 0) + late + rejected
        share = total if tokens is None else min(tokens, total)
        beyond = max(0, (tokens or 0) - share) if part == "merged" else 0
        found = min(beyond, self.lost)
        self.settled[base] = total
        setattr(self, part, getattr(self, part) + share)
        self.rejected += total - share
        if part != "merged":
            self.given_up[base] = (share, total - share) if part == "late" else (0, total)
        self.merged += found
        self.lost -= found
        return beyond - found

    def known(self, base: int) -> int:
        """Return how many tokens on a base are sent or settled."""
        return self.sent.get(base, self.settled.get(base, 0))

    def forget(self, before: int) -> None:
        """Drop the settled bases below a version: no commit can change their counts any more."""
        for base in [b for b in self.settled if b < before]:
            del self.settled[base]
            self.given_up.pop(base, None)


def weigh(accounts: list[Account], shares: list[float], processed: int) -> Tally:
    """Return a learner's ledger: the accounts of its fragments, weighted by their shares of the parameters."""

    def total(part: str) -> float:
        return sum(share * float(getattr(account, part)) for account, share in zip(accounts, shares, strict=True))

    return Tally(processed=float(processed), **{part: total(part) for part in PARTS})
