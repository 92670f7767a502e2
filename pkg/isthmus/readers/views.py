"""What a page of a run shows, as plain data: of now, or of any moment of its life.

Everything here but `pieces` and `waits`, which read commits, is drawn from a `Chronicle` alone. No answer has more than
a few thousand numbers, however long a view looks back. Times are seconds since 1970 on the syncers' clocks.
"""

import asyncio
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import LogCorrupt
from isthmus.log import Log
from isthmus.readers.chronicle import BEAT, HEALED, LEARNER, QUORUM_MISSED, REACHED, Chronicle
from isthmus.reasons import HARMLESS
from isthmus.records.messages import PARTS
from isthmus.records.objects import CommitHeader

POINTS_MAX = 600
"""Of a line over time."""

LEAST = 30
"""Stretches that a line or a row has at least, however little has happened."""

CELLS_MAX = 4800
"""Of a picture with a row for each learner or fragment."""

LISTED = 100
"""Commits of one answer."""

PIECES_COMMITS = 300
"""Commits of a stretch of time that are read one by one, for what each learner did exactly."""

OPEN_READ = 8
"""Open rounds of a moment of the past whose commits are read, for whom they waited."""

ONLY = ("missed", "late", "rejected", "missing", "healed")
"""Kinds of commits to list: the quorum was missed, an update came too late, was turned away, somebody was missing, or a
fragment was healed."""

STORY_COMMITS = 60
"""Commits that are read for a learner's story."""

TOGETHER_S = 60.0
"""Fragments that change from one keeper to another within this are one takeover."""

LATELY_S = 60.0

Answer = dict[str, Any]


def span(c: Chronicle, now: float | None = None) -> tuple[float, float]:
    """Return from when to when the run has lived, as far as one knows."""
    began = c.run.header.created_at
    rows = c.rows
    last = float(rows["written_at"][-1]) if len(rows) else began
    heard = c.beats.whole(math.inf if now is None else now)
    spoke = c.beats.until(c.beats.end(heard - 1))[:, BEAT.index("step")] if heard and c.beats.things else np.array([])
    if now is not None and spoke.size and not np.isnan(spoke).all():
        last = max(last, min(now, _last_heard(c)))
    return began, max(began, last)


def _last_heard(c: Chronicle) -> float:
    there = np.flatnonzero(~np.isnan(c.beats.values[:, :, BEAT.index("step")]).all(axis=1))
    return c.beats.end(int(there[-1])) if there.size else c.beats.began


def until(c: Chronicle, at: float) -> NDArray[Any]:
    """Return the rows of commits written at or before a time."""
    rows = c.rows
    return rows[: int(np.searchsorted(rows["written_at"], at, side="right"))]


def heads(c: Chronicle, at: float) -> list[int]:
    """Return the version of each fragment at a time, as `Log.version_at` does."""
    found = np.zeros(len(c.ends), np.int64)
    rows = until(c, at)
    np.maximum.at(found, rows["fragment"], rows["version"])
    return [int(v) for v in found]


def totals(c: Chronicle, at: float) -> Answer:
    """Return what a run had come to at a time: exact, from the commits written by then."""
    rows = until(c, at)
    commits, inputs = len(rows), int(rows["inputs"].sum())
    healed = (rows["flags"] & HEALED) > 0
    missed = (rows["flags"] & QUORUM_MISSED) > 0
    expected = int(rows["expected"].sum())
    closings = np.bincount(rows["closed_by"][~healed], minlength=len(c.closings.known))
    waited = rows["waited_s"][~healed]
    return {
        "at": at,
        "commits": commits,
        "versions": heads(c, at),
        "updates": inputs,
        "fresh": int(rows["fresh"].sum()),
        "expected": expected,
        "participation": _share(expected - int(rows["missing"].sum()), expected),
        "tokens": int(_tokens(c, rows).sum()),
        "processed": int(np.nansum(_processed(c, c.reached.until(at)))),
        "bytes_up": int(rows["bytes"].sum()),
        "late": int(rows["late"].sum()),
        "rejected": int(rows["rejected"].sum()),
        "repeated": int(rows["repeated"].sum()),
        "quorum_missed": int(missed.sum()),
        "healed": int(healed.sum()),
        "closed_by": {name: int(closings[n]) for n, name in enumerate(c.closings.known) if name and closings[n]},
        "waited_s": {"median": _quantile(waited, 0.5), "p99": _quantile(waited, 0.99)},
        "last_commit_at": float(rows["written_at"][-1]) if commits else None,
        "learners": int((c.by_learner.until(at)[:, LEARNER.index("merged")] > 0).sum()),
        "syncers": len(np.unique(rows["writer"])),
    }


def reasons(c: Chronicle, at: float) -> list[Answer]:
    """Return how often updates were turned away up to a time, by reason, most often first."""
    sums = c.by_reason.until(at)
    found = [
        {"reason": name, "times": int(sums[n, 0]), "lost": name not in HARMLESS}
        for n, name in enumerate(c.reasons.known)
        if sums[n, 0]
    ]
    return sorted(found, key=lambda x: (not x["lost"], -int(x["times"])))


def series(c: Chronicle, begin: float, end: float, points: int = POINTS_MAX) -> Answer:
    """Return lines over time: sums or means of equal stretches, null where there was no commit."""
    rows = c.rows
    first, last = np.searchsorted(rows["written_at"], [begin, end])
    # A stretch without a commit says nothing: none is made so short that most are.
    points = max(1, min(points, POINTS_MAX, max(LEAST, int(last - first) // 4)))
    edges = np.linspace(begin, max(end, begin + 1e-3), points + 1)
    cut = np.searchsorted(rows["written_at"], edges, side="right")
    n = np.diff(cut)
    seconds = float(edges[1] - edges[0])
    expected, missing = _sums(rows["expected"], cut), _sums(rows["missing"], cut)
    closings = {
        name: _plain(_sums(rows["closed_by"] == number, cut)) for number, name in enumerate(c.closings.known) if name
    }
    return {
        "at": _plain(edges[1:]),
        "seconds": seconds,
        "commits": _plain(n),
        "tokens_per_s": _plain(_sums(_tokens(c, rows), cut) / seconds),
        "goodput": _goodput(c, edges[1:]),
        "bytes_up_per_s": _plain(_sums(rows["bytes"], cut) / seconds),
        "updates": _plain(_sums(rows["inputs"], cut)),
        "participation": _ratio(expected - missing, expected),
        "late": _plain(_sums(rows["late"], cut)),
        "rejected": _plain(_sums(rows["rejected"], cut)),
        "quorum_missed": _plain(_sums((rows["flags"] & QUORUM_MISSED) > 0, cut)),
        "waited_s": _ratio(_sums(rows["waited_s"], cut), n),
        "merge_s": _ratio(_sums(rows["merge_s"], cut), n),
        "publish_s": _ratio(_sums(rows["publish_s"], cut), n),
        "commit_s": _ratio(_sums(rows["commit_s"], cut), n),
        "closed_by": closings,
    }


def _tokens(c: Chronicle, rows: NDArray[Any]) -> NDArray[np.float64]:
    """Return the tokens merged by each commit, counted by its fragment's share of the parameters."""
    found: NDArray[np.float64] = rows["tokens"] * c.shares[rows["fragment"]]
    return found


def _processed(c: Chronicle, reached: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the tokens […, learners] that were trained by when learners had reached so far […, learners, fields], with
    those that a later life trained again; NaN where nothing is known."""
    names = len(c.learners.known)
    tokens = reached[..., :names, REACHED.index("tokens")].copy()
    life = reached[..., :names, REACHED.index("life")]
    before: dict[int, int] = {}
    for (n, incarnation), found in sorted(c.lives.items()):
        tokens[..., n] += np.where(life[..., n] == incarnation, before.get(n, 0) - found.tokens[0], 0)
        before[n] = before.get(n, 0) + found.tokens[1] - found.tokens[0]
    return tokens


def _goodput(c: Chronicle, ends: NDArray[np.float64]) -> list[float | None]:
    """Return, for each time, which share of the tokens that learners had processed was merged: by their updates' own
    counts, so that what they trained after the newest merged one is in neither."""
    if not len(c.learners.known):
        return [None] * len(ends)
    merged = np.cumsum(c.by_learner.values[:, :, LEARNER.index("tokens")].sum(axis=1))
    processed = np.nansum(_processed(c, _filled(c.reached.values)), axis=1)
    whole = np.array([c.by_learner.whole(float(t)) - 1 for t in ends])
    return _ratio(np.where(whole < 0, 0.0, merged[whole]), np.where(whole < 0, 0.0, processed[whole]))


def heard(c: Chronicle, begin: float, end: float, points: int = POINTS_MAX) -> Answer:
    """Return what learners said of themselves over time, as far as somebody listened: loss of each, tokens a second and
    goodput of all, and where their tokens went, as shares of what they processed."""
    count = len(c.learners.known)
    if not count:
        return {"at": [], "seconds": 0.0, "loss": {}, "goodput": [], "tokens_per_s": [], "parts": {}, "bytes_down": []}
    most = max(2, min(points, POINTS_MAX, CELLS_MAX // count))
    edges, found = c.beats.spans(begin, end, most)
    found = found[:, :count]
    held = _filled(found)
    processed = np.nansum(held[:, :, BEAT.index("processed")], axis=1)
    parts = {part: _ratio(np.nansum(held[:, :, BEAT.index(part)], axis=1), processed) for part in PARTS}
    step_s, step, tokens = (held[:, :, BEAT.index(name)] for name in ("step_s", "step", "tokens"))
    left = held[:, :, BEAT.index("left")] > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        speed = np.where(~left & (step > 0) & (step_s > 0), tokens / step / step_s, 0.0)
        # A learner that was not heard in this stretch trains nothing, as far as anybody knows.
        speed = np.where(np.isnan(found[:, :, BEAT.index("step")]), 0.0, speed)
    spoke = ~np.isnan(found[:, :, BEAT.index("step")]).all(axis=1)
    loss = found[:, :, BEAT.index("loss")]
    return {
        "at": _plain(edges[1:]),
        "seconds": float(edges[1] - edges[0]),
        "loss": {name: _plain(loss[:, n]) for n, name in enumerate(c.learners.known)},
        "tokens_per_s": _plain(np.where(spoke, np.nan_to_num(speed).sum(axis=1), math.nan)),
        "goodput": parts["merged"],
        "parts": parts,
        "bytes_down": _plain(_some(held[:, :, BEAT.index("bytes_down")])),
    }


def learners(c: Chronicle, at: float) -> list[Answer]:
    """Return a row for each learner: what was merged of it up to the last whole moment before a time, and what it last
    said."""
    sums, said, reached = c.by_learner.until(at), c.beats.until(at), c.reached.until(at)
    processed = _processed(c, reached)
    newest = dict.fromkeys(range(len(c.learners.known)), 0)
    for (n, incarnation), life in c.lives.items():
        if life.began <= at:
            newest[n] = max(newest[n], incarnation)
    found = []
    for n, name in enumerate(c.learners.known):
        row = dict(zip(LEARNER, (float(x) for x in sums[n]), strict=True))
        beat = dict(zip(BEAT, (None if math.isnan(x) else float(x) for x in said[n]), strict=True))
        own = dict(zip(REACHED, (None if math.isnan(x) else float(x) for x in reached[n]), strict=True))
        merged = max(row["merged"], 1.0)
        found.append({
            "learner": name,
            "life": max(newest[n], int(beat["life"] or 0)),
            **{key: int(row[key]) for key in LEARNER if not key.endswith("_s") and key != "weight"},
            "participation": _share(row["expected"] - row["missing"], row["expected"]),
            "train_s": row["train_s"] / merged,
            "upload_s": row["upload_s"] / merged,
            "fetch_s": row["fetch_s"] / merged,
            "wait_s": row["wait_s"] / merged,
            "weight": row["weight"] / merged,
            "step": own["step"],
            "processed": None if math.isnan(processed[n]) else float(processed[n]),
            "taken_at": own["taken_at"],
            "said": None if beat["step"] is None else beat,
        })  # fmt: skip
    return found


def lanes(c: Chronicle, begin: float, end: float) -> Answer:
    """Return for each learner what became of its rounds in each stretch of time: columns of equal width."""
    names = c.learners.known
    if not names:
        return {"edges": [begin, end], "learners": [], "lives": []}
    edges, found = c.by_learner.spans(begin, end, max(8, min(400, CELLS_MAX // len(names))))
    kept = {key: LEARNER.index(key) for key in ("expected", "merged", "fresh", "missing", "late", "rejected", "gone")}
    return {
        "edges": _plain(edges),
        "learners": [
            {"learner": name} | {key: [int(x) for x in found[:, n, field]] for key, field in kept.items()}
            for n, name in enumerate(names)
        ],
        "lives": [life for life in lives(c) if begin <= life["began"] <= end and life["incarnation"] > 1],
    }


async def pieces(log: Log, c: Chronicle, begin: float, end: float) -> list[Answer] | None:
    """Return what each learner did in a stretch of time, update by update; None where there are too many commits to
    read each of them. Of each piece: learner, what it did, from when to when, and with which update."""
    rows = c.rows
    first, last = (int(np.searchsorted(rows["written_at"], t)) for t in (begin, end))
    # What was trained in this time is merged a little later.
    last = min(len(rows), last + 2 * len(c.ends))
    if last - first > PIECES_COMMITS:
        return None
    found: list[Answer] = []
    headers = await asyncio.gather(*(_header(log, row) for row in rows[first:last]))
    for h in headers:
        if h is not None:
            found += [x for x in _pieces(h) if x["to"] >= begin and x["from"] <= end]
    return found


def _pieces(h: CommitHeader) -> list[Answer]:
    p, w = h.fragment, h.waited
    found: list[Answer] = []

    def piece(what: str, learner: str, begin: float, end: float, base: int) -> None:
        found.append({
            "what": what, "learner": learner, "from": begin, "to": max(begin, end), "fragment": p, "base": base,
            "version": h.version,
        })  # fmt: skip

    for i in h.inputs:
        piece("train", i.learner, i.taken_at - i.train_s, i.taken_at, i.base)
        piece("upload", i.learner, i.taken_at, i.arrived_at, i.base)
        piece("wait", i.learner, i.arrived_at, w.closed_at, i.base)
        piece("merged", i.learner, w.closed_at, h.written_at, i.base)
    for late in h.late:
        piece("late", late.learner, late.heard_at, late.heard_at, late.base)
    for r in h.rejected:
        piece("repeated" if r.reason in HARMLESS else "rejected", r.learner, r.at, r.at, r.base)
    for seen in w.seen:
        if seen.what in ("gone", "here"):
            piece(seen.what, seen.learner, w.opened_at + seen.at, w.opened_at + seen.at, h.version - 1)
    return found


async def story(log: Log, c: Chronicle, name: str, at: float) -> list[Answer]:
    """Return what the newest commits up to a time say of a learner, newest first: what became of it in each."""
    number = c.learners.find(name)
    spoken = (
        c.by_learner.values[: c.by_learner.place(at) + 1, number].any(axis=1) if number is not None else np.array([])
    )
    if not spoken.any():
        return []
    # Not of the newest commits of all: of those up to the last that had to do with it.
    last = min(at, c.by_learner.end(int(np.flatnonzero(spoken)[-1])))
    headers = await asyncio.gather(*(_header(log, row) for row in until(c, last)[-STORY_COMMITS:]))
    found: list[Answer] = []
    for h in reversed(headers):
        if h is None:
            continue
        w = h.waited
        entry: Answer = {"fragment": h.fragment, "version": h.version, "at": h.written_at}
        for i in h.inputs:
            if i.learner == name:
                total = sum(x.weight for x in h.inputs)
                found.append(entry | {
                    "fate": "merged" if i.base == h.version - 1 else "merged late", "base": i.base, "steps": i.steps,
                    "tokens": i.tokens, "share": i.weight / total, "upload_s": i.heard_at - i.taken_at,
                    "wait_s": w.closed_at - i.arrived_at, "clipped": list(i.clipped),
                })  # fmt: skip
        found += [
            entry | {"fate": "late", "base": x.base, "late_s": x.heard_at - w.closed_at}
            for x in h.late
            if x.learner == name
        ]
        found += [
            entry | {"fate": "repeated" if r.reason in HARMLESS else "rejected", "base": r.base, "reason": r.reason}
            for r in h.rejected
            if r.learner == name
        ]
        if name in w.missing:
            found.append(entry | {"fate": "missing", "base": None})
        if any(f.learner == name for f in w.passed):
            found.append(entry | {"fate": "passed", "base": None})
    return found[:LISTED]


def fragments(c: Chronicle, begin: float, end: float, at: float) -> Answer:
    """Return for each fragment its version and age at a time, and over time: versions made, how old the newest one was
    at the end of each stretch [s], and the share of expected learners that were in."""
    count = len(c.ends)
    rows = c.rows
    first, last = np.searchsorted(rows["written_at"], [begin, end])
    columns = max(8, min(240, CELLS_MAX // count, max(LEAST, int(last - first) // count)))
    edges = np.linspace(begin, max(end, begin + 1e-3), columns + 1)
    column = np.clip(np.searchsorted(edges, rows["written_at"], side="left") - 1, -1, columns - 1)
    inside = (rows["written_at"] > begin) & (rows["written_at"] <= end)
    cell = rows["fragment"].astype(np.int64) * columns + column
    made, expected, missing, inputs = (
        np.bincount(cell[inside], weights=weights, minlength=count * columns).reshape(count, columns)
        for weights in (
            np.ones(int(inside.sum())), rows["expected"][inside], rows["missing"][inside], rows["inputs"][inside],
        )
    )  # fmt: skip
    newest = np.full((count, columns + 1), c.run.header.created_at)
    before = rows[rows["written_at"] <= begin]
    np.maximum.at(newest[:, 0], before["fragment"], before["written_at"])
    np.maximum.at(newest, (rows["fragment"][inside], column[inside] + 1), rows["written_at"][inside])
    newest = np.maximum.accumulate(newest, axis=1)
    then = until(c, at)
    written = np.full(count, math.nan)
    written[then["fragment"]] = then["written_at"]  # of several of one fragment the last one stays
    versions = heads(c, at)
    return {
        "edges": _plain(edges),
        "fragments": [
            {
                "fragment": p,
                "version": versions[p],
                "age_s": None if math.isnan(written[p]) else max(0.0, at - float(written[p])),
                "size": c.run.layout.fragments[p].size,
                "made": [int(x) for x in made[p]],
                "inputs": [int(x) for x in inputs[p]],
                "ages_s": _plain(edges[1:] - newest[p, 1:]),
                "participation": _ratio(expected[p] - missing[p], expected[p]),
                "broken": c.broken.get(p, ""),
            }
            for p in range(count)
        ],
    }


def commits(
    c: Chronicle,
    at: float,
    *,
    fragment: int | None = None,
    closed_by: str = "",
    only: str = "",
    before: int | None = None,
) -> Answer:
    """Return the newest commits up to a time, newest first.

    `only`: those of one kind (see `ONLY`); `before`: a row's number, to go on after an earlier answer.
    """
    rows = until(c, at)
    rows = rows if before is None else rows[: max(0, before)]
    wanted = np.ones(len(rows), bool)
    if fragment is not None:
        wanted &= rows["fragment"] == fragment
    if closed_by:
        number = c.closings.find(closed_by)
        wanted &= rows["closed_by"] == number if number is not None else False
    if only == "missed":
        wanted &= (rows["flags"] & QUORUM_MISSED) > 0
    elif only == "healed":
        wanted &= (rows["flags"] & HEALED) > 0
    elif only:
        wanted &= rows[only] > 0
    places = np.flatnonzero(wanted)[::-1]
    return {
        "total": len(places),
        "before": int(places[LISTED - 1]) if len(places) > LISTED else None,
        "commits": [_commit(c, rows[int(place)]) for place in places[:LISTED]],
    }


def _commit(c: Chronicle, row: Any) -> Answer:
    flags = int(row["flags"])
    return {
        "fragment": int(row["fragment"]),
        "version": int(row["version"]),
        "written_at": float(row["written_at"]),
        "writer": c.writers.known[int(row["writer"])],
        "closed_by": c.closings.known[int(row["closed_by"])],
        "quorum_missed": bool(flags & QUORUM_MISSED),
        "healed": bool(flags & HEALED),
        **{key: int(row[key]) for key in ("inputs", "fresh", "expected", "missing", "late", "rejected", "tokens")},
        "waited_s": float(row["waited_s"]),
        "grace_s": float(row["grace_s"]),
    }


def syncers(c: Chronicle, at: float) -> Answer:
    """Return who wrote commits up to a time, what each keeps, and how long fragments stood still when their keeper
    changed. A fragment's keeper is who wrote its newest commit."""
    rows = until(c, at)
    keeper = np.full(len(c.ends), -1, np.int64)
    keeper[rows["fragment"]] = rows["writer"]
    found: list[Answer] = []
    for n, name in enumerate(c.writers.known):
        own = rows[rows["writer"] == n]
        if len(own):
            found.append({
                "syncer": name,
                "commits": len(own),
                "first_at": float(own["written_at"][0]),
                "last_at": float(own["written_at"][-1]),
                "keeps": [int(p) for p in np.flatnonzero(keeper == n)],
                "merge_s": float(own["merge_s"].mean()),
                "publish_s": float(own["publish_s"].mean()),
            })  # fmt: skip
    return {
        "syncers": sorted(found, key=lambda x: -float(x["last_at"])),
        "takeovers": _takeovers(c, rows),
        "restarts": _restarts(c, at),
    }


def _takeovers(c: Chronicle, rows: NDArray[Any]) -> list[Answer]:
    """Return the newest changes of keepers: from whom to whom, of which fragments, and how long each had no commit."""
    order = np.lexsort((rows["version"], rows["fragment"]))
    ordered = rows[order]
    same = ordered["fragment"][1:] == ordered["fragment"][:-1]
    places = np.flatnonzero(same & (ordered["writer"][1:] != ordered["writer"][:-1]))
    found: list[Answer] = []
    for place in places[np.argsort(-ordered["written_at"][places + 1], kind="stable")]:
        old, new = ordered[place], ordered[place + 1]
        stood_s = max(0.0, float(new["written_at"] - old["written_at"]))
        fragment = {"fragment": int(new["fragment"]), "version": int(new["version"]), "stood_s": stood_s}
        who = {"from": c.writers.known[int(old["writer"])], "to": c.writers.known[int(new["writer"])]}
        last = found[-1] if found else None
        if last is not None and who.items() <= last.items() and last["at"] - float(new["written_at"]) < TOGETHER_S:
            last["fragments"].append(fragment)
        elif len(found) < LISTED:
            found.append({"at": float(new["written_at"]), **who, "fragments": [fragment]})
        else:
            break
    for entry in found:
        stood = [f["stood_s"] for f in entry["fragments"]]
        entry |= {"stood_s": {"median": float(np.median(stood)), "largest": max(stood)}}
        entry["fragments"].sort(key=lambda f: -f["stood_s"])
    return found


def _restarts(c: Chronicle, at: float) -> list[Answer]:
    found = [life for life in lives(c) if life["incarnation"] > 1 and life["began"] <= at]
    return sorted(found, key=lambda x: -float(x["began"]))[:LISTED]


def lives(c: Chronicle) -> list[Answer]:
    """Return the lives of all learners, and how long each had been away before: between the last of its updates of
    the life before that was merged and the first step for the first of this one."""
    found: list[Answer] = []
    before: tuple[int, float] = (-1, math.nan)
    for (n, incarnation), life in sorted(c.lives.items()):
        away_s = max(0.0, life.began - before[1]) if before[0] == n else None
        before = n, life.last
        found.append({
            "learner": c.learners.known[n], "incarnation": incarnation, "began": life.began, "step": life.step,
            "last": life.last, "away_s": away_s,
        })  # fmt: skip
    return found


# --- a moment of the past ---------------------------------------------------------------------------------------------


def rounds_open(c: Chronicle, at: float) -> list[tuple[int, int, float]]:
    """Return (fragment, version, opened_at) of the rounds that were open at a time, longest first: those whose commits
    came later."""
    rows = c.rows
    later = rows[int(np.searchsorted(rows["written_at"], at, side="right")) :]
    # A round lasts for seconds or minutes: the next commit of each fragment is near.
    closed = later["written_at"] - later["commit_s"]
    opened = closed - later["waited_s"]
    there = later[(opened <= at) & (at < closed) & ((later["flags"] & HEALED) == 0)]
    found = [
        (int(r["fragment"]), int(r["version"]), float(r["written_at"]) - float(r["commit_s"]) - float(r["waited_s"]))
        for r in there
    ]
    return sorted(found, key=lambda x: x[2])


async def waits(log: Log, c: Chronicle, at: float) -> list[Answer]:
    """Return the rounds that were open at a time, and of the longest few whom they waited for, by their commits."""
    found: list[Answer] = [
        {"fragment": p, "version": version, "opened_at": opened, "waits_for": None}
        for p, version, opened in rounds_open(c, at)
    ]
    for entry in found[:OPEN_READ]:
        h = await _header_of(log, entry["fragment"], entry["version"])
        if h is not None:
            w = h.waited
            gone = {s.learner for s in w.seen if s.what == "gone" and w.opened_at + s.at <= at}
            here = {s.learner for s in w.seen if s.what == "here" and w.opened_at + s.at > at}
            later = {s.learner for s in w.seen if s.what == "gone" and w.opened_at + s.at > at}
            answered = {i.learner for i in h.inputs if i.arrived_at <= at and i.base == h.version - 1}
            passed = {f.learner for f in w.passed if f.at <= at}
            entry["waits_for"] = sorted((set(w.expected) | later) - gone - here - answered - passed)
    return found


def sentence(c: Chronicle, at: float, open_rounds: list[Answer]) -> str:
    """Return the state of a run at a moment of its past, in one sentence."""
    rows = until(c, at)
    if not len(rows):
        return "Nothing had been merged yet."
    lately = max(LATELY_S, c.run.pace.silence_s)
    known = c.by_learner.until(at)[:, LEARNER.index("merged")] > 0
    _, recent = c.by_learner.spans(at - lately, at, 1)
    active = recent[0, :, LEARNER.index("merged")] > 0
    known = known | active
    if not known.any():
        known = active
    said = f"{int(active.sum())} of {int(known.sum())} learners had something merged in the {lately:.0f} s before"
    waiting = [entry for entry in open_rounds if entry["waits_for"]]
    if waiting:
        said += ", " + "; ".join(_waiting(entry) for entry in waiting[:3])
        said += f" and {len(waiting) - 3} more" if len(waiting) > 3 else ""
    return said + "."


def _waiting(entry: Answer) -> str:
    names = entry["waits_for"]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"fragment {entry['fragment']} waited for {', '.join(names[:3])}{more}"


# --- one round --------------------------------------------------------------------------------------------------------


def round_picture(h: CommitHeader) -> Answer:
    """Return a round as it went: when each thing happened, in seconds since it was opened."""
    w = h.waited
    since = w.opened_at
    if h.healed is not None:
        return {"healed": True, "marks": [], "learners": []}
    quorum = w.quorum_s - w.boundary_s if w.boundary_s or w.quorum_s else math.nan
    closed = w.closed_at - since
    marks = [
        ("boundary", -w.boundary_s, "a learner's step boundary, which the round was opened for"),
        ("opened", 0.0, "opened: learners were called"),
        ("quorum", math.nan if w.quorum_missed else quorum, f"quorum: {w.quorum} fresh updates were in"),
        ("grace", math.nan if w.quorum_missed else quorum + w.grace_s, "end of the grace that was granted"),
        ("closed", closed, f"closed ({w.closed_by})"),
        ("merged", closed + w.merge_s, "merged"),
        ("written", h.written_at - since, "in the log"),
    ]
    rows: dict[str, Answer] = {
        name: {"learner": name, "fate": "missing", "expected": True} for name in sorted(w.expected)
    }
    for i in h.inputs:
        rows[i.learner] = {
            "learner": i.learner, "fate": "merged" if i.base == h.version - 1 else "merged late",
            "expected": i.learner in w.expected, "base": i.base, "incarnation": i.incarnation, "steps": i.steps,
            "tokens": i.tokens, "weight": i.weight / (sum(x.weight for x in h.inputs) or 1.0), "scale": i.scale,
            "clipped": list(i.clipped), "began": i.taken_at - i.train_s - since, "taken": i.taken_at - since,
            "heard": i.heard_at - since, "fetched": i.fetched_at - since, "arrived": i.arrived_at - since,
        }  # fmt: skip
    for passing in w.passed:
        rows.setdefault(passing.learner, {"learner": passing.learner, "expected": False})
        if rows[passing.learner].get("fate", "missing") == "missing":
            rows[passing.learner] |= {"fate": "passed", "passed": passing.at - since}
    for late in h.late:
        row = rows.setdefault(late.learner, {"learner": late.learner, "expected": False, "fate": "late"})
        if row["fate"] in ("missing", "passed", "late"):
            row |= {"fate": "late", "base": late.base, "heard": late.heard_at - since}
    return {
        "healed": False,
        "marks": [{"what": what, "at": at, "said": said} for what, at, said in marks if math.isfinite(at)],
        "learners": list(rows.values()),
        "quorum": w.quorum,
        "quorum_missed": w.quorum_missed,
        "grace_s": w.grace_s,
        "cap_s": w.cap_s,
        "closed_by": w.closed_by,
        "merge": h.dense.merge,
    }


async def _header(log: Log, row: Any) -> CommitHeader | None:
    return await _header_of(log, int(row["fragment"]), int(row["version"]))


async def _header_of(log: Log, p: int, version: int) -> CommitHeader | None:
    try:
        commit = await log.commit(p, version)
    except LogCorrupt:
        return None
    return None if commit is None else commit.header


# --- numbers ----------------------------------------------------------------------------------------------------------


def _sums(values: NDArray[Any], cut: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sums of values[cut[n]:cut[n + 1]]."""
    part = values[cut[0] : cut[-1]].astype(np.float64)
    cumulated = np.concatenate([[0.0], np.cumsum(part)])
    found: NDArray[np.float64] = np.diff(cumulated[cut - cut[0]])
    return found


def _ratio(over: NDArray[Any], under: NDArray[Any]) -> list[float | None]:
    with np.errstate(invalid="ignore", divide="ignore"):
        return _plain(np.where(under > 0, over / np.maximum(under, 1e-300), math.nan))


def _plain(values: NDArray[Any]) -> list[float | None]:
    """Return numbers as JSON has them: null for what is none."""
    return [float(x) if math.isfinite(x) else None for x in values.tolist()]


def _some(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sums along the second axis; NaN where nothing is known."""
    return np.where(np.isnan(values).all(axis=1), math.nan, np.nansum(values, axis=1))


def _filled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values with each unknown one replaced by the last that was known, along the first axis."""
    place = np.where(np.isnan(values), 0, np.arange(len(values))[:, None, None])
    np.maximum.accumulate(place, axis=0, out=place)
    return np.take_along_axis(values, place, axis=0)


def _share(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole else None


def _quantile(values: NDArray[Any], q: float) -> float | None:
    return float(np.quantile(values, q)) if len(values) else None
