"""One line about a learner's work in a run: logged when the learner leaves, and available to other code."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.format.records.messages import PARTS, Tally
from isthmus.reasons import FEW_VERSIONS, LATE_WORK, REMEDIES, Reason

MUCH_UNANSWERED = 0.1
"""Share of a learner's tokens, sent and not answered, from which on its end is a warning."""

MUCH_LOST = 0.01
"""Share of a learner's tokens, not merged and in no checkpoint, from which on its end is a warning."""

GOES_ON = (
    "that goes on when this learner comes back (if the others have merged newer versions by then, it is overwritten)"
)

MUCH_REJECTED = 0.05
"""Share of a learner's tokens, rejected, from which on the summary says what that is."""

NEWEST_REJECTED = 0.1
"""The same from which on a rejection of the newest update is a warning."""

REJECTED = "sent after a version had a shorter update of them, or in an update that was rejected"

MUCH_LATE = 0.5
"""Share of a learner's tokens that came too late to be merged, from which on the summary says so alone."""

MUCH_OVERWRITTEN = 0.5
"""Share of a learner's tokens, overwritten by versions, from which on the summary says what to change. Less costs
little: in the lab, runs that overwrote 38 % ended no worse than those that carried local work on."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One learner's work up to now."""

    learner: str
    run: str
    """The URL of the run."""
    steps: int
    """Optimizer steps of this incarnation."""
    steps_done: int
    """Optimizer steps of all incarnations."""
    seconds: float
    """How long this incarnation has run."""
    versions: Sequence[int]
    """The version of each fragment of the model."""
    ledger: Tally
    """Where the tokens of all incarnations went. `processed` is their sum."""
    loss: float | None
    """The loss of the last step, or None if that step was given none."""
    trouble: str
    """What keeps the learner's work from being merged now, or empty."""
    expelled: str = ""
    """By which version of the membership the learner was expelled, or got another key; empty if neither."""
    rejected_for: str = ""
    """For what the newest update was rejected since one was merged, or empty."""
    unanswered: float = 0.0
    """The part of the ledger's `pending` tokens that was sent and that no commit has settled."""
    kept_to: int | None = None
    """The step of its newest checkpoint, after which a restart goes on; None: as many as `steps_done`."""
    bus: str = ""
    """The URL of its bus, for commands to copy."""
    risen: tuple[float, float] | None = None
    """The loss before it rose and that of the last steps, if it has risen and not come down again."""
    processed_before: float = 0.0
    """The tokens that earlier incarnations processed, which are in the ledger."""

    uncounted: int = 0
    """Steps of its optimizer since the last call of `link.step`: nothing of them is sent."""
    first_after: int = 0
    """After so many steps its first update is sent, if none was sent or is on its way; 0: some were."""
    never_stepped: bool = False
    """Whether the optimizer that its loop handed over has made no step, although `link.step` was called."""

    @property
    def never_merged(self) -> bool:
        """Whether the learner has trained and, as far as it knows, no commit has merged any of its work."""
        return (self.ledger.processed > 0 or self.uncounted > 1) and not self.ledger.merged

    @property
    def much_unanswered(self) -> bool:
        """Whether much of this incarnation's work was sent, and no commit has answered it."""
        return self.unanswered >= MUCH_UNANSWERED * max(self.ledger.processed - self.processed_before, 1.0)

    @property
    def unkept(self) -> int:
        """Steps of this learner that are in no checkpoint: what of them was not merged is lost."""
        return 0 if self.kept_to is None else max(0, self.steps_done - self.kept_to)

    @property
    def stands_out(self) -> bool:
        """Whether somebody has to look at this: work is lost, or not in the model, or was not worth anything."""
        lost = self.unkept > 0 and self.ledger.pending >= MUCH_LOST * max(self.ledger.processed, 1.0)
        bad = self.diverged or self.risen is not None or bool(self._rejected) or self.never_stepped
        return self.never_merged or bad or self.much_unanswered or lost

    @property
    def _rejected(self) -> str:
        """Why much of the learner's work was rejected, and what to do; empty if an update was merged since."""
        if not self.rejected_for or self.ledger.rejected < NEWEST_REJECTED * max(self.ledger.processed, 1.0):
            return ""
        reason = Reason(self.rejected_for)
        return f"its newest update was rejected ({reason}: {reason.means}); {REMEDIES[reason]}"

    @property
    def diverged(self) -> bool:
        """Whether the learner's last loss was a NaN or an infinity."""
        return self.loss is not None and not math.isfinite(self.loss)

    def __str__(self) -> str:
        """Return steps, versions, where the tokens went and where the model is."""
        low, high = min(self.versions, default=0), max(self.versions, default=0)
        versions = f"version {low}" if low == high else f"versions {low} to {high}"
        known = f", {self.steps_done:,} over all its incarnations" if self.steps_done != self.steps else ""
        line = f"{self.learner}: {self.steps:,} steps in {_lasted(self.seconds)}{known}; its model is at {versions}"
        if self.diverged:
            line += (
                f"; ITS LAST LOSS IS {self.loss}: nothing it learns from there is sent; start it again with clipped "
                "gradients or a lower learning rate (hyperparameters='passed', or it goes on with that of its "
                f"checkpoint): it goes on after step {self.steps_done - self.unkept}"
            )
        elif self.risen is not None:
            line += f"; {rose(*self.risen)}"
        if self.never_stepped:
            line += "; THE OPTIMIZER THAT JOIN WAS GIVEN NEVER STEPPED: a restart lacks the moments of one that does"
        if self.never_merged:
            if self.expelled:
                return f"{line}; NONE OF ITS WORK WAS MERGED, nor will it be: {self.expelled}"
            if not self.ledger.processed:
                return (
                    f"{line}; NONE OF ITS WORK WAS MERGED: its optimizer made {self.uncounted:,} steps, and link.step "
                    "was never called; call link.step(tokens=…) after each step of the optimizer"
                )
            if self.ledger.late >= MUCH_LATE * self.ledger.processed:
                return (
                    f"{line}; NONE OF ITS WORK WAS MERGED: {self.ledger.late / self.ledger.processed:.0%} of its "
                    "tokens came after the run had gone on without it, and are lost; what it trains from now on is "
                    "merged"
                )
            if self._rejected:
                return f"{line}; NONE OF ITS WORK WAS MERGED: {self._rejected}"
            if self.steps_done < self.first_after:
                return (
                    f"{line}; NONE OF ITS WORK WAS MERGED: its first update would have been sent after "
                    f"{self.first_after:,} steps: train longer, or create a run of a smaller --sync-every (sync_every)"
                )
            why = f": {self.trouble}" if self.trouble else ""
            # A bus that does not answer may be the wrong one.
            bus = f" --bus {self.bus}" if self.bus and "the bus does not answer" not in self.trouble else ""
            return (
                f"{line}; NONE OF ITS WORK WAS MERGED before it left{why}. What it learnt is not in the run: start it "
                "and the others again on the syncers' bus, with close(wait=600) or --wait-at-end 600, and then a "
                f"syncer if none runs (`isthmus status {self.run}{bus}` shows which processes are live)"
            )
        whole = max(self.ledger.processed, 1.0)
        known_as = {"rejected": f"rejected ({REJECTED})"} if self.ledger.rejected >= MUCH_REJECTED * whole else {}
        parts = [(known_as.get(part, part), getattr(self.ledger, part) / whole) for part in PARTS if part != "pending"]
        parts.append((f"sent and not answered ({self.trouble or 'its rounds were open'})", self.unanswered / whole))
        parts.append(("trained since it was last sent", (self.ledger.pending - self.unanswered) / whole))
        shares = ", ".join(f"{share:.0%} {part}" for part, share in parts if part == "merged" or share >= 0.005)
        more = f": {GOES_ON}" if self.ledger.pending / whole >= 0.005 else ""
        if more and self.unkept:
            more = (
                f"; OF WHAT WAS NOT MERGED, ALL AFTER STEP {self.steps_done - self.unkept} IS LOST: no checkpoint of "
                "later steps was stored"
            )
        if self.expelled:
            more = f"; {self.expelled}: WHAT WAS NOT MERGED BEFORE THAT IS NOT IN THE MODEL, and is not merged later"
        elif self.much_unanswered:
            kept = more if self.unkept else ""
            more = kept + (
                f"; WHAT WAS NOT ANSWERED IS NOT IN THE MODEL: start this learner and the others again soon, with "
                f"close(wait=600) or --wait-at-end 600, and then a syncer; {LATE_WORK} (`isthmus explain {self.run} "
                "FRAGMENT/VERSION` says for how much)"
            )
        if self._rejected:
            more += f"; {self._rejected}"
        if high < FEW_VERSIONS:
            more += (
                "; so few versions say little about merging (the first ones overshoot): judge the run's model once its "
                f"fragments were merged {FEW_VERSIONS} times or more"
            )
        if self.ledger.overwritten / whole >= MUCH_OVERWRITTEN:
            more += (
                "; versions overwrite much, as they come many steps after the work they contain: keep it with "
                "join(adopt='carry') or --adopt carry, or create the next run with a larger sync_every"
            )
        tokens = f"{self.ledger.processed:,.0f} tokens{' (of all its incarnations)' if self.processed_before else ''}"
        return f"{line}; of its {tokens} {shares}{more}; the model: isthmus export {self.run} -o model.safetensors"


def rose(before: float, now: float) -> str:
    """Return that a learner's loss has risen, and what to do."""
    return (
        f"THE LOSS ROSE from {before:.4g} to {now:.4g}, and what is learnt there is merged with the others' work: look "
        "at the data, or start this learner again with a lower learning rate (hyperparameters='passed')"
    )


def _lasted(seconds: float) -> str:
    if seconds < 120.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 7200.0 else f"{seconds / 3600.0:.1f} h"
