"""Where every token went, per fragment: processed = merged + overwritten + late + pending + rejected + lost.

Tokens are local until an update holds them, then sent until a commit settles their base: once, whatever is uploaded
on that base afterwards.
"""

from dataclasses import dataclass, field, replace

from isthmus.format.records.messages import PARTS, Tally


@dataclass(slots=True)
class Account:
    """One fragment's tokens at one learner, over all its incarnations."""

    merged: int = 0
    overwritten: int = 0
    """Trained after the upload, and replaced by the new global version."""
    late: int = 0
    """Sent, but no round took it before its base was too old."""
    rejected: int = 0
    lost: int = 0
    """Trained after the checkpoint that a later incarnation went on from, and not merged: trained again."""
    local: int = 0
    """Trained and in no update; the boundary knows."""
    sent: dict[int, int] = field(default_factory=dict)
    """Tokens of the longest update on each base whose fate is open."""
    settled: dict[int, int] = field(default_factory=dict)
    """Tokens already accounted for on bases whose fate is known."""
    given_up: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of those that were not merged, what is counted as late and as rejected: another incarnation may have sent more
    on them, and a commit merge that."""

    @property
    def pending(self) -> int:
        """Tokens whose fate is open."""
        return self.local + sum(self.sent.values())

    @property
    def processed(self) -> int:
        """The sum of the parts."""
        return sum(getattr(self, part) for part in PARTS)

    def copy(self) -> "Account":
        """Return one that can change without this one."""
        return replace(self, sent=dict(self.sent), settled=dict(self.settled), given_up=dict(self.given_up))

    def send(self, base: int, tokens: int) -> bool:
        """Note an update of `tokens` on a base; False where that base is settled and the rest of it is turned away."""
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
        """Take back an update that was never stored; `before`: the tokens of an earlier one on the base, if any."""
        if before is None:
            self.sent.pop(base, None)
        else:
            self.sent[base] = before

    def settle(self, base: int, part: str, tokens: int | None = None) -> int:
        """Close a base: `tokens` of what was sent on it (None: all) are `part`, the rest is rejected.

        What was merged beyond what this incarnation knows it sent was trained by an incarnation before it, after the
        checkpoint this one went on from: it was taken for lost, and was not. Returns how much of it nobody knew of.
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
        """Return the tokens on a base that are sent or settled."""
        return self.sent.get(base, self.settled.get(base, 0))

    def forget(self, before: int) -> None:
        """Drop the memory of bases below a version: nothing can come of them any more."""
        for base in [b for b in self.settled if b < before]:
            del self.settled[base]
            self.given_up.pop(base, None)


def weigh(accounts: list[Account], shares: list[float], processed: int) -> Tally:
    """Return a learner's ledger: the fragments' accounts weighted by their shares of the parameters."""

    def total(part: str) -> float:
        return sum(share * float(getattr(account, part)) for account, share in zip(accounts, shares, strict=True))

    return Tally(processed=float(processed), **{part: total(part) for part in PARTS})
