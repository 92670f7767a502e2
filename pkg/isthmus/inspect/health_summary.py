"""Judge a run's health: its problems, the worst first, each with what to do, and how many learners merge. No I/O."""

import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from isthmus.bus import BUSES, in_store, syncer_command
from isthmus.format.records.keys import MEMBERS, members_key
from isthmus.format.records.messages import Alive, Heartbeat
from isthmus.inspect.bursts import FOR_A_MOMENT
from isthmus.inspect.bus_view import LearnerView
from isthmus.inspect.learner_problems import (
    NAMED_MAX,
    Part,
    exploding,
    of_bursts,
    of_diverged,
    of_lengths,
    of_losses,
    of_manifests,
    of_outdated,
    of_rejected,
    of_standing,
    of_strangers,
    of_untrained,
    of_weight,
    restarting,
)
from isthmus.inspect.status import Status
from isthmus.log.holes import GOES_ON as RUN_GOES_ON
from isthmus.log.holes import HOLE, accept_flag, ask_heal, ask_to_accept, damage
from isthmus.log.log_health import lacks, restores, stands
from isthmus.log.replaced import outdated, together
from isthmus.reasons import (
    GOES_ON,
    LATE_WORK,
    REMEDIES,
    UNHEARD,
    UNMERGED,
    WRITING,
    Reason,
    remedy_of,
)
from isthmus.runtime.descriptors import NONE_LEFT
from isthmus.wording import FROZEN, agreeing, counted, fragments, key_flag, listed

CLOCKS_S = 60.0
"""Two clocks that differ by more than this many seconds are reported."""

COMMITTED_S = 60.0
"""A commit younger than this many seconds shows that syncers and learners are at work, even if none is heard."""

ALIVE = "on its machine, pgrep -af isthmus (a loop of your own: the name of its script) says whether it lives"
"""What to type beside a process that is silent."""

LOOK = "look on their machines whether they live (pgrep -af isthmus; for a loop of your own, the name of its script)"

JOINING = "joined within the last minute"

UNANSWERED = "left with tokens that no syncer answered, which are not in the model"

PENDING_PERIODS = 3
"""A learner that is done and has pending tokens of more periods than this has sent work that nobody answered."""


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a run, which `status` prints first."""

    ok: bool
    """Whether nothing needs attention: learners train and all of them are merged, or all learners are done."""
    parts: Sequence[Part]
    """The problems, the worst first."""
    count: str = ""
    """How many learners merge, or are done; empty if a problem says it."""

    @property
    def said(self) -> str:
        """All problems in one sentence, the worst first, and then how many learners merge."""
        return "; ".join([*map(str, self.parts), *filter(None, [self.count])])

    @property
    def lines(self) -> list[str]:
        """The same in lines: each problem, what to do about it below it."""
        return [*(line for part in self.parts for line in told(part)), *filter(None, [self.count])]


def told(part: Part) -> list[str]:
    """Return a problem in a line, and what to do about it in a second one."""
    return [part.said, f"  → {part.do}"] if part.do else [part.said]


_VARIES = re.compile(r"fragments? \d+(?:(?:, | to )\d+)*|(?<![\w/-])\d[\d.,:]*(?![\w/-])")
"""A list of fragments, which tells one problem from another; or a number, which changes while a problem lasts."""


class News:
    """Tells the problems of a run that is watched: each once, and its end."""

    def __init__(self) -> None:
        self._known: dict[str, Part] = {}

    def of(self, parts: Iterable[Part]) -> list[str]:
        """Return the lines about problems that are new since the last call, and about those that are over."""
        now = {_VARIES.sub(lambda m: m[0] if m[0].startswith("fragment") else "…", part.said): part for part in parts}
        new = [line for key, part in now.items() if key not in self._known for line in told(part)]
        over = [f"over: {part.said}" for key, part in self._known.items() if key not in now]
        self._known = now
        return new + over


def health(status: Status, run: str, bus: str, expected: int = 0) -> Health:
    """Return the health of a run from its present status.

    `run` and `bus`: their addresses, for commands to copy. `expected`: how many learners should be live at least, until
    all of them have left.
    """
    found = _health(status, run, bus, expected)
    first = _of_intruders(status, run)  # all else may be about the wrong run
    return Health(False, [*first, *found.parts], found.count) if first else found


def _health(status: Status, run: str, bus: str, expected: int) -> Health:
    written = max((c.header.written_at for c in status.heads if c is not None), default=0.0)
    # Somebody writes a healing commit by hand: it does not show that a syncer is at work.
    merged_at = max(
        (c.header.written_at for c in status.heads if c is not None and c.header.healed is None), default=0.0
    )
    never = "the newest commits cannot be read" if _unread(status) else "nothing was ever committed"
    last = f"the last commit is of {_clock(written, status.at)}" if written else never
    members = status.hearing.members

    def syncer(more: str = "") -> str:
        signed = members is not None and members.signed
        return syncer_command(run, bus, more, signed=signed) + (members.before_a_syncer if members else "")

    if status.bus_error:
        why, _, delete = status.bus_error.rstrip(".").partition(": delete ")
        do = "" if "check that" in why else f"check that {run if in_store(bus) else bus} is reachable"
        if delete:
            do = f"delete {delete}"
        if bus.startswith("redis"):
            do = (
                "give --bus the URL that the run's syncers have; if it is this one, start the server that should "
                "answer there: nothing that was in it has to be restored, and an empty Redis will do"
            )
        unknown = Part(f"{why}: it is unknown which processes are live; {last}", do)
        return Health(False, [*_of_room(status, run), unknown, *of_log(status, run)])
    here = sorted((v for v in status.hearing.learners.values() if v.name in status.live), key=lambda v: v.name)
    wild = exploding(status, run, status.live)
    away = status.turned_away
    judged = [v for v in here if v.name not in wild and v.name not in away]
    troubles = {v.name: part for v in judged if (part := _trouble(v, status, run, bus))}
    heard = {name for name, at in status.hearing.strangers.items() if at >= status.live_since}
    strangers = [] if status.members_lost else sorted(heard)  # else a version that is lost may name them
    old = status.outdated
    strange = [*of_strangers(strangers, run, members), *of_outdated(old, status.live_since, run, members)]
    known = [v for v in status.taking_part if v.left is None and v.name not in strangers]
    not_left = {v.name for v in known} | status.forgotten
    silent = _newest_first(known, not_left - status.live - status.elsewhere - status.not_yet - old.keys())
    if not known or (not here and not status.syncers_live and len(known) < len(status.taking_part)):
        # The others have left: those that fell silent before did not end the run.
        young = merged_at > status.at - COMMITTED_S
        found = _nobody(status, last, syncer, bus, young=young)
        if strange and not status.taking_part:  # the membership does not name the learners that train
            found = Health(False, [])
        damage = of_log(status, run)
        ailing = [
            *of_diverged(status),
            *of_losses(status, run, ended=True),
            *of_untrained(status),
            *strange,
            *of_manifests(status.turned_away),
        ]
        ailing += of_rejected(status, run)
        everybody = {view.name for view in status.taking_part}
        ailing += [part for part, failing in of_lengths(status, run, everybody, ()) if failing]
        # Learners that have stopped before their end may have done so because of the damage.
        first = [*found.parts, *damage] if found.ok else [*damage, *found.parts]
        absent = _of_silence(silent, len(not_left), status, run, bus)
        parts = _ordered([*first, *ailing], [*_of_unheard(status, bus), *absent, *of_bursts(status, run, ())])
        return Health(found.ok and not (damage or ailing), parts, found.count)
    if not here and not status.syncers_live:
        # Processes that all fell silent, and did not leave, may be alive on a bus or a disk that is full.
        room, damage = _of_room(status, run), of_log(status, run)
        nobody = "no process is heard, and none has left"
        if status.bus_refusing:
            why = f"the bus refuses their messages, since {status.bus_refusing.why}"
            do = f"{status.bus_refusing.remedy}: processes that live go on by themselves"
        else:
            who = "all"
            if status.hearing.syncers and all(alive.stopping for alive in status.hearing.syncers.values()):
                nobody, who = "no process is heard; the syncers have stopped, and no learner has left", "the learners"
            why = f"{who} were killed or are cut off, or the bus refuses their messages"
            do = (
                "look first whether they live, on each of their machines: pgrep -af isthmus (for a training loop of "
                "your own, the name of its script in place of isthmus). Beside those that live, isthmus doctor "
                f"{run} --bus {bus} --role syncer{_key(status, 'syncer')} says what keeps them from the bus; start "
                "the others again by their old commands"
            )
        said = f"0 of {len(known)} learners merge; {nobody} ({last}): {why}"
        silence = Part(said, do)
        # What is lost is to be known before anything is started again.
        return Health(False, _ordered([*room, *damage, silence, *strange], []))
    room = _of_room(status, run)
    able = [name for name in status.syncers_live if _serves(status.hearing.syncers[name])]
    # What hinders every merge is the cause of what learners then wait for.
    stuck = not able or unserved(status).issuperset(range(len(status.heads)))
    troubled = [part for part in troubles.values() if not ((room or stuck) and f"({UNMERGED})" in part.said)]
    merging = f"{0 if stuck else len(judged) - len(troubles)} of {len(known)} learners merge"
    stopped = list[Part]()
    if not status.syncers_live:
        start = syncer(_quorum(status, len(known)))
        merging, stopped = "", [_no_syncer(status, len(known), here, merged_at, last, start, bus)]
        if unanswered := _unanswered(status):
            do = (
                f"start {agreeing(len(unanswered), 'it', 'them')} again before a syncer, with --wait-at-end 600 (a "
                "loop of your own: link.close(wait=600)): once a syncer has gone on without that work, it is too old"
            )
            stopped.insert(0, Part(f"{', '.join(unanswered)} {UNANSWERED}", do))
    elif not able:
        merging = ""
        nobody = f"0 of {len(known)} learners merge: 0 of {len(status.syncers_live)} syncers can serve for now"
        stopped.append(Part(f"{nobody}; {last}"))
    names = sorted(status.syncers_live - set(able))[:NAMED_MAX]
    unable = [_cannot(status.hearing.syncers[name], status, run, bus) for name in names]
    waiting = troubled[:NAMED_MAX]
    if len(troubled) > NAMED_MAX:
        others = len(troubled) - NAMED_MAX
        more = f"{counted(others, 'more learner')} {agreeing(others, 'has', 'have')} such trouble"
        waiting.append(Part(more, "the table of learners names all", ": "))
    absent = list[Part]()
    gone = exploding(status, run, silent)
    absent += _of_silence([name for name in silent if name not in gone], len(not_left), status, run, bus)
    absent += [
        Part(
            f"no messages come from {name}, which explodes{part.said.partition(' explodes')[2]}",
            f"leave it away, or {REMEDIES[Reason.TOO_LONG]}",
        )
        for name, part in list(gone.items())[:NAMED_MAX]
    ]
    fewer = list[Part]()
    if len(here) < expected:
        said = f"{counted(expected, 'learner')} expected, {len(here)} heard"
        fewer.append(Part(said, "start the others, or expect fewer", ": "))
    ill = [*of_log(status, run), *list(wild.values())[:NAMED_MAX]]
    heavy = of_weight(status, run)
    long = [] if heavy else of_lengths(status, run, status.live, wild)
    ill += [
        *of_manifests(away),
        *heavy,
        *(part for part, fails in long if fails),
        *waiting,
        *restarting(status),
        *of_diverged(status),
        *of_losses(status, run, wild),
        *of_untrained(status),
    ]
    ill += [*strange, *_of_clocks(status)]
    failing = [*room, *stopped, *(() if able else unable), *ill, *(absent if fewer else ()), *fewer]
    unheard = _of_unheard(status, bus)
    if apart := not status.elsewhere.isdisjoint(status.storing):
        failing += unheard
    passing = [
        *(unable if able else ()),
        *(() if apart else unheard),
        *_of_joining(status),
        # A silent learner is no failure: it may have been taken away on purpose, and the run goes on without it.
        *(() if fewer else absent),
        *_of_quorums(status, able),
        *(part for part, fails in long if not fails),
        *of_bursts(status, run, wild),
    ]
    return Health(bool(here) and not failing, _ordered(failing, passing), merging)


def _ordered(failing: Iterable[Part], others: Iterable[Part]) -> list[Part]:
    """Return problems in the order in which they are told: what fails --check comes first."""
    return [*sorted(failing, key=_urgency), *sorted(others, key=_urgency)]


def _of_silence(silent: Sequence[str], known: int, status: Status, run: str, bus: str) -> list[Part]:
    """Return that nothing is heard of these learners, with what to do. `known`: how many have not left."""
    if not silent:
        return []
    return [
        Part(
            f"no messages come from {listed(silent, NAMED_MAX)}: {agreeing(len(silent), 'it was', 'they were')} "
            f"killed or {agreeing(len(silent), 'is', 'are')} cut off, or {agreeing(len(silent), 'has', 'have')} "
            f"another bus than {bus}",
            f"{ALIVE}. If not, start it again under its name: it goes on from its checkpoint, if it has one. If it "
            f"does, {FROZEN}; else isthmus doctor {run} --role learner --learner {silent[0]}{_key(status, 'learner')} "
            "--bus ITS_BUS, there, says whether that is the bus of the run's syncers. --check ends with 1 while "
            f"one is away with --expect {known}",
        )
    ]


def _newest_first(known: Sequence[LearnerView], names: Collection[str]) -> list[str]:
    """Return names, first those that knew the newest versions when they were last heard."""
    versions = {v.name: sum(v.heartbeat.versions) if v.heartbeat is not None else 0 for v in known}
    return sorted(names, key=lambda name: (-versions.get(name, 0), name))


def _unread(status: Status) -> bool:
    """Return whether a fragment's newest commit cannot be read: it is not known then how far that fragment is."""
    return any(head is None and p in status.wrong for p, head in enumerate(status.heads))


def _key(status: Status, role: str) -> str:
    """Return the flag, after a space, that names a member's key in a command; empty if nothing is signed."""
    members = status.hearing.members
    return key_flag(role, signed=members is not None and members.signed)


def unserved(status: Status) -> set[int]:
    """Return the fragments that are not merged for a reason that is known: their log is damaged or cannot be read."""
    live = (status.hearing.syncers[name] for name in status.syncers_live)
    return (
        {p for alive in live for p in alive.broken}
        | {p for p, why in status.wrong.items() if RUN_GOES_ON not in why}
        | _lacking(status).keys()
    )


def _lacking(status: Status) -> dict[int, tuple[int, Sequence[str]]]:
    """Return the fragments of which learners have a version that the log lacks, and whose log is not damaged."""
    return {p: found for p, found in status.ahead.items() if p not in status.wrong}


def _urgency(part: Part) -> int:
    """Return the place of a problem: last what passes by itself, before it holes and what is over."""
    return 2 if JOINING in part.said else int(HOLE in part.said or FOR_A_MOMENT in part.said)


def _no_syncer(
    status: Status, known: int, here: Sequence[LearnerView], merged_at: float, last: str, syncer: str, bus: str
) -> Part:
    """Return that no syncer is heard while learners are, with what to do: a second one on this bus may be wrong."""
    found_on = any(v.heartbeat is not None and f"{UNHEARD}, {GOES_ON}" in v.heartbeat.waiting_for for v in here)
    young = merged_at > status.at - COMMITTED_S
    if young and found_on:
        return Part(
            f"0 of {known} learners merge; no syncer is heard, but the run goes on ({last}): {bus} is not the bus of "
            "its syncers",
            f"start none here: give these learners, and --bus here, the URL that the syncers have ({BUSES}); the "
            "learners go on from their checkpoints",
        )
    if young and not status.hearing.syncers:
        return Part(
            f"0 of {known} learners merge; no syncer was heard on {bus}, though {last}, less than a minute ago: the "
            "syncers have another bus, or have ended and this one was emptied",
            f"{LOOK}: if a syncer does, start none here, and give these learners, and --bus here, the URL that it has "
            f"({BUSES}); if none does, start one with: {syncer}",
        )
    return Part(
        f"0 of {known} learners merge; no syncer is heard; {last}", f"{_frozen(status)}start one with: {syncer}"
    )


def _frozen(status: Status) -> str:
    """Return what to do first about syncers that are not heard any more: they may be frozen. Empty if there is none."""
    # The newest two of those that have not said that they stop.
    before = [name for name, alive in status.hearing.syncers.items() if not alive.stopping][:-3:-1]
    return f"if {' or '.join(before)} lives, {FROZEN}; else " if before else ""


def _quorum(status: Status, known: int) -> str:
    """Return the flag, after a space, for the quorum of a syncer that is to be started; empty for the run's own.

    Syncers that were heard before may have had another quorum than the run's.
    """
    quorum = min(max((alive.quorum for alive in status.hearing.syncers.values()), default=0), known)
    return f" --quorum {quorum}" if quorum > status.pace.quorum else ""


def _of_unheard(status: Status, bus: str) -> list[Part]:
    """Return the learners that have lately stored something and were not heard on this bus since, with what to do."""
    names = sorted(status.elsewhere)
    if not names or status.members_lost:  # status cannot read the messages of members it does not know
        return []
    # Without a syncer here, nothing says which of the two buses is the right one.
    do = (
        "start it again with this one (--bus, ISTHMUS_BUS, join(bus=…))"
        if status.hearing.syncers
        else "use the one that the syncers' commands or logs name, here and there"
    )
    return [
        Part(
            f"{listed(names, NAMED_MAX)} joined in the store and {agreeing(len(names), 'was', 'were')} not heard here "
            "since",
            f"a learner of these whose log says «joined» has another bus than {bus}: {do}; one whose log does not yet "
            "still loads its model. For one that has ended nothing is to be done, unless its log says NONE OF ITS WORK "
            "WAS MERGED, or IS LOST: start it again with this bus, and --wait-at-end 600 or link.close(wait=600)",
        )
    ]


def _of_joining(status: Status) -> list[Part]:
    """Return the learners that joined a moment ago and are not heard yet, with what to do."""
    names = sorted(status.not_yet)
    if not names:
        return []
    return [
        Part(
            f"{listed(names, NAMED_MAX)} {JOINING} and {agreeing(len(names), 'is', 'are')} not heard yet",
            "wait a minute: a learner is heard once it has loaded its model and its checkpoint (if its process has "
            "ended, its log says why)",
            ": ",
        )
    ]


def _of_quorums(status: Status, able: Sequence[str]) -> list[Part]:
    """Return the syncers whose rounds ask for more learners than were ever heard, with what to do."""
    heard = len(status.taking_part)
    names = [name for name in sorted(able) if status.hearing.syncers[name].quorum > max(1, heard)]
    if not names:
        return []
    most = max(status.hearing.syncers[name].quorum for name in names)
    return [
        Part(
            f"{listed(names, NAMED_MAX)} {agreeing(len(names), 'has', 'have')} a quorum of {most}, and "
            f"{counted(heard, 'learner')} {agreeing(heard, 'was', 'were')} ever heard: "
            f"{agreeing(len(names), 'its', 'their')} rounds wait for every learner, and until their deadline for one "
            "that stalls",
            f"start the other learners, or start {agreeing(len(names), 'the syncer', 'these syncers')} again with "
            f"--quorum K, where K is at most {heard}",
        )
    ]


def _of_intruders(status: Status, run: str) -> list[Part]:
    """Return that processes of other runs speak on the bus in this run's folder, with what to do."""
    if not status.intruders:
        return []
    others = listed([digest[:16] for digest in status.intruders], NAMED_MAX)
    return [
        Part(
            f"processes of another run ({others}) speak on the bus in this run's folder: a mount was lost, and this "
            "run was created in its empty place, or its folder was replaced while they ran",
            f"if {run} should be on a mount (findmnt -T {run}), end the processes of this run, mount it again and "
            "start them again: they join the run that was there; else end the processes of the other run",
        )
    ]


def _of_room(status: Status, run: str) -> list[Part]:
    """Return that the disk of a run in a folder is full, with what to do."""
    if status.room is None:
        return []
    flags = f"{accept_flag(status.accepted)} --apply{_key(status, 'collector')}"
    return [
        Part(
            f"the disk of {run} is full: {status.room} are left",
            "enlarge it while they run, or make room on it: "
            f"isthmus gc {run}{flags} frees what the run does not need and is over an hour old, which is "
            "little in a young or small run; if that is not enough, stop all processes of the run (what learners have "
            "trained since their last checkpoints is lost then: none can be stored), wait until they have ended, "
            f"delete the rest by isthmus gc {run}{flags} --keep 8 --min-age 0 and start them again",
        )
    ]


def _of_clocks(status: Status) -> list[Part]:
    """Return the syncers whose clocks differ from this machine's, by commits that were announced just now.

    The newest commit of a fragment shows that without having been announced, if it is of the future.
    """
    found, heads = dict[str, float](), list(filter(None, status.heads))
    for commit in (*status.recent, *heads):
        heard, ahead = status.hearing.announced.get(commit.header.fragment), commit.header.written_at - status.at
        now = heard is not None and heard[0] == commit.version and heard[1] >= status.live_since
        if now or (ahead > CLOCKS_S and commit in heads):
            found[commit.header.writer] = ahead
    return [
        Part(
            f"the clock of {name} is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's",
            "set both by NTP (timedatectl set-ntp true); garbage collection and every time that is shown go by these "
            "clocks",
            ": ",
        )
        for name, ahead in sorted(found.items())
        if abs(ahead) > CLOCKS_S
    ][:NAMED_MAX]


def _unfoldable(status: Status) -> set[int]:
    """Return the fragments that a live syncer cannot fold, because their log is damaged."""
    live = [status.hearing.syncers[name] for name in status.syncers_live]
    return {p for alive in live for p in set(alive.broken) - set(alive.slow) - set(alive.refused)}


def _of_syncers(status: Status, run: str) -> list[Part]:
    """Return the fragments that live syncers cannot serve, with what to do."""
    found, holed = list[Part](), set[int]()
    for name in sorted(status.syncers_live):
        alive = status.hearing.syncers[name]
        if alive.twin:
            found.append(
                Part(
                    f"two syncers are named {name}: each takes the other's messages for its own, and both merge all "
                    "fragments",
                    "start one of them again with another --name",
                )
            )
        if alive.slow:
            found.append(
                Part(
                    f"{fragments(alive.slow)} {agreeing(len(alive.slow), 'is', 'are')} slow to be read by {name}, "
                    f"which leaves {agreeing(len(alive.slow), 'it', 'them')} to others; nothing is known to be damaged",
                    "see whether its machine or its way to the store is overloaded",
                    ": ",
                )
            )
        if alive.refused:
            found.append(
                Part(
                    f"{fragments(alive.refused)} may not be read by {name}",
                    f"give it a syncer's rights (isthmus doctor {run} --role syncer{_key(status, 'syncer')}, beside "
                    "it, names what is missing)",
                    ": ",
                )
            )
        holed.update(alive.holed)
    named = {p for p, why in status.wrong.items() if RUN_GOES_ON not in why}
    damaged = _unfoldable(status) - named
    holed -= {*status.wrong, *status.accepted, *damaged}
    if holed:
        said = f"{fragments(holed, 'each of ')} has {HOLE}"
        found.append(Part(said, f"isthmus heal {run} names what is missing", ": "))
    if damaged:
        found.append(Part(f"{fragments(damaged)} cannot be folded", _ask_heal(status, run), ": "))
    return found


def _ask_heal(status: Status, run: str) -> str:
    members = status.hearing.members
    return ask_heal(run, signed=members is not None and members.signed)


def of_log(status: Status, run: str) -> list[Part]:
    """Return the problems of the log, with what to do. `run`: its address, for commands to copy."""
    # A missing membership is missing for all fragments, and is said once. Its text may have the advice.
    found = list[Part]()
    whys = {why for why in (*status.wrong.values(), status.membership) if why.startswith(MEMBERS)}
    for why in sorted(whys):
        said, _, do = why.partition(": restore ")
        found.append(Part(said, f"restore {do or 'it from a backup'}", ": "))
    members = status.hearing.members
    if not found and members is not None and members.signed and (withheld := members.withheld):
        version, by = withheld
        found.append(
            Part(
                f"{by} says that it knows membership {version}, and the store has {members.current.version} as the "
                "newest one",
                f"if the store lost the others, restore {members_key(members.current.version + 1)} from a backup; "
                "else it withholds them, and who was expelled by that may still be merged (SECURITY.md)",
                ": ",
            )
        )
    if members is not None:
        found += [
            Part(
                f"{made.writer} goes on under a membership that was replaced: {made}",
                f"end {made.writer} if it lives, and take its rights to the store away; if it is to go on, it needs a "
                f"store that has {members_key(made.newer)}; isthmus replay {run} names all such commits",
                ": ",
            )
            for made in together(outdated(members, status.recent))[:NAMED_MAX]
        ]
    # Of a fragment that cannot be folded, a hole in its history is the lesser trouble.
    lost = _unfoldable(status)
    damaged = [
        (p, why)
        for p, why in status.wrong.items()
        if not (why.startswith(MEMBERS) or (p in lost and RUN_GOES_ON in why))
    ]
    damaged.sort(key=lambda one: RUN_GOES_ON in one[1])
    ask = {True: ask_to_accept(run), False: _ask_heal(status, run)}
    broken = [Part(damage([p], why), ask[RUN_GOES_ON in why]) for p, why in damaged[:NAMED_MAX]]
    if more := damaged[NAMED_MAX:]:
        holed = all(RUN_GOES_ON in why for _, why in more)
        holes = f", each by {HOLE}" if holed else ""
        several = agreeing(len(more), "the log of 1 more fragment is", f"the logs of {len(more)} more fragments are")
        broken.append(Part(f"{several} damaged, too{holes}", ask[holed]))
    found += [*broken, *_of_syncers(status, run)]
    for p, (version, names) in _lacking(status).items():
        head = status.heads[p]
        at = head.version if head is not None else 0
        found.append(Part(lacks(p, at, version, names), restores(p, at, run)))
    if still := [p for p in status.standing if p not in unserved(status)]:
        found.append(
            Part(
                stands(still),
                f"the syncers' logs say why, and isthmus heal {run} says whether the log is sound; if they say "
                "nothing, no learner lives for a period (the table of fragments has it, in steps), after which it "
                "sends a fragment",
            )
        )
    return found


def _nobody(status: Status, last: str, syncer: Callable[..., str], bus: str, *, young: bool) -> Health:
    """Return the health of a run that no learner trains: all have left, or none was ever heard.

    `young`: whether the last commit is so young that somebody must be at work.
    """
    left = [v for v in status.taking_part if v.left is not None]
    stopped = sorted(v.name for v in left if v.left is not None and not v.left.done)
    done = len(left) - len(stopped)
    if not left and young and not status.syncers_live:
        said = (
            f"no learner and no syncer was heard on {bus}, though {last}, less than a minute ago: they have another "
            "bus, or have ended and this one was emptied"
        )
        do = f"{LOOK}: if so, give --bus the URL that they have: {BUSES}; if not, start them by their old commands"
        return Health(False, [Part(said, do)])
    no_syncer = [] if status.syncers_live or not status.hearing.syncers else [
        Part("no syncer is heard either", f"{_frozen(status)}start one with: {syncer('')}")
    ]  # fmt: skip
    if not left and status.forgotten:
        return Health(False, [Part(f"no learner was heard since this bus was emptied; {last}"), *no_syncer])
    if not left and not status.not_yet:
        said = f"no learner trains, and none was ever heard on this bus; {last}"
        do = f"start one, or check that {bus} is the bus of the run's learners"
        return Health(False, [Part(said, do), *no_syncer])
    if joining := _of_joining(status):
        return Health(False, [Part(f"no learner trains at the moment; {last}"), *joining])
    counts = [f"{done} of {len(left)} learners are done"] if done else []
    if stopped:
        counts.append(f"{len(stopped)} stopped before" if done else f"{len(stopped)} of {len(left)} learners stopped")
    said, do = f"no learner trains: {', '.join(counts)}; {last}", ""
    if stopped:
        said += f"; {listed(stopped, NAMED_MAX)} left before {agreeing(len(stopped), 'its', 'their')} last step"
        do = (
            "unless the run is to end here, start what stopped again: each learner goes on from its checkpoint (one "
            "that was started in the last minute may not have joined yet: its log says «joined» when it has, or why it "
            "could not)"
        )
        if not status.syncers_live and (unanswered := _unanswered(status)):
            said += f"; {', '.join(unanswered)} {UNANSWERED}"
            do = f"unless the run is to end here, {_again(syncer)}"
    elif not any(status.heads) and not _unread(status):
        said += "; what they learnt is not in the run"
        do = _again(syncer, "; a model that was merged once may be worse than a learner's own")
    elif unanswered := _unanswered(status):
        said += f"; {', '.join(unanswered)} {UNANSWERED}"
        do = _again(syncer)
    elif lost := _unanswered(status, too_late=True):
        said += f"; {', '.join(lost)} left with tokens that are too old by now to be merged"
    return Health(False, [Part(said, do)]) if do else Health(True, [], said)


def _again(syncer: Callable[..., str], more: str = "") -> str:
    """Return the advice that brings in what learners had sent when they ended. `more`: what else is to be known."""
    return (
        f"bring their work in soon ({LATE_WORK}{more}): start them again with --wait-at-end 600 (a loop of your own: "
        f"link.close(wait=600)) and, once they have joined, a syncer: {syncer('')}"
    )


def _unanswered(status: Status, *, too_late: bool = False) -> list[str]:
    """Return the learners that have left and whose work is not in the model but may still be, each with its share.

    `too_late`: instead those whose work cannot be merged any more, since the run has gone on without it.

    Steps after the last update are pending, too, and work on rounds that were open at the end: it takes more to count.
    If one learner has more, all are named that have more than a period. Work on versions that are too old by now is
    overwritten when its learner comes back.
    """
    found = dict[str, float]()
    for view in sorted(status.taking_part, key=lambda view: view.name):
        open_ = 1.0 - _merged_since(view, status)
        beat, periods = view.heartbeat, open_ * _periods_pending(view, status.period)
        left = view.left is not None and not view.left.diverged
        if left and beat is not None and periods > 1 and _too_old(beat, status) == too_late:
            found[f"{view.name} ({open_ * beat.ledger.pending / beat.ledger.processed:.0%})"] = periods
    return list(found) if max(found.values(), default=0.0) > PENDING_PERIODS else []


def _merged_since(view: LearnerView, status: Status) -> float:
    """Return the share of the fragments of which something of a learner was merged after it was last heard."""
    found = {
        commit.header.fragment
        for commit in status.recent
        if view.heard_at is not None
        and commit.header.written_at > view.heard_at
        and view.name in (i.learner for i in commit.header.inputs)
    }
    return len(found) / max(1, len(status.heads))


def _too_old(beat: Heartbeat, status: Status) -> bool:
    """Return whether most fragments of a learner are based on versions whose updates cannot be merged any more."""
    bases = list(enumerate(beat.versions))
    return 2 * sum(base < status.version(p) - status.pace.staleness for p, base in bases) > len(bases)


def _periods_pending(view: LearnerView, period: float) -> float:
    """Return how many periods of a learner's tokens are pending."""
    beat = view.heartbeat
    a_period = period * beat.tokens_seen / beat.step if beat is not None and beat.step else 0.0
    return beat.ledger.pending / a_period if beat is not None and a_period else 0.0


def _trouble(view: LearnerView, status: Status, run: str, bus: str) -> Part | None:
    """Return why updates of a live learner are not merged, with what to do; None if they are, or may soon be.

    If no syncer is heard here, learners that only say the same are not named for it.
    """
    heard = bool(status.syncers_live)
    if view.heartbeat is None:
        return None
    if not (waiting := view.heartbeat.waiting_for):
        return of_standing(view.name, view.heartbeat, status)
    if not heard and waiting == f"a merge ({UNHEARD})":
        return None
    if heard and waiting.startswith(f"a merge ({UNHEARD}"):
        doctor = f"isthmus doctor {run} --bus {bus} --role learner --learner {view.name}{_key(status, 'learner')}"
        do = f"syncers are heard here: {doctor}, beside it, says what keeps their messages from it"
        return Part(f"{view.name}: waits for {waiting}", do, ": ")
    do = _remedy(waiting, status, run, bus, f"learner --learner {view.name}")
    return Part(f"{view.name}: waits for {waiting}", do, ": ")


def _serves(alive: Alive) -> bool:
    """Return whether a syncer can serve. One whose store takes no writes takes part, and commits nothing."""
    return alive.able and WRITING not in alive.waiting_for


def _cannot(alive: Alive, status: Status, run: str, bus: str) -> Part:
    """Return why a syncer cannot serve, with what to do."""
    if not alive.waiting_for:
        return Part(f"{alive.syncer} cannot serve for now", "its log says why", ": ")
    do = _remedy(alive.waiting_for, status, run, bus, "syncer")
    return Part(f"{alive.syncer}: waits for {alive.waiting_for}", do, ": ")


def _remedy(waiting: str, status: Status, run: str, bus: str, role: str) -> str:
    """Return what to do about what a learner or a syncer waits for."""
    if waiting == f"a merge ({UNMERGED})":
        newest = max(filter(None, status.heads), key=lambda c: c.header.written_at, default=None)
        place = f"{newest.header.fragment}/{newest.version}" if newest is not None else "FRAGMENT/VERSION"
        return (
            "the table of fragments shows whether new versions come, and whom rounds wait for: if none comes, the "
            f"syncers' logs say why; else isthmus explain {run} {place} names the learners that a round missed, and by "
            "how much"
        )
    if waiting.startswith("a merge ("):
        return remedy_of(waiting.removeprefix("a merge (").removesuffix(")")) or "its log says why"
    if NONE_LEFT in waiting:
        return "it does not go on by itself: the limit is its own, so start it again with a higher one"
    doctor = f"isthmus doctor {run} --bus {bus} --role {role}{_key(status, role.partition(' ')[0])}"
    return f"it goes on by itself once that is over; {doctor}, beside it, says what is wrong"


def _clock(at: float, now: float) -> str:
    """Return a time of day as text, with the date if it is not today's."""
    then, today = time.localtime(at), time.localtime(now)
    same = (then.tm_year, then.tm_yday) == (today.tm_year, today.tm_yday)
    return time.strftime("%H:%M:%S" if same else "%Y-%m-%d %H:%M", then)
