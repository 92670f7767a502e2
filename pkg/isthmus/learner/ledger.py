"""Where every token went, per fragment: processed = merged + overwritten + late + pending + rejected + lost."""

from dataclasses import dataclass

from isthmus.records.messages import Tally


@dataclass(slots=True)
class Account:
    """One fragment's tokens at one learner, since its incarnation began (and what its predecessor lost)."""

    merged: int = 0
    overwritten: int = 0
    """Trained after the upload, and replaced by the new global version."""
    late: int = 0
    """Uploaded, but no round took it before its base was too old."""
    rejected: int = 0
    lost: int = 0
    """Trained by a predecessor that was killed before it uploaded them."""
    uploaded: int = 0
    """Uploaded and not settled by any commit."""
    local: int = 0
    """Trained and not uploaded."""

    @property
    def pending(self) -> int:
        """Tokens whose fate is open."""
        return self.uploaded + self.local

    @property
    def processed(self) -> int:
        """The sum of the parts."""
        return self.merged + self.overwritten + self.late + self.pending + self.rejected + self.lost


def weigh(accounts: list[Account], shares: list[float], processed: int) -> Tally:
    """Return a learner's ledger: the fragments' accounts weighted by their shares of the parameters."""

    def total(field: str) -> float:
        return sum(share * float(getattr(account, field)) for account, share in zip(accounts, shares, strict=True))

    return Tally(
        processed=float(processed),
        **{f: total(f) for f in ("merged", "overwritten", "late", "pending", "rejected", "lost")},
    )
