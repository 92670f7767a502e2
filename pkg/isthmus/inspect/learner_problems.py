"""The problems of a run that its learners make, each with what to do. No I/O."""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from isthmus.format.records.messages import Heartbeat
from isthmus.format.records.objects import Input
from isthmus.format.signing.keys import fingerprint
from isthmus.inspect import bursts
from isthmus.inspect.bus_view import Outdated
from isthmus.inspect.losses import not_fallen, rising
from isthmus.inspect.restarts import CLAIMS_READ
from isthmus.inspect.status import Status
from isthmus.log.figures import shares
from isthmus.log.membership import Members
from isthmus.reasons import ABOUT_MANIFEST, AGAIN_FINITE, REMEDIES, Clip, Reason
from isthmus.rounds.bounds import YOUNG
from isthmus.wording import agreeing, listed

FAR = 0.25
"""A learner explodes if most of its newest updates are rejected as diverged, or clipped to less than this share of
their length.

Updates of an honest learner, which had trained alone after a restart, were seen clipped to 0.29 of their length.
"""

VERY_FAR = bursts.FAR
"""If the newest commits have only one update of a learner, it must be clipped to less than this share instead."""

CUT, STEADILY, MANY = 0.5, 0.75, 8
"""It explodes, too, if more than this share of `MANY` newest updates or more are clipped to less than `CUT`. The usual
length is the median of all learners' updates, and those of this learner raise it: later they are cut by less."""

REFUSED = 0.2
"""A learner explodes, too, if more than one update and this share of its newest ones are rejected as diverged."""

HEAVY, WORKED = 0.9, 0.75
"""A learner is too heavy if its updates have more than this share of the newest rounds' weight, with less than that
share of their tokens."""

LONGER = 5.0
"""A learner takes too long steps if the median of its newest updates, `MANY` or more, is more than so many times as
long as the others' usual one, beyond what the numbers of steps explain."""

REJECTED = 0.5
"""A learner that has left is named if more than this share of its tokens was rejected."""

STANDS_STILL = 10
"""A learner's loop stands still if every fragment has so many newer versions than the learner's: it takes a new one at
each step boundary."""

SLOW_STEPS = 2.0
"""A loop has not stopped if fewer of its usual steps than this would have ended meanwhile."""

STACK = "`py-spy dump --pid PID`, beside it, shows where it stands (an evaluation, data that do not come, a deadlock)"

NAMED_MAX = 3
"""The most learners, and the most damaged fragments, that are named with their trouble."""


@dataclass(frozen=True, slots=True)
class Part:
    """A problem of a run, and what to do about it."""

    said: str
    do: str = ""
    """Empty: a fact that the next problem goes on from, or that needs nothing."""
    joint: str = "; "
    """What stands between the two in a sentence."""

    def __str__(self) -> str:
        return f"{self.said}{self.joint}{self.do}" if self.do else self.said


def of_bursts(status: Status, run: str, exploding: Collection[str]) -> list[Part]:
    """Return the learners that exploded for a moment and train as before, which is no failure."""
    others = {*exploding, *rising(status.losses), *risen(status)}
    return [
        Part(
            burst.said,
            f"isthmus explain {run} {burst.place} has the round; if it comes again, look at the data of that time, and "
            "lower the learning rate or clip gradients",
        )
        for burst in status.bursts
        if burst.learner not in others and (burst.learner in status.live or not status.live)
    ][:NAMED_MAX]


def of_strangers(strangers: Sequence[str], run: str, members: Members | None) -> list[Part]:
    """Return that these learners are heard although the membership does not name them, with what to do."""
    if not strangers:
        return []
    several = len(strangers) > 1
    do = (
        f"end {'each' if several else 'it'}, or make it a member again, as the owner: isthmus members add {run} "
        f"{'NAME' if several else strangers[0]} --public-key FILE.pub --key OWNER_KEY_FILE"
    )
    if members is not None and members.current.charter is not None:
        do = do.replace("the owner", "an owner") + members.current.approving
    return [
        Part(
            f"{listed(strangers, NAMED_MAX)} {'are' if several else 'is'} heard, and the membership does not name "
            f"{'them: their' if several else 'it: its'} work is not merged",
            do,
        )
    ]


def of_outdated(old: Mapping[str, Outdated], live_since: float, run: str, members: Members | None) -> list[Part]:
    """Return the learners that speak, or spoke last, with a key that was replaced, each with what to do."""
    found = list[Part]()
    if members is None:
        return found
    now = members.current
    for name, said in sorted(old.items())[:NAMED_MAX]:
        there = now.member(name)
        if there is None:
            continue
        key = fingerprint(there.key)
        speaks = said.at is not None and said.at >= live_since
        verb, trains, do = (
            ("speaks", "trains", "end it, and start it again")
            if speaks
            else ("spoke last", "trained since", "start it again, from the checkpoint that the owner vouched for,")
        )
        rotate = f"isthmus members rotate {run} --member {there.name} --public-key FILE.pub --key OWNER_KEY_FILE"
        found.append(
            Part(
                f"{name} {verb} with the key {fingerprint(said.key)}, and since membership {said.replaced_by} its key "
                f"is {key}: what it {trains} is not merged",
                f"{do} with the key {key} (its folder's env, or --key); if the old key was to stay, {now.decider} "
                f"gives it back: {rotate}{now.approving}",
            )
        )
    return found


def of_manifests(away: Mapping[str, str]) -> list[Part]:
    """Return the learners whose updates are rejected for their manifest, by reason, with what to do.

    `away`: the reason by learner.
    """
    found = list[Part]()
    for reason in sorted(set(away.values()) & ABOUT_MANIFEST):
        names = sorted(name for name, why in away.items() if why == reason)
        said = f"updates of {listed(names, NAMED_MAX)} are rejected for their manifest ({reason})"
        found.append(Part(said, REMEDIES[reason]))
    return found


def exploding(status: Status, run: str, names: Collection[str]) -> dict[str, Part]:
    """Return those of these learners whose newest updates are far too long or not finite, each with what to do."""
    scales = defaultdict[str, list[tuple[float, str]]](list)
    refused = defaultdict[str, list[tuple[str, str]]](list)
    lately = status.recent or list(filter(None, status.heads))
    usual = [(c.header.fragment, i) for c in lately for i in c.header.inputs if i.scale >= FAR and i.norm]
    for commit in lately:
        place = f"{commit.header.fragment}/{commit.version}"
        for given in () if 1 <= commit.version <= YOUNG else commit.header.inputs:
            # An update that is cut only beside far fewer steps, or with nothing of late to compare it with, is usual.
            of_fragment = [other for p, other in usual if p == commit.header.fragment]
            # A learner's own updates are compared only if no other learner has any: an explosion has some that are cut
            # by little.
            others = [other for other in of_fragment if other.learner != given.learner] or of_fragment
            rises = [bursts.rise(given, other) for other in others]
            long = not given.norm or min(rises, default=0.0) > bursts.RISE
            scales[given.learner].append((given.scale if long else 1.0, place))
        for turned in commit.header.rejected:
            if turned.reason in bursts.DIVERGED:
                refused[turned.learner].append((turned.reason, place))
    members = status.hearing.members
    expel = "the owner can expel it"
    if members is not None and members.current.charter is not None:
        expel = expel.replace("owner", "owners") + members.current.expelling
    found = {}
    for name in sorted(set(names) & (scales.keys() | refused.keys())):
        cut = sorted((scale, place) for scale, place in scales[name] if scale < FAR)
        halved = sorted((scale, place) for scale, place in scales[name] if scale < CUT)
        gone, share = refused[name], "a quarter"
        seen = len(scales[name]) + len(gone)
        if 2 * (len(cut) + len(gone)) <= seen and seen >= MANY and len(halved) + len(gone) > STEADILY * seen:
            cut, share = halved, "half"
        bad = len(cut) + len(gone)
        # A single update that is clipped a little may be a learner's first or last one, of a step or two.
        most = 2 * bad > seen and (bad > 1 or bool(gone) or cut[0][0] < VERY_FAR)
        if most or (len(gone) > 1 and len(gone) > REFUSED * seen):
            _, place = gone[0] if gone else cut[0]
            fates = list[str]()
            if cut:
                fates.append(f"{len(cut)} cut to less than {share} of their length (the shortest to {cut[0][0]:.2g})")
            if gone:
                fates.append(f"{len(gone)} rejected ({', '.join(sorted({reason for reason, _ in gone}))})")
            found[name] = Part(
                f"{name} explodes: of its {seen} newest updates, {' and '.join(fates)}",
                f"the table of learners shows its loss, isthmus explain {run} {place} such a round; "
                "stop it by SIGTERM, so that it leaves (a loop of your own leaves if it closes its link then), "
                f"{REMEDIES[Reason.TOO_LONG]}; {expel}",
            )
    return found


def restarting(status: Status) -> list[Part]:
    """Return the learners that are started again and again before they can store a checkpoint, with what to do."""
    return [
        Part(
            f"{name} has joined {'at least ' if found.joined == CLAIMS_READ else ''}{found.joined} times since its "
            f"last checkpoint and went on after step {found.step} each time",
            "two processes have its name, or it dies before it can store one; its log says which",
            ": ",
        )
        for name, found in sorted(status.restarts.items())
    ][:NAMED_MAX]


def of_untrained(status: Status) -> list[Part]:
    """Return the learners that have left as done and have made no step, with what to do."""
    done = [v for v in status.taking_part if v.left is not None and v.left.done and not v.left.step]
    names = sorted(v.name for v in done if v.heartbeat is not None and not v.heartbeat.ledger.processed)
    do = "if it trained, its loop does not call link.step(tokens=…) after each step of the optimizer"
    return [Part(f"{listed(names, NAMED_MAX)} left as done, without a step", do)] if names else []


def of_diverged(status: Status) -> list[Part]:
    """Return the learners that have left with a last loss that is not finite, with what to do."""
    names = sorted(v.name for v in status.taking_part if v.left is not None and v.left.diverged)
    said = f"the last loss of {listed(names, NAMED_MAX)} was not finite: the model has nothing from there on"
    return [Part(said, AGAIN_FINITE)] if names else []


def of_losses(status: Status, run: str, exploding: Collection[str] = (), *, ended: bool = False) -> list[Part]:
    """Return the learners whose losses rise, each with what to do, but for those that explode.

    `ended`: whether all learners have left. If not, none is named that has.
    """
    left = {view.name for view in status.hearing.learners.values() if view.left is not None}
    levels = {name: _by_log(*level) for name, level in rising(status.losses).items()}
    levels = {name: _by_steps(*level) for name, level in risen(status).items()} | levels
    found = list[Part]()
    for name, said in sorted(levels.items()):
        if name in exploding or name in status.expelled or (name in left and not ended):
            continue
        if name in left:
            do = (
                f"isthmus replay {run} draws all losses, and isthmus export {run} --version N -o FILE writes the model "
                "of before it rose: isthmus init NEW --from FILE begins there, with a lower learning rate"
            )
            found.append(Part(f"the loss of {name} rose to its end: {said}", do))
        else:
            do = (
                "look at its data, or start it again with a lower learning rate (hyperparameters='passed'); isthmus "
                f"replay {run} draws all losses"
            )
            found.append(Part(f"the loss of {name} rises: {said}", do))
    return found[:NAMED_MAX]


def risen(status: Status) -> dict[str, tuple[float, float]]:
    """Return the learners that say themselves that their losses have risen: the levels before and of the newest steps.

    They judge all their steps. The log may have no update from before the rise, or none that was read.
    """
    beats = {view.name: view.heartbeat for view in status.hearing.learners.values() if view.heartbeat is not None}
    return {name: beat.risen for name, beat in beats.items() if beat.risen is not None}


def _by_log(lowest: float, now: float) -> str:
    return f"{now:.4g} or more in its newest updates, {lowest:.4g} at its lowest"


def _by_steps(before: float, now: float) -> str:
    return f"{now:.4g} in its newest steps, {before:.4g} before it rose"


def of_rejected(status: Status, run: str) -> list[Part]:
    """Return the learners whose work was mostly rejected, of a run that all have left: leaving does not say that."""
    found = list[Part]()
    for view in sorted(status.taking_part, key=lambda view: view.name):
        tally = view.heartbeat.ledger if view.heartbeat is not None else None
        if tally is None or tally.rejected <= REJECTED * tally.processed:
            continue
        places = [
            f"{commit.header.fragment}/{commit.version}"
            for commit in status.recent
            if any(turned.learner == view.name for turned in commit.header.rejected)
        ]
        where = f"isthmus explain {run} {places[-1]}" if places else "its log"
        found.append(
            Part(
                f"{tally.rejected / tally.processed:.0%} of the tokens of {view.name} were rejected, and it has left",
                f"{where} names the reason; the model has nothing of that work, and is not harmed by it",
            )
        )
    return found[:NAMED_MAX]


def of_standing(name: str, beat: Heartbeat, status: Status) -> Part | None:
    """Return that a learner's loop has reached no step boundary for many versions, with what to do; None if it has."""
    behind = min((status.version(p) - base for p, base in enumerate(beat.versions)), default=0)
    # A step of a learner that is much slower than the others may well take that long.
    if behind < STANDS_STILL or behind * _between_versions_s(status) < SLOW_STEPS * beat.step_s:
        return None
    if beat.step_s:
        said = f"{name}: its loop has ended no step for {behind} versions of each fragment"
        return Part(said, f"{STACK}. Its checkpoint, and what it has sent, are not affected")
    return Part(
        f"{name}: its loop has ended no step since it joined, {behind} versions of each fragment ago",
        f"if it trains, it does not call link.step(tokens=…) after each step of the optimizer; else {STACK}",
    )


def _between_versions_s(status: Status) -> float:
    """Return the longest mean time between two versions of a fragment of late; infinite if it is not known."""
    found = list[float]()
    for p, head in enumerate(status.heads):
        if head is not None:
            of = [(c.version, c.header.written_at) for c in (*status.recent, head) if c.header.fragment == p]
            (first, began), (last, ended) = min(of), max(of)
            found += [(ended - began) / (last - first)] if last > first else []
    return max(found, default=math.inf)


def of_weight(status: Status, run: str) -> list[Part]:
    """Return the learner that has almost all weight without almost all work, with what to do.

    If the others have little weight because they hardly move, they are named instead.
    """
    place, weights, tokens = "", defaultdict[str, float](float), defaultdict[str, float](float)
    short = defaultdict[str, list[bool]](list)
    for commit in filter(None, status.heads):
        for given in commit.header.inputs:
            short[given.learner].append(Clip.SHORT in given.clipped)
        for learner, (weight, worked) in shares(commit.header).items():
            place = f"{commit.header.fragment}/{commit.version}"
            weights[learner] += weight
            tokens[learner] += worked
    rounds = sum(weights.values())
    found = list[Part]()
    for name, weight in weights.items():
        heavy, worked = weight / rounds, tokens[name] / rounds
        if heavy <= HEAVY or worked >= WORKED:
            continue
        others = sorted(weights.keys() - {name})
        if all(2 * sum(short[other]) > len(short[other]) for other in others):
            moves = agreeing(len(others), "hardly moves", "hardly move")
            said = (
                f"{listed(others, NAMED_MAX)} {moves}: {1 - heavy:.0%} of the weight of the newest rounds, with "
                f"{1 - worked:.0%} of their tokens"
            )
            do = (
                f"isthmus explain {run} {place} shows how short the updates of a round are; look whether the "
                "learner's rate is almost 0, its parameters are frozen, or its loop steps another optimizer than the "
                f"one handed to join, and whether the rate of {name} is too high, whose updates are the long ones; a "
                "learner that has converged needs nothing"
            )
        else:
            said = (
                f"{name} has {heavy:.0%} of the weight of the newest rounds, with {worked:.0%} of their tokens: the "
                "others hardly count"
            )
            do = (
                f"isthmus explain {run} {place} shows the weights of a round and why; stop or expel {name} if it "
                "should not count for so much"
            )
        found.append(Part(said, do))
    return found


def of_lengths(status: Status, run: str, names: Collection[str], exploding: Collection[str]) -> list[tuple[Part, bool]]:
    """Return those of these learners whose updates are much longer than the others', each with what to do.

    The second value says whether this is a failure: no loss has fallen. (Alone, it may be that the others warm up.)
    """
    by_fragment = defaultdict[int, list[tuple[str, Input]]](list)
    for commit in status.recent:
        for given in commit.header.inputs:
            if given.norm and given.learner in names:
                by_fragment[commit.header.fragment].append((f"{commit.header.fragment}/{commit.version}", given))
    rises, places = defaultdict[str, list[float]](list), dict[str, str]()
    for inputs in by_fragment.values():
        ordered = sorted((i for _, i in inputs), key=lambda i: i.norm / max(1, i.steps))
        usual = dict[str, Input]()
        for name in {i.learner for i in ordered}:
            if others := [i for i in ordered if i.learner != name]:
                usual[name] = others[len(others) // 2]
        for place, given in inputs:
            if given.learner in usual:
                places[given.learner] = place
                rises[given.learner].append(bursts.rise(given, usual[given.learner]))
    curves = [not_fallen(status.losses[name]) for name in sorted(names) if name in status.losses]
    stands = [levels for levels in curves if levels is not None]
    failing = bool(stands) and len(stands) == len(curves)
    found = list[tuple[Part, bool]]()
    for name, of in sorted(rises.items()):
        if name in exploding or len(of) < MANY or (times := statistics.median(of)) <= LONGER:
            continue
        said = f"the newest updates of {name} are {times:.0f} times as long as the others', for as many steps"
        if failing:
            first, now = min(stands)
            said += f", and no loss has fallen: {first:.4g} at first, {now:.4g} in the newest updates"
        do = (
            f"isthmus explain {run} {places[name]} has such a round; if the learning rate of {name} is too high, start "
            "it again with a lower one (hyperparameters='passed'); while the others warm up, this is usual"
        )
        found.append((Part(said, do), failing))
    return found[:NAMED_MAX]
