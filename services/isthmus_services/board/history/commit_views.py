"""Views of single commits, as plain data for a page: a round as a picture, learners' activities and stories.

The commits are read from the log one by one, so their number is limited. Times are seconds since 1970 on the syncers'
clocks, except in the picture of a round.
"""

import asyncio
import math

import numpy as np

from isthmus.errors import LogCorrupt
from isthmus.format.records.objects import CommitHeader
from isthmus.log import Log
from isthmus.reasons import LOSSLESS
from isthmus_services.board.history.history import RunHistory
from isthmus_services.board.history.time_views import LISTED, Answer, rounds_open

PIECES_COMMITS = 300
"""Largest number of commits in a stretch of time for which `pieces` reads each commit."""

OPEN_READ = 8
"""Number of rounds open at a past moment whose commits are read, to find the learners that they waited for."""

STORY_COMMITS = 60
"""Number of commits that are read for a learner's story."""

INSTANT_S = 1e-3
"""Tolerance in the comparison of a round's closing with the end of its grace [seconds]."""

# --- one commit -------------------------------------------------------------------------------------------------------


def told(h: CommitHeader) -> Answer:
    """Return the fields of a commit header that pages show or need for links."""
    total = sum(i.weight for i in h.inputs) or 1.0
    return {
        "writer": h.writer,
        "written_at": h.written_at,
        "opened_at": h.waited.opened_at,
        "closed_at": h.waited.closed_at,
        "inputs": [
            {
                "learner": i.learner, "base": i.base, "incarnation": i.incarnation, "steps": i.steps,
                "tokens": i.tokens, "bytes": i.bytes, "share": i.weight / total, "clipped": list(i.clipped),
                "taken_at": i.taken_at,
            }
            for i in h.inputs
        ],
        "missed_round": [{"learner": x.learner, "base": x.base, "heard_at": x.heard_at} for x in h.late],
        "rejections": [
            {"learner": r.learner, "base": r.base, "reason": r.reason, "count": r.count, "at": r.at} for r in h.rejected
        ],
        "missing": list(h.waited.missing),
        "passed": [f.learner for f in h.waited.passed],
        "healed": h.healed is not None,
    }  # fmt: skip


def round_picture(h: CommitHeader) -> Answer:
    """Return the course of a round: when each event happened, in seconds since the round was opened."""
    w = h.waited
    since = w.opened_at
    if h.healed is not None:
        return {"healed": True, "marks": [], "learners": []}
    quorum = w.quorum_s - w.boundary_s if w.boundary_s or w.quorum_s else math.nan
    closed = w.closed_at - since
    enough = "update was" if w.quorum == 1 else "updates were"
    unused = "" if w.quorum_missed or quorum + w.grace_s <= closed + INSTANT_S else ": not waited for"
    marks = [
        ("boundary", -w.boundary_s, "a learner's step boundary, which the round was opened for"),
        ("opened", 0.0, "opened: learners were called"),
        ("quorum", math.nan if w.quorum_missed else quorum, f"quorum: {w.quorum} fresh {enough} in"),
        ("grace", math.nan if w.quorum_missed else quorum + w.grace_s, f"end of the grace that was granted{unused}"),
        ("closed", closed, f"closed ({w.closed_by})"),
        ("merged", closed + w.merge_s, "merged"),
        ("published", closed + w.merge_s + w.publish_s, "published: the new value is in the store"),
        ("written", h.written_at - since, "in the log: the commit counts"),
    ]
    total = sum(i.weight for i in h.inputs) or 1.0
    # A learner may have two updates in a round: one that was too late for the round before, and one for this round.
    rows: list[Answer] = [
        {
            "learner": i.learner, "fate": "merged" if i.base == h.version - 1 else "merged next round",
            "expected": i.learner in w.expected, "base": i.base, "incarnation": i.incarnation, "steps": i.steps,
            "tokens": i.tokens, "weight": i.weight / total, "scale": i.scale, "clipped": list(i.clipped),
            "began": i.taken_at - i.train_s - since, "taken": i.taken_at - since, "heard": i.heard_at - since,
            "fetched": i.fetched_at - since, "arrived": i.arrived_at - since,
        }
        for i in h.inputs
    ]  # fmt: skip
    merged = {row["learner"] for row in rows if row["fate"] == "merged"}
    rows += [
        {"learner": late.learner, "fate": "missed_round", "expected": late.learner in w.expected, "base": late.base,
         "heard": late.heard_at - since}
        for late in h.late
    ]  # fmt: skip
    told = merged | {late.learner for late in h.late}
    passed = {p.learner: p.at - since for p in w.passed if p.learner not in told}
    rows += [
        {"learner": name, "fate": "passed", "expected": name in w.expected, "passed": at} for name, at in passed.items()
    ]
    rows += [
        {"learner": name, "fate": "missing", "expected": True}
        for name in w.expected
        if name not in told and name not in passed
    ]
    rows.sort(key=lambda row: (str(row["learner"]), row.get("base", -1)))
    return {
        "healed": False,
        "marks": [
            {"what": what, "at": at, "said": said}
            for what, at, said in sorted(marks, key=lambda mark: mark[1])
            if math.isfinite(at)
        ],
        "learners": rows,
        "quorum": w.quorum,
        "quorum_missed": w.quorum_missed,
        "grace_s": w.grace_s,
        "cap_s": w.cap_s,
        "closed_by": w.closed_by,
        "merge": h.dense.merge,
    }


# --- several commits --------------------------------------------------------------------------------------------------


async def waits(log: Log, c: RunHistory, at: float) -> list[Answer]:
    """Return the rounds that were open at a time, longest first.

    For the first `OPEN_READ` rounds, also return the learners that they waited for, according to their commits.
    """
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


async def pieces(log: Log, c: RunHistory, begin: float, end: float) -> list[Answer] | None:
    """Return each learner's activities in a stretch of time, update by update; None if it has too many commits to read.

    Each piece has the learner, the activity, its start and end, and the update.
    """
    rows = c.rows
    first, last = (int(np.searchsorted(rows["written_at"], t)) for t in (begin, end))
    if last - first > PIECES_COMMITS:
        return None
    # Work done in this stretch is merged a little later.
    last = min(len(rows), last + min(PIECES_COMMITS, 2 * len(c.ends)))
    found: list[Answer] = []
    headers = await asyncio.gather(*(_header(log, c, place) for place in range(first, last)))
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
        piece("missed_round", late.learner, late.heard_at, late.heard_at, late.base)
    for r in h.rejected:
        piece("repeated" if r.reason in LOSSLESS else "rejected", r.learner, r.at, r.at, r.base)
    for seen in w.seen:
        if seen.what in ("gone", "here"):
            piece(seen.what, seen.learner, w.opened_at + seen.at, w.opened_at + seen.at, h.version - 1)
    return found


async def story(log: Log, c: RunHistory, name: str, at: float) -> list[Answer]:
    """Return what the newest commits up to a time record about a learner and its updates, newest first."""
    number = c.learners.find(name)
    there = c.by_learner.values[: c.by_learner.whole(at) + 1]
    spoken = there[:, number].any(axis=1) if number is not None else np.array([])
    if not spoken.any():
        return []
    # Read the commits up to the last time bucket in which the learner occurs, not the newest commits of the run.
    last = min(at, c.by_learner.end(int(np.flatnonzero(spoken)[-1])))
    count = c.rows.place(last)
    headers = await asyncio.gather(*(_header(log, c, n) for n in range(max(0, count - STORY_COMMITS), count)))
    found: list[Answer] = []
    for h in reversed(headers):
        if h is None:
            continue
        w = h.waited
        entry: Answer = {"fragment": h.fragment, "version": h.version, "at": h.written_at}
        for i in h.inputs:
            if i.learner == name:
                total = sum(x.weight for x in h.inputs) or 1.0
                found.append(entry | {
                    "fate": "merged" if i.base == h.version - 1 else "merged next round", "base": i.base,
                    "steps": i.steps, "tokens": i.tokens, "share": i.weight / total,
                    "upload_s": i.heard_at - i.taken_at, "wait_s": w.closed_at - i.arrived_at,
                    "clipped": list(i.clipped),
                })  # fmt: skip
        found += [
            entry | {"fate": "missed_round", "base": x.base, "missed_by_s": x.heard_at - w.closed_at}
            for x in h.late
            if x.learner == name
        ]
        found += [
            entry | {"fate": "repeated" if r.reason in LOSSLESS else "rejected", "base": r.base, "reason": r.reason}
            for r in h.rejected
            if r.learner == name
        ]
        if name in w.missing:
            found.append(entry | {"fate": "missing", "base": None})
        if any(f.learner == name for f in w.passed):
            found.append(entry | {"fate": "passed", "base": None})
    return found[:LISTED]


async def _header(log: Log, c: RunHistory, place: int) -> CommitHeader | None:
    return await _header_of(log, int(c.rows["fragment"][place]), int(c.rows["version"][place]))


async def _header_of(log: Log, p: int, version: int) -> CommitHeader | None:
    try:
        commit = await log.commit(p, version)
    except LogCorrupt:
        return None
    return None if commit is None else commit.header
