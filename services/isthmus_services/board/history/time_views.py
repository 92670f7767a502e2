"""Views of a run over time, as plain data for a page: of the present, or of any past moment.

The views are drawn from a `RunHistory` alone; `commit_views` has the views of single commits. However long a view looks
back and however many commits there are, a line has at most `POINTS_MAX` points. A picture has at most `CELLS_MAX`
cells, or eight in each row if that is more. Times are seconds since 1970 on the syncers' clocks.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.format.records.messages import PARTS
from isthmus.inspect.explain import why_of
from isthmus.inspect.losses import Point
from isthmus.reasons import LOSSLESS, USUAL
from isthmus_services.board.history.history import BEAT, LEARNER, REACHED, RunHistory
from isthmus_services.board.history.rows import HEALED, QUORUM_MISSED
from isthmus_services.board.history.time_buckets import newest

POINTS_MAX = 600
"""Largest number of points of a line over time."""

LEAST = 30
"""A line or a row may have this many stretches, however few commits there are."""

CELLS_MAX = 4800
"""Largest number of cells of a picture with a row for each learner or fragment, if each row has eight or more."""

CURVE_POINTS = 128
"""Largest number of points of a curve in which a rising loss is looked for."""

LISTED = 100
"""Largest number of commits, or of other entries of a list, in one answer."""

WAITED_ROUNDS = 10_000
"""Number of newest commits from which times of waiting, merging and publishing are computed."""

MEANS = ("train_s", "upload_s", "fetch_s", "wait_s", "weight", "loss_sum", "loss_steps")
"""Fields of `LEARNER` that are sums for means."""

NAMES = {
    "late": "missed_round",
    "bytes": "bytes_merged",
    "rejected": "updates_rejected",
    "repeated": "rejected_without_loss",
}
"""Names in answers, by column. `late` and `rejected` in an answer are parts of the ledger, in tokens."""

ONLY = ("missed", "missed_round", "rejected", "missing", "healed")
"""Kinds of commits to list: the round missed its quorum, had an update that missed it, a rejected update or a missing
learner, or the commit healed its fragment."""

INCARNATIONS_DRAWN = 500

TOGETHER_S = 60.0
"""Fragments that change from one keeper to another within this time are one takeover [seconds]."""

LATELY_S = 60.0

NAMED_MAX = 3
"""Largest number of learners or fragments that a sentence names."""

Answer = dict[str, Any]


def span(c: RunHistory, now: float | None = None) -> tuple[float, float]:
    """Return the start of the run and its end so far, as far as they are known.

    The end is the last commit. If `now` is given, a later heartbeat counts too, but not beyond `now`.
    """
    began = c.run.header.created_at
    if len(c):
        began = min(began, float(c.rows["written_at"][0]))
    last = float(c.rows["written_at"][-1]) if len(c) else began
    if now is not None:
        last = max(last, min(now, _last_heard(c)))
    return began, max(began, last)


def _last_heard(c: RunHistory) -> float:
    there = np.flatnonzero(~np.isnan(c.beats.values[:, :, BEAT.index("step")]).all(axis=1))
    return c.beats.end(int(there[-1])) if there.size else c.beats.began


def heads(c: RunHistory, at: float) -> list[int]:
    """Return the version of each fragment at a time, as `Log.version_at` does."""
    places = _newest(c, at)
    versions = c.rows["version"]
    return [int(versions[place]) if place >= 0 else 0 for place in places]


def ages(c: RunHistory, at: float, now: float | None = None) -> list[float | None]:
    """Return the age of each fragment's newest version at a time [seconds]; None if the fragment was never merged.

    `now`: the time from which ages are counted, if not `at`. The two differ where a syncer's clock is ahead.
    """
    written, clock = c.rows["written_at"], at if now is None else now
    return [max(0.0, clock - float(written[place])) if place >= 0 else None for place in _newest(c, at)]


def _newest(c: RunHistory, at: float) -> list[int]:
    """Return the index of each fragment's newest row at a time, or -1."""
    count = c.rows.place(at)
    return [c.rows.newest(p, count) for p in range(len(c.ends))]


def by_fragment(c: RunHistory, at: float) -> tuple[list[int], list[int]]:
    """Return how many updates of each fragment were merged up to a time, and in how many commits."""
    count = c.rows.place(at)
    _, begins = c.rows.by_fragment()
    sums = c.rows.fragment_sums("inputs")
    inputs, commits = [0] * len(c.ends), [0] * len(c.ends)
    for p in range(len(begins) - 1):
        commits[p] = int(np.searchsorted(c.rows.of(p), count))
        inputs[p] = round(float(sums[begins[p] + commits[p]] - sums[begins[p]]))
    return inputs, commits


def as_of(c: RunHistory, at: float) -> float:
    """Return the time up to which sums by learner count at `at`.

    It is the end of the last bucket that had ended, but not later than `at` or the last commit.
    """
    moments, last = c.by_learner, float(c.rows["written_at"][-1]) if len(c) else c.by_learner.began
    ended = max(moments.began, moments.end(moments.whole(at) - 1)) if moments.covers(at) else at
    return min(at, last) if ended > last else min(at, ended)


def totals(c: RunHistory, at: float) -> Answer:
    """Return the totals of a run at a time: exact, from the commits written by then.

    Only `processed`, `kept`, `clipped` and `learners` are sums by learner, and count up to `as_of`.
    """
    rows, n = c.rows, c.rows.place(at)
    count = {
        name: round(rows.until(name, n))
        for name in ("inputs", "fresh", "expected", "missing", "tokens", "bytes", "late", "rejected", "repeated")
    }
    closings = {name: round(rows.until(f"closed_by={k}", n)) for k, name in enumerate(c.closings.known) if name}
    lately = slice(max(0, n - WAITED_ROUNDS), n)
    merged = c.by_learner.until(at)
    processed = float(np.nansum(_processed(c, c.reached.until(at))))
    waited = rows["waited_s"][lately][(rows["flags"][lately] & HEALED) == 0]
    return {
        "at": at,
        "commits": n,
        "versions": heads(c, at),
        "updates": count["inputs"],
        "fresh": count["fresh"],
        "expected": count["expected"],
        "participation": _share(rows.until("share", n), rows.until("shared", n)),
        "tokens": count["tokens"],
        "as_of": as_of(c, at),
        "processed": round(float(processed)),
        "kept": _share(min(processed, float(merged[:, LEARNER.index("tokens")].sum())), processed),
        "clipped": int(merged[:, LEARNER.index("clipped")].sum()),
        "bytes_merged": count["bytes"],
        "missed_round": count["late"],
        "updates_rejected": count["rejected"],
        "rejected_without_loss": count["repeated"],
        "quorum_missed": round(rows.until(f"flags&{QUORUM_MISSED}", n)),
        "healed": round(rows.until(f"flags&{HEALED}", n)),
        "closed_by": {name: times for name, times in closings.items() if times},
        "waited_s": {"median": _quantile(waited, 0.5), "p99": _quantile(waited, 0.99)},
        "last_commit_at": float(rows["written_at"][n - 1]) if n else None,
        "learners": int((merged[:, LEARNER.index("merged")] > 0).sum()),
        "syncers": sum(first <= at for first in c.first_written),
    }


def reasons(c: RunHistory, at: float) -> list[Answer]:
    """Return how often updates were rejected up to a time, by reason.

    Reasons by which work was lost come first; within each group, the most frequent reason comes first.
    """
    sums = c.by_reason.until(at)
    found = [
        {
            "reason": name,
            "times": int(sums[n, 0]),
            "work_lost": name not in LOSSLESS,
            "usual": name in USUAL,
            "why": why_of(name),
        }
        for n, name in enumerate(c.reasons.known)
        if sums[n, 0]
    ]
    return sorted(found, key=lambda x: (not x["work_lost"], -int(x["times"])))


def series(c: RunHistory, begin: float, end: float, points: int = POINTS_MAX) -> Answer:
    """Return lines over time: sums or means over equal stretches. A mean over a stretch without commits is None."""
    rows = c.rows
    first, last = np.searchsorted(rows["written_at"], [begin, end])
    # A stretch without a commit shows nothing, so stretches are not made so short that most have none.
    points = max(1, min(points, POINTS_MAX, max(LEAST, int(last - first) // 4)))
    edges = np.linspace(begin, max(end, begin + 1e-3), points + 1)
    cut = np.searchsorted(rows["written_at"], edges, side="right")
    n = np.diff(cut)
    seconds = float(edges[1] - edges[0])

    def sums(name: str) -> NDArray[np.float64]:
        return np.diff(rows.sums(name)[cut])

    processed = np.nansum(_processed(c, newest(c.reached.values)), axis=1)
    return {
        "at": _plain(edges[1:]),
        "seconds": seconds,
        "commits": _plain(n),
        "tokens_per_s": _plain(sums("tokens") / seconds),
        "processed_per_s": _plain(np.maximum(np.diff(_processed_by(c, processed, edges)), 0.0) / seconds),
        "kept": _kept(c, processed, edges[1:]),
        "bytes_merged_per_s": _plain(sums("bytes") / seconds),
        "updates": _plain(sums("inputs")),
        "participation": _ratio(sums("share"), sums("shared")),
        "missed_round": _plain(sums("late")),
        "updates_rejected": _plain(sums("rejected")),
        "quorum_missed": _plain(sums(f"flags&{QUORUM_MISSED}")),
        **{name: _ratio(sums(name), n) for name in ("waited_s", "merge_s", "publish_s", "commit_s", "period")},
        "closed_by": {name: _plain(sums(f"closed_by={k}")) for k, name in enumerate(c.closings.known) if name},
    }


def _processed(c: RunHistory, reached: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the tokens […, learners] that learners had processed at `reached` […, learners, fields].

    This is `Reached.processed` for whole arrays. NaN where nothing is known.
    """
    names = len(c.learners.known)
    tokens = reached[..., :names, REACHED.index("tokens_seen")].copy()
    known = reached[..., :names, REACHED.index("incarnation")]
    for n, of in c.trained_again().items():
        for incarnation, again in of.items():
            if again:
                tokens[..., n] += np.where(known[..., n] == incarnation, again, 0)
    return tokens


def _processed_by(c: RunHistory, processed: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the tokens that learners had processed by each time, between the ends of time buckets in proportion.

    `processed`: these tokens by the end of each bucket.
    """
    buckets = c.reached
    ends = np.minimum(buckets.began + buckets.width * np.arange(buckets.most + 1), span(c)[1])
    found: NDArray[np.float64] = np.interp(times, ends, np.append(0.0, processed))
    return found


def losses(c: RunHistory, begin: float, end: float, points: int = POINTS_MAX) -> Answer:
    """Return the mean loss of each learner's merged updates over equal stretches; None where no update states one."""
    count = len(c.learners.known)
    if not count:
        return {"at": [], "seconds": 0.0, "learners": {}}
    # As in `series`, stretches are not made so short that most have no commit.
    first, last = np.searchsorted(c.rows["written_at"], [begin, end])
    most = max(2, min(points, POINTS_MAX, CELLS_MAX // count, max(LEAST, int(last - first) // 4)))
    edges, found = c.by_learner.spans(begin, end, most)
    means = _mean_losses(found)
    return {
        "at": _plain(edges[1:]),
        "seconds": float(edges[1] - edges[0]),
        "learners": {name: _plain(means[:, n]) for n, name in enumerate(c.learners.known)},
    }


def loss_curves(c: RunHistory, at: float) -> dict[str, list[Point]]:
    """Return by learner the mean losses of its merged updates over equal stretches of time that had ended by `at`.

    A curve has at most `CURVE_POINTS` points. Learners whose updates state no loss are left out.
    """
    buckets = c.by_learner
    there = np.flatnonzero(buckets.values[: buckets.whole(at), :, LEARNER.index("loss_steps")].any(axis=1))
    count = int(there[-1]) + 1 if there.size else 0
    each = max(1, math.ceil(count / CURVE_POINTS))
    starts = range(0, count, each)
    means = [_mean_losses(buckets.over(start, min(start + each, count))) for start in starts]
    found: dict[str, list[Point]] = {}
    for start, row in zip(starts, means, strict=True):
        for name, loss in zip(c.learners.known, row.tolist(), strict=False):
            if not math.isnan(loss):
                found.setdefault(name, []).append(Point(buckets.end(start), loss))
    return found


def _mean_losses(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean losses […, learners] of sums […, learners, fields of `LEARNER`]; NaN where there is none."""
    loss, steps = (sums[..., LEARNER.index(name)] for name in ("loss_sum", "loss_steps"))
    means: NDArray[np.float64] = np.where(steps > 0, loss / np.maximum(steps, 1.0), math.nan)
    return means


def _kept(c: RunHistory, processed: NDArray[np.float64], ends: NDArray[np.float64]) -> list[float | None]:
    """Return, for each time, the share of the tokens processed by learners that was merged.

    Both are taken from the counts in merged updates, so neither has the work after a learner's newest merged update.
    """
    if not len(c.learners.known):
        return [None] * len(ends)
    merged = np.cumsum(c.by_learner.values[:, :, LEARNER.index("tokens")].sum(axis=1))
    ended = np.array([c.by_learner.whole(float(t)) - 1 for t in ends])
    known = np.array([c.reached.whole(float(t)) - 1 for t in ends])
    return _ratio(np.where(ended < 0, 0.0, merged[ended]), np.where(known < 0, 0.0, processed[known]))


def heard(c: RunHistory, begin: float, end: float, points: int = POINTS_MAX) -> Answer:
    """Return the learners' heartbeats over time, for as long as a board listened.

    These are the shares of processed tokens by what became of them, and the bytes fetched.
    """
    count = len(c.learners.known)
    if not count:
        return {"at": [], "seconds": 0.0, "parts": {}, "bytes_down": []}
    most = max(2, min(points, POINTS_MAX, CELLS_MAX // count))
    edges, found = c.beats.spans(begin, end, most)
    held = _filled(found[:, :count])
    processed = np.nansum(held[:, :, BEAT.index("processed")], axis=1)
    parts = {part: _ratio(np.nansum(held[:, :, BEAT.index(part)], axis=1), processed) for part in PARTS}
    return {
        "at": _plain(edges[1:]),
        "seconds": float(edges[1] - edges[0]),
        "parts": parts,
        "bytes_down": _plain(_some(held[:, :, BEAT.index("bytes_down")])),
    }


def learners(c: RunHistory, at: float) -> list[Answer]:
    """Return a row for each learner: its sums over the buckets that had ended by a time, and its last heartbeat."""
    sums, said, reached = c.by_learner.until(at), c.beats.until(at), c.reached.until(at)
    losses, processed = c.losses.until(at)[:, Point._fields.index("loss")], _processed(c, reached)
    highest = dict.fromkeys(range(len(c.learners.known)), 0)
    for (n, incarnation), one in c.incarnations.items():
        if one.began <= at:
            highest[n] = max(highest[n], incarnation)
    found = []
    for n, name in enumerate(c.learners.known):
        row = dict(zip(LEARNER, (float(x) for x in sums[n]), strict=True))
        beat = dict(zip(BEAT, (None if math.isnan(x) else float(x) for x in said[n]), strict=True))
        own = dict(zip(REACHED, (None if math.isnan(x) else float(x) for x in reached[n]), strict=True))
        merged, loss = max(row["merged"], 1.0), float(losses[n])
        # A board that did not listen for a while has heard less than the log says.
        known = [(x["incarnation"], x["step"]) for x in (own, beat) if None not in (x["incarnation"], x["step"])]
        found.append({
            "learner": name,
            "incarnation": max(highest[n], int(beat["incarnation"] or 0)),
            **{NAMES.get(key, key): round(float(row[key])) for key in LEARNER if key not in MEANS},
            "participation": _share(row["there"], row["expected"]),
            "train_s": row["train_s"] / merged,
            "upload_s": row["upload_s"] / merged,
            "fetch_s": row["fetch_s"] / merged,
            "wait_s": row["wait_s"] / merged,
            "weight_a_round": row["weight"] / merged,
            "step": max(known, default=(0.0, None))[1],
            "processed": None if math.isnan(processed[n]) else float(processed[n]),
            "taken_at": own["taken_at"],
            "loss": None if math.isnan(loss) else loss,
            "said": None if beat["step"] is None else beat,
        })  # fmt: skip
    return found


def lanes(c: RunHistory, begin: float, end: float) -> Answer:
    """Return, for each learner, what became of its rounds in columns of equal width; and the restarts of learners."""
    names = c.learners.known
    if not names:
        return {"edges": [begin, end], "learners": [], "incarnations": []}
    edges, found = c.by_learner.spans(begin, end, max(8, min(400, CELLS_MAX // len(names))))
    columns = ("expected", "merged", "missing", "late", "rejected")
    kept = {NAMES.get(key, key): LEARNER.index(key) for key in columns}
    return {
        "edges": _plain(edges),
        "learners": [
            {"learner": name} | {key: [int(x) for x in found[:, n, field]] for key, field in kept.items()}
            for n, name in enumerate(names)
        ],
        "incarnations": [x for x in incarnations(c) if begin <= x["began"] <= end and x["incarnation"] > 1][
            -INCARNATIONS_DRAWN:
        ],
    }


def fragments(c: RunHistory, begin: float, end: float, at: float, now: float | None = None) -> Answer:
    """Return each fragment's version and age at `at`, and columns of equal width from `begin` to `end`.

    A column has the number of versions made, the updates merged, the age of the newest version at its end [seconds],
    and the share of expected learners that were not missing. `now`: see `ages`.
    """
    count, rows = len(c.ends), c.rows
    first, last = np.searchsorted(rows["written_at"], [begin, end])
    columns = max(8, min(240, CELLS_MAX // count, max(LEAST, int(last - first) // count)))
    edges = np.linspace(begin, max(end, begin + 1e-3), columns + 1)
    _, begins = rows.by_fragment()
    newest, versions, old = _newest(c, at), rows["version"], ages(c, at, now)
    found = []
    for p in range(count):
        places = rows.of(p)
        times = rows["written_at"][places]
        cut = np.searchsorted(times, edges, side="right")
        cut[0] = np.searchsorted(times, begin, side="right")
        sums = {
            name: np.diff(rows.fragment_sums(name)[cut + (begins[p] if len(places) else 0)])
            for name in ("inputs", "share", "shared")
        }
        before = np.concatenate([[c.run.header.created_at], times])[cut[1:]]
        found.append({
            "fragment": p,
            "version": int(versions[newest[p]]) if newest[p] >= 0 else 0,
            "age_s": old[p],
            "size": c.run.layout.fragments[p].size,
            "made": [int(x) for x in np.diff(cut)],
            "inputs": [int(x) for x in sums["inputs"]],
            "ages_s": _plain(edges[1:] - before),
            "participation": _ratio(sums["share"], sums["shared"]),
            "broken": c.broken.get(p, ""),
        })  # fmt: skip
    return {"edges": _plain(edges), "fragments": found}


def commits(
    c: RunHistory,
    at: float,
    *,
    fragment: int | None = None,
    closed_by: str = "",
    only: str = "",
    before: int | None = None,
) -> Answer:
    """Return the newest commits up to a time, newest first.

    `only`: a kind of commits (see `ONLY`); `before`: the `before` of an earlier answer, to go on after that answer.
    """
    rows, count = c.rows, c.rows.place(at)
    chosen = np.arange(count) if fragment is None else rows.of(fragment)
    chosen = chosen[chosen < count]
    wanted = np.ones(len(chosen), bool)
    if closed_by:
        number = c.closings.find(closed_by)
        wanted &= rows["closed_by"][chosen] == number if number is not None else False
    if only in ("missed", "healed"):
        wanted &= (rows["flags"][chosen] & (QUORUM_MISSED if only == "missed" else HEALED)) > 0
    elif only == "rejected":
        wanted &= (rows["rejected"][chosen] > 0) | (rows["faults"][chosen] > 0)
    elif only:
        wanted &= rows["late" if only == "missed_round" else only][chosen] > 0
    matching = chosen[wanted][::-1]
    places = matching if before is None else matching[matching < before]
    return {
        "total": len(matching),
        "before": int(places[LISTED - 1]) if len(places) > LISTED else None,
        "commits": [_commit(c, int(place)) for place in places[:LISTED]],
    }


def _commit(c: RunHistory, place: int) -> Answer:
    rows, flags = c.rows, int(c.rows["flags"][place])
    whole = ("fragment", "version", "inputs", "fresh", "expected", "missing", "late", "rejected")
    return {
        **{NAMES.get(name, name): int(rows[name][place]) for name in whole},
        **{name: float(rows[name][place]) for name in ("written_at", "tokens", "waited_s", "grace_s", "period")},
        "writer": c.writers.known[int(rows["writer"][place])],
        "closed_by": c.closings.known[int(rows["closed_by"][place])],
        "quorum_missed": bool(flags & QUORUM_MISSED),
        "healed": bool(flags & HEALED),
    }


def syncers(c: RunHistory, at: float) -> Answer:
    """Return the syncers that wrote commits up to a time, the fragments that each keeps, and takeovers and restarts.

    A fragment's keeper is the syncer that wrote its newest commit. A takeover has how long fragments stood still when
    their keeper changed. Restarts are those of learners.
    """
    rows, n = c.rows, c.rows.place(at)
    writers = rows["writer"][:n]
    keepers: dict[int, list[int]] = {}
    for p, place in enumerate(_newest(c, at)):
        if place >= 0:
            keepers.setdefault(int(writers[place]), []).append(p)
    found: list[Answer] = []
    known = sorted(range(len(c.writers.known)), key=lambda k: -c.first_written[k])
    for number in [k for k in known if c.first_written[k] <= at][:LISTED]:
        own = np.flatnonzero(writers == number)
        if len(own):
            found.append({
                "syncer": c.writers.known[number],
                "commits": len(own),
                "first_at": float(rows["written_at"][own[0]]),
                "last_at": float(rows["written_at"][own[-1]]),
                "keeps": keepers.get(number, []),
                "merge_s": float(rows["merge_s"][own[-WAITED_ROUNDS:]].mean()),
                "publish_s": float(rows["publish_s"][own[-WAITED_ROUNDS:]].mean()),
            })  # fmt: skip
    return {
        "syncers": sorted(found, key=lambda x: -float(x["last_at"])),
        "takeovers": _takeovers(c, n),
        "restarts": _restarts(c, at),
    }


def _takeovers(c: RunHistory, count: int) -> list[Answer]:
    """Return the newest changes of keepers: both syncers, the fragments, and how long each fragment had no commit."""
    rows = c.rows
    order, _ = rows.by_fragment()
    writers, fragments = rows["writer"][order], rows["fragment"][order]
    changes = np.flatnonzero((fragments[1:] == fragments[:-1]) & (writers[1:] != writers[:-1]) & (order[1:] < count))
    times = rows["written_at"][order]
    found: list[Answer] = []
    for k in changes[np.argsort(-times[changes + 1], kind="stable")].tolist():
        at, stood_s = float(times[k + 1]), max(0.0, float(times[k + 1] - times[k]))
        version = int(rows["version"][order[k + 1]])
        fragment = {"fragment": int(fragments[k]), "version": version, "stood_s": stood_s}
        who = {"from": c.writers.known[int(writers[k])], "to": c.writers.known[int(writers[k + 1])]}
        last = found[-1] if found else None
        if last is not None and who.items() <= last.items() and last["at"] - at < TOGETHER_S:
            last["fragments"].append(fragment)
        elif len(found) < LISTED:
            found.append({"at": at, **who, "fragments": [fragment]})
        else:
            break
    for entry in found:
        stood = [f["stood_s"] for f in entry["fragments"]]
        entry |= {"stood_s": {"median": float(np.median(stood)), "largest": max(stood)}}
        entry["fragments"].sort(key=lambda f: -f["stood_s"])
    return found


def _restarts(c: RunHistory, at: float) -> list[Answer]:
    found = [one for one in incarnations(c) if one["incarnation"] > 1 and one["began"] <= at]
    return sorted(found, key=lambda x: -float(x["began"]))[:LISTED]


def incarnations(c: RunHistory) -> list[Answer]:
    """Return the incarnations of all learners, and how long the learner had been away before each [seconds].

    That is from when the last merged update of the incarnation before was taken, until training began for the first
    merged update of this one.
    """
    found: list[Answer] = []
    before: tuple[int, float] = (-1, math.nan)
    for (n, incarnation), one in sorted(c.incarnations.items()):
        away_s = max(0.0, one.began - before[1]) if before[0] == n else None
        before = n, one.last
        found.append({
            "learner": c.learners.known[n], "incarnation": incarnation, "began": one.began, "step": one.step,
            "last": one.last, "away_s": away_s,
        })  # fmt: skip
    return found


# --- a moment of the past ---------------------------------------------------------------------------------------------


def rounds_open(c: RunHistory, at: float) -> list[tuple[int, int, float]]:
    """Return (fragment, version, opened_at) of the rounds that were open at a time, longest first.

    They are known only from their commits, which came later.
    """
    rows, count = c.rows, c.rows.place(at)
    found = []
    for p in range(len(c.ends)):
        places = rows.of(p)
        following = int(np.searchsorted(places, count))
        if following < len(places) and not rows["flags"][places[following]] & HEALED:
            place = places[following]
            closed = float(rows["written_at"][place] - rows["commit_s"][place])
            opened = closed - float(rows["waited_s"][place])
            if opened <= at < closed:
                found.append((p, int(rows["version"][place]), opened))
    return sorted(found, key=lambda x: x[2])


def sentence(c: RunHistory, at: float, open_rounds: list[Answer]) -> str:
    """Return the state of a run at a past moment, in one sentence."""
    if not c.rows.place(at):
        return "Nothing had been merged yet."
    moments = c.by_learner
    # Only buckets that had ended by then count, since the bucket of this time also has later events.
    last = moments.whole(at)
    first = max(0, moments.whole(at - max(LATELY_S, c.run.pace.silence_s, 2 * moments.width)))
    if not last:
        return f"The run has just begun: {c.rows.place(at):,} commits so far."
    lately = at - max(moments.began, moments.end(first - 1))
    active = moments.over(first, last)[:, LEARNER.index("merged")] > 0
    known = moments.until(at)[:, LEARNER.index("merged")] > 0
    said = f"{int(active.sum())} of {int(known.sum())} learners had something merged in the {lately:.0f} s before"
    waiting = [entry for entry in open_rounds if entry["waits_for"]]
    if waiting:
        said += ", " + "; ".join(_waiting(entry) for entry in waiting[:NAMED_MAX])
        said += f" and {len(waiting) - NAMED_MAX} more" if len(waiting) > NAMED_MAX else ""
    return said + "."


def _waiting(entry: Answer) -> str:
    return f"fragment {entry['fragment']} waited for {named(entry['waits_for'])}"


def named(names: Sequence[str]) -> str:
    """Return a text with the first few names and the number of the others."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


# --- numbers ----------------------------------------------------------------------------------------------------------


def _ratio(over: NDArray[Any], under: NDArray[Any]) -> list[float | None]:
    with np.errstate(invalid="ignore", divide="ignore"):
        return _plain(np.where(under > 0, over / np.maximum(under, 1e-300), math.nan))


def _plain(values: NDArray[Any]) -> list[float | None]:
    """Return the values as JSON can hold them: None for NaN and infinity."""
    return [float(x) if math.isfinite(x) else None for x in values.tolist()]


def _some(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sums along the second axis without the NaNs; NaN where all values are."""
    return np.where(np.isnan(values).all(axis=1), math.nan, np.nansum(values, axis=1))


def _filled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values with each NaN replaced by the last number before it along the first axis, if there is one."""
    place = np.where(np.isnan(values), 0, np.arange(len(values))[:, None, None])
    np.maximum.accumulate(place, axis=0, out=place)
    return np.take_along_axis(values, place, axis=0)


def _share(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole else None


def _quantile(values: NDArray[Any], q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None
