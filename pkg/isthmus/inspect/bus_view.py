"""The state of a run as its bus messages show it: learners, syncers, open rounds. Pure, no I/O."""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from isthmus.bus.base import BusItem
from isthmus.errors import RecordInvalid
from isthmus.format.records.messages import (
    Alive,
    Announce,
    AnyMessage,
    Call,
    Committed,
    Heartbeat,
    Leave,
    Pass,
    Progress,
    learner_of,
)
from isthmus.log.bus_messages import verify_batch
from isthmus.log.expulsions import expulsions
from isthmus.log.membership import Members
from isthmus.reasons import Reason


class Traffic(NamedTuple):
    """What a learner has moved [bytes]."""

    up: int = 0
    down: int = 0
    checkpoints: int = 0
    """What was sent of checkpoints, which is not in `up`."""


@dataclass(slots=True)
class LearnerView:
    """A learner, as its messages show it."""

    name: str
    incarnation: int = 0
    step: int = 0
    heartbeat: Heartbeat | None = None
    oldest: Heartbeat | None = None
    """The oldest heartbeat that was heard, of whatever incarnation; a ledger is one over all of them."""
    earlier: Traffic = field(default_factory=Traffic)
    """What earlier incarnations moved, as far as their heartbeats were heard."""
    left: Leave | None = None
    heard_at: float | None = None
    """When a message of the learner was last received live, on the reader's clock; None if never."""

    @property
    def traffic(self) -> Traffic:
        """What all its incarnations moved, as far as their heartbeats were heard."""
        beat, earlier = self.heartbeat, self.earlier
        if beat is None:
            return earlier
        up = beat.bytes_up - beat.checkpoint_bytes
        return Traffic(earlier.up + up, earlier.down + beat.bytes_down, earlier.checkpoints + beat.checkpoint_bytes)


def moved(views: Iterable[LearnerView]) -> Traffic:
    """Return what all these learners moved: the figures of the run that demo, status and board show."""
    each = [view.traffic for view in views]
    return Traffic(sum(t.up for t in each), sum(t.down for t in each), sum(t.checkpoints for t in each))


@dataclass(slots=True)
class OpenRound:
    """A round that was called and is not committed yet, as far as the messages show."""

    version: int
    answered: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)


class Outdated(NamedTuple):
    """A learner whose last words are signed with a key that was its own before."""

    at: float | None
    """When a batch with the old key was last received live, on the reader's clock; None: before the reader listened."""
    key: bytes
    """The old public key [32 bytes]."""
    replaced_by: int
    """The version of the membership that gives the learner another key."""


@dataclass(slots=True)
class BusView:
    """The state of a run that its messages show. Pass every message of the run to `take`."""

    run: bytes
    """Digest of the run."""
    members: Members | None = None
    """The membership that authors of messages are checked against; None: only the stream is checked."""
    learners: dict[str, LearnerView] = field(default_factory=dict)
    syncers: dict[str, Alive] = field(default_factory=dict)
    syncers_heard: dict[str, float] = field(default_factory=dict)
    """When a message of each syncer was last received live, on the reader's clock."""
    strangers: dict[str, float] = field(default_factory=dict)
    """By learner that is no member: when a batch was last received live on its stream, on the reader's clock."""
    outdated: dict[str, Outdated] = field(default_factory=dict)
    """By learner: the last batch that one of its processes signed with a key that the owner has replaced."""
    heads: dict[int, int] = field(default_factory=dict)
    announced: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By fragment: the newest version whose commit was announced live, and when, on the reader's clock."""
    rounds: dict[int, OpenRound] = field(default_factory=dict)
    invalid: Counter[str] = field(default_factory=Counter)

    def take(self, stream: str, said: BusItem, at: float | None) -> None:
        """Note the messages of a batch.

        `at`: when it was received. None: it was sent before the reader listened, and does not prove that its author is
        alive. What an expelled learner said before that still counts: its work is part of the run.
        """
        if not said.body:
            return
        try:
            under = self._member_until(learner_of(stream)) if at is None else None
            messages = verify_batch(stream, said.body, self.run, self.members, under)
        except RecordInvalid as error:
            if error.reason != Reason.WRONG_RUN:
                self.invalid[error.reason.value] += 1
            learner = learner_of(stream)
            # Without a check of the name, anyone who can write to the bus could report any member here.
            if learner and self.members and self.members.current.member(learner) is not None:
                if found := self._outdated(self.members, stream, learner, said.body, at):
                    self.outdated[learner] = found
            elif learner and self.members and at is not None:
                self.strangers[learner] = at
            return
        if (learner := learner_of(stream)) in self.outdated and self.outdated[learner].at is None:
            del self.outdated[learner]
        for message in messages:
            self._note(message, at)

    def _outdated(self, members: Members, stream: str, learner: str, body: bytes, at: float | None) -> Outdated | None:
        """Return whose batch this is if a key signed it that an earlier membership has for the learner; else None."""
        keys = {m.key: v.version for v in members.versions if (m := v.member(learner))}
        for key, version in keys.items():
            with suppress(RecordInvalid):
                verify_batch(stream, body, self.run, members, version)
                return Outdated(at, key, version + 1)
        return None

    def _member_until(self, learner: str | None) -> int | None:
        """Return the last version of the membership that named a learner that is expelled; None for any other one."""
        gone = expulsions(self.members, [learner]) if self.members is not None and learner else []
        return gone[0].version - 1 if gone else None

    def _note(self, message: AnyMessage, at: float | None) -> None:
        match message:
            case Alive():
                if self.members is not None:
                    self.members.said(message.members, message.syncer)
                self.syncers[message.syncer] = message
                if at is not None:
                    self.syncers_heard[message.syncer] = at
                for p, version in enumerate(message.heads):
                    self._committed(p, version)
            case Committed():
                if at is not None and message.version > self.heads.get(message.fragment, 0):
                    self.announced[message.fragment] = (message.version, at)
                self._committed(message.fragment, message.version)
            case Call():
                known = self.rounds.get(message.fragment)
                if message.version > max(self.heads.get(message.fragment, 0), known.version if known else 0):
                    self.rounds[message.fragment] = OpenRound(message.version)
            case Heartbeat() | Progress() | Announce() | Leave() | Pass():
                members = self.members
                if isinstance(message, Heartbeat) and members and members.current.member(message.learner) is not None:
                    members.said(message.members, message.learner)
                self._learner(message, at)

    def waited_for(self, fragment: int, live: set[str]) -> set[str]:
        """Return which of these learners have neither answered the open round of a fragment nor passed."""
        open_round = self.rounds.get(fragment)
        return live - open_round.answered - open_round.passed if open_round else set()

    def live(self, since: float) -> set[str]:
        """Return the learners that were heard at `since` or later and have not left."""
        return {
            v.name for v in self.learners.values() if v.left is None and v.heard_at is not None and v.heard_at >= since
        }

    def _committed(self, fragment: int, version: int) -> None:
        self.heads[fragment] = max(version, self.heads.get(fragment, 0))
        known = self.rounds.get(fragment)
        if known is not None and known.version <= version:
            del self.rounds[fragment]

    def _learner(self, message: Heartbeat | Progress | Announce | Leave | Pass, at: float | None) -> None:
        view = self.learners.setdefault(message.learner, LearnerView(message.learner))
        if isinstance(message, Announce | Pass):
            self._answer(message)
        if isinstance(message, Pass) or message.incarnation < view.incarnation:
            return
        if message.incarnation > view.incarnation:
            view.incarnation, view.left, view.step = message.incarnation, None, 0
        if not isinstance(message, Announce):  # the update may be one of an earlier incarnation, with the step of that
            view.step = max(view.step, message.step)
        view.heard_at = view.heard_at if at is None else at
        if isinstance(message, Heartbeat):
            if view.heartbeat is not None and view.heartbeat.incarnation < message.incarnation:
                view.earlier = view.traffic
            view.heartbeat, view.oldest = message, view.oldest or message
        elif isinstance(message, Leave):
            view.left = message

    def _answer(self, message: Announce | Pass) -> None:
        open_round = self.rounds.get(message.fragment)
        if open_round is None:
            return
        if isinstance(message, Pass):
            if message.version == open_round.version:
                open_round.passed.add(message.learner)
        elif message.base == open_round.version - 1:
            open_round.answered.add(message.learner)
