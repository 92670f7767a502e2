"""Problems of a run that need attention, each with what to do: of the present, or of a past moment."""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from isthmus.inspect.health_summary import health, of_log, unserved
from isthmus.inspect.learner_problems import NAMED_MAX, Part
from isthmus.inspect.losses import rising
from isthmus.inspect.status import Status
from isthmus.log.log_health import APART_S, STANDS, standing, stands
from isthmus.reasons import REMEDIES
from isthmus.wording import agreeing
from isthmus.wording import fragments as named
from isthmus_services.board.history import time_views
from isthmus_services.board.history.history import RunHistory
from isthmus_services.board.history.rows import QUORUM_MISSED

RECENT = 50
"""Number of newest commits that count as recent."""

STUCK_PERIODS = 10.0
"""A fragment that was not merged for this many times the usual interval is stuck."""

STUCK_LEAST_S = 30.0
LOST_SHARE = 0.3
"""A learner is named if more than this share of its updates was rejected for reasons that show a problem."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A problem that needs attention."""

    said: str
    do: str
    link: str = ""
    """Address of the page that shows more about it."""


def warnings(
    c: RunHistory, at: float, status: Status | None, run: str, bus: str, listened_s: float
) -> list[dict[str, Any]]:
    """Return the problems, the most urgent first. `status`: the present status; None for a past moment."""
    known = _now(c, status, run, bus, listened_s) if status is not None else None
    if known is None:
        known = _losses(c, at if status is None else math.inf, run)
        known += _notices(of_log(status, run)) if status is not None else []
    found = _log(c, math.inf if status is not None else at, at, run, status)
    return [asdict(w) for w in [*known, *(w for w in found if not any(w.said in k.said for k in known))]]


def was_replaced(fragments: Sequence[int]) -> str:
    """Return in words that the history of these fragments was replaced."""
    return f"the history of {named(fragments)} was replaced: the store has other commits than were read before"


def of_replaced(fragments: Sequence[int]) -> dict[str, Any]:
    """Return the notice that the history of these fragments was replaced, and that the board shows the new one."""
    do = (
        "nothing, if a commit was deleted as isthmus heal advises, or a backup was restored: the board shows the new "
        "history. Else somebody rewrites the log: SECURITY.md says how two histories are found"
    )
    return asdict(Notice(was_replaced(fragments), do))


def _now(c: RunHistory, status: Status, run: str, bus: str, listened_s: float) -> list[Notice] | None:
    """Return what is to be said of the present run, that of the log included; None if too little was heard of it."""
    # Silent learners are known only after a while of listening. The page itself shows for how long a bus has been away.
    if not bus or listened_s < c.run.pace.silence_s or status.bus_error or not status.hearing.learners:
        return None
    return _notices(health(status, run, bus).parts)


def _notices(parts: Sequence[Part]) -> list[Notice]:
    """Return a notice for each part of a sentence that says what to do, begun by the parts before it that do not."""
    found, begun = list[Notice](), list[str]()
    for part in parts:
        begun.append(part.said)
        if part.do:
            found.append(Notice("; ".join(begun), part.do))
            begun = []
    return found


def _losses(c: RunHistory, at: float, run: str) -> list[Notice]:
    """Return a notice of each learner whose loss rose, as the merged updates state it."""
    return [
        Notice(
            f"the loss of {name} rises: {now:.4g} or more in its newest updates, {lowest:.4g} at its lowest",
            "the chart of losses shows since when: look at its data of that time, or start it again with a lower "
            f"learning rate. isthmus replay {run} draws all losses, too",
            f"learners/{name}",
        )
        for name, (lowest, now) in rising(time_views.loss_curves(c, at)).items()
    ][:NAMED_MAX]


def _log(c: RunHistory, at: float, now: float, run: str, status: Status | None) -> list[Notice]:
    heads = [head.version if head else 0 for head in status.heads] if status is not None else [0] * len(c.ends)
    count = c.rows.place(at)
    first = max(0, count - RECENT)
    lately, found = count - first, list[Notice]()
    for p, why in c.broken.items():
        newest = f" (its newest is {heads[p]})" if heads[p] > c.ends[p].version else ""
        found.append(
            Notice(
                f"the log of fragment {p} cannot be read beyond version {c.ends[p].version}{newest}: {why}",
                f"isthmus heal {run} --fragment {p} says what can be done, isthmus replay {run} --fragment {p} what is "
                "damaged",
                f"fragments/{p}",
            )
        )
    missed, turned = (
        round(c.rows.until(name, count) - c.rows.until(name, first)) for name in (f"flags&{QUORUM_MISSED}", "faults")
    )
    if missed > lately / 2:
        found.append(
            Notice(
                f"{missed} of the last {lately} rounds missed their quorum and merged what was in",
                "the learners' page says which learners are missing: start them again, or start the syncers again with "
                "--quorum K, where K is at most the number of learners",
                "learners",
            )
        )
    if turned > lately / 2:
        of = [r for r in time_views.reasons(c, at) if r["reason"] in REMEDIES]
        reasons = ", ".join(f"{r['reason']} ({r['why']})" if r["why"] else str(r["reason"]) for r in of)
        found.append(
            Notice(
                f"{turned} updates were rejected in the last {lately} rounds, by reason: {reasons}",
                f"their work is lost. The list of these rounds is linked, and isthmus explain {run} FRAGMENT/VERSION "
                "explains the rejections of each; the learners' page shows whose they are",
                "commits?only=rejected",
            )
        )
    for row in time_views.learners(c, at):
        if row["faults"] > LOST_SHARE * max(1, row["merged"] + row["faults"]) and row["faults"] >= RECENT:
            found.append(
                Notice(
                    f"{row['learner']}: {row['faults']} updates were rejected, {row['merged']} merged",
                    "its page lists its updates, each with the reason: its log says what to do about it",
                    f"learners/{row['learner']}",
                )
            )
    # An effect is not said beside its cause.
    caused = unserved(status) if status is not None else set()
    able = status is not None and any(status.hearing.syncers[name].able for name in status.syncers_live)
    stuck = _stuck(c, now, run, caused.union(status.standing)) if able and status is not None and status.live else []
    found += stuck or _standing(c, at, run, caused)
    return found


def _standing(c: RunHistory, at: float, run: str, caused: Collection[int]) -> list[Notice]:
    """Return a notice of fragments that stood still while most others were merged, whether or not learners train."""
    count, written, writer = c.rows.place(at), c.rows["written_at"], c.rows["writer"]
    last, since = list[int | None](), list[int | None]()
    for p in range(len(c.ends)):
        places = c.rows.of(p)
        made = int(np.searchsorted(places, count))
        last.append(int(places[made - 1]) if made else None)
        since.append(int(places[made - STANDS]) if made >= STANDS else None)

    def later(row: int, other: int) -> bool:
        return bool(written[row] - written[other] > (0.0 if writer[row] == writer[other] else APART_S))

    still = [p for p in standing(last, since, later) if p not in c.broken and p not in caused]
    if not still:
        return []
    return [
        Notice(
            stands(still),
            f"the syncers' logs say why, and isthmus heal {run} says whether the log is sound",
            f"fragments/{still[0]}",
        )
    ]


def _stuck(c: RunHistory, at: float, run: str, caused: Collection[int]) -> list[Notice]:
    """Return a notice of fragments that were not merged for long, but for those whose log cannot be read to its end.

    `caused`: fragments of which something else is said. Call it only while learners train and a syncer can serve.
    """
    count = len(c)
    if not count:
        return []
    usual = (at - c.run.header.created_at) * len(c.ends) / count
    limit = max(STUCK_LEAST_S, STUCK_PERIODS * usual)
    ages = enumerate(time_views.ages(c, math.inf, at))
    stuck = [p for p, age_s in ages if age_s is not None and age_s > limit and p not in c.broken and p not in caused]
    if not stuck:
        return []
    return [
        Notice(
            f"{named(stuck)} {agreeing(len(stuck), 'was', 'were')} not merged for over {limit:.0f} s (usual: "
            f"{usual:.0f} s)",
            f"the fragment's page shows which learners its round waits for. isthmus status {run} says whether a syncer "
            "serves it",
            f"fragments/{stuck[0]}",
        )
    ]
