"""The answers of a board, as plain data: one method for each question. `docs/board.md` is the reference."""

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from isthmus.errors import Denied, InputError, LogCorrupt, Unavailable
from isthmus.format.records.fields import require_name
from isthmus.format.records.keys import LEARNERS
from isthmus.inspect import whatif
from isthmus.inspect.decisions import expelled, waiting
from isthmus.inspect.explain import explain
from isthmus.inspect.status import Status, read_ledgers
from isthmus.log import evaluations
from isthmus.log.expulsions import expulsions
from isthmus.log.listing import all_or, checkpoints_in
from isthmus.runtime.urls import redacted
from isthmus.version import __version__
from isthmus_services.board import accounts
from isthmus_services.board.accounts import Costs
from isthmus_services.board.feed import Feed, spread
from isthmus_services.board.history import commit_views, time_views
from isthmus_services.board.history.time_views import Answer
from isthmus_services.board.history.warnings import of_replaced, warnings

Query = Mapping[str, Sequence[str]]

REPLACED_S = 600.0
"""Seconds for which the page says that the history of a fragment was replaced."""

FORMAT = 4
"""Format version of the answers. It is raised when a field changes its meaning or is removed."""


class Unknown(InputError):
    """The requested object does not exist."""


class Api:
    """Answers questions from the data of a feed and from the log."""

    def __init__(self, feed: Feed, costs: Costs) -> None:
        self.feed = feed
        self._costs = costs
        self._measured: tuple[float, Answer] | None = None
        self._decided: tuple[float, list[str]] = (-math.inf, [])
        # «What if» questions are answered one at a time, so that they keep at most one core busy.
        self._folding = asyncio.Semaphore(1)
        self._fixed: dict[str, Callable[[Query], Awaitable[Answer]]] = {
            "run": self.run,
            "state": self.state,
            "series": self.series,
            "measured": self.measured,
            "ledger": self.ledger,
            "learners": self.learners,
            "lanes": self.lanes,
            "fragments": self.fragments,
            "commits": self.commits,
            "services": self.services,
        }

    @property
    def questions(self) -> tuple[str, ...]:
        """The questions that need no further words in their path."""
        return tuple(self._fixed)

    async def answer(self, path: str, query: Query) -> Answer:
        """Return the answer to a question, such as `run` or `commit/3/17`.

        Raises `Unknown` if the question or the object does not exist, `InputError` for a bad question, and what the
        store raises.
        """
        name, _, rest = path.partition("/")
        if not rest and name in self._fixed:
            return await self._fixed[name](query)
        words = rest.split("/")
        match name, len(words):
            case "commit", 2:
                return await self.commit(_whole(words[0]), _whole(words[1]))
            case "update", 3:
                return await self.update(_whole(words[0]), words[1], _whole(words[2]))
            case "learner", 1:
                return await self.learner(words[0], query)
            case "fragment", 1:
                return await self.fragment(_whole(words[0]), query)
            case "whatif", 2:
                return await self.what_if(_whole(words[0]), _whole(words[1]), query)
        raise Unknown(f"there is no /api/{path}")

    def _moment(self, at: float | None) -> float:
        """Return the requested moment, or the present if `at` is None [seconds since 1970].

        The present is never before the newest commit, since a syncer's clock may be ahead of this machine's.
        """
        return max(self.feed.wall, time_views.span(self.feed.history)[1]) if at is None else at

    def _clock(self, at: float | None) -> float | None:
        """Return the time from which ages are counted: this machine's clock for the present, None for a past moment."""
        return self.feed.wall if at is None else None

    # --- the run ------------------------------------------------------------------------------------------------------

    async def run(self, _: Query) -> Answer:
        """Return the rules, layout and other properties of the run, its known learners, and how far it was read."""
        f, made = self.feed, self.feed.log.run
        begin, end = time_views.span(f.history, f.wall)
        return {
            "format": FORMAT,
            "isthmus": __version__,
            "url": redacted(made.url),
            "bus": redacted(f.bus.url),
            "run": made.digest.hex(),
            "model": made.header.model,
            "parameters": made.layout.size,
            "fragments": [
                {"fragment": x.index, "size": x.size, "tensors": [t.name for t in x.tensors][:64]}
                for x in made.layout.fragments
            ],
            "rules": msgspec.to_builtins(made.rules),
            "pace": msgspec.to_builtins(made.pace),
            "signed": made.header.owner is not None,
            "created_at": made.header.created_at,
            "begin": begin,
            "end": end,
            "learners": sorted(f.history.learners.known),
            "closings": [name for name in f.history.closings.known if name],
            "read": f.history.read if f.reading else 1.0,
            "reading": f.reading,
            "has_bus": f.has_bus,
        }

    async def state(self, query: Query) -> Answer:
        """Return the state of the run now or at a past moment: a sentence, open rounds, totals, warnings and cost."""
        at = _time(query, "at")
        f, c = self.feed, self.feed.history
        moment = self._moment(at)
        status = f.live.status() if at is None else None
        open_rounds = await self._open(at, status)
        said = time_views.sentence(c, moment, open_rounds) if status is None else self._sentence(status, open_rounds)
        begin, end = time_views.span(c, f.wall)
        totals = time_views.totals(c, moment)
        moved = accounts.moved(c, moment, totals)
        return {
            "at": moment,
            "now": self._moment(None),
            "past": at is not None,
            "begin": begin,
            "end": end,
            "turn": f.turn,
            "reading": f.reading,
            "read": c.read if f.reading else 1.0,
            "sentence": said,
            "training": self._training(status) if status is not None else None,
            "trouble": self._trouble() if at is None else "",
            "notes": await self._decisions() if at is None else [],
            "warnings": [] if f.reading else self._warnings(moment, status),
            "open": open_rounds,
            "totals": totals,
            "reasons": time_views.reasons(c, moment),
            "bytes": moved,
            "cost": accounts.cost(c, self._costs, moment, totals, moved),
        }  # fmt: skip

    def _training(self, status: Status) -> int | None:
        """Return how many learners train now; None if no bus says it."""
        if not self.feed.has_bus or status.bus_error:
            return None
        young = self.feed.listened_s < self.feed.log.run.pace.silence_s
        return sum(v.left is None for v in status.taking_part) if young else len(status.live)

    async def _decisions(self) -> list[str]:
        """Return, in words, which learners were expelled and which proposals wait, as read at most 30 s ago."""
        f = self.feed
        if f.runtime.now() - self._decided[0] > 30.0:
            try:
                found = await waiting(f.asked)
            except (Unavailable, LogCorrupt):
                found = self._decided[1]
            self._decided = f.runtime.now(), found
        return expelled(f.log.members, f.history.learners.known) + self._decided[1]

    async def _open(self, at: float | None, status: Status | None) -> list[Answer]:
        """Return the rounds that are or were open, and the learners that each waits for, as far as they are known.

        `status`: the present status; None for a past moment.
        """
        if status is None:
            return await commit_views.waits(self.feed.asked, self.feed.history, self._moment(at))
        return [
            {
                "fragment": p, "version": r.version, "opened_at": None,
                "waits_for": sorted(status.waited_for(p)) if self.feed.has_bus else None,
            }
            for p, r in sorted(status.hearing.rounds.items())
        ]  # fmt: skip

    def _warnings(self, at: float, status: Status | None) -> list[Answer]:
        f = self.feed
        lately = f.replaced if f.runtime.now() - f.replaced_at < REPLACED_S else ()
        return ([of_replaced(lately)] if lately else []) + warnings(
            f.history,
            f.wall if status is not None else at,
            status,
            redacted(f.log.run.url),
            redacted(f.bus.url),
            f.listened_s,
        )

    def _trouble(self) -> str:
        """Return what is not known at present, and why; empty if nothing is missing."""
        if not self.feed.has_bus:
            down = self.feed.store.outage.down_s
            store = f"the store has not answered for {down:.0f} s; " if down else ""
            return f"{store}no bus is read: who is there now, and what learners say of themselves, is not known"
        return self.feed.live.trouble

    def _sentence(self, status: Status, open_rounds: Sequence[Answer]) -> str:
        f = self.feed
        if f.reading and f.history.read < 1.0:
            return f"The log is being read for the first time: {f.history.read:.0%} so far."
        if not f.has_bus or status.bus_error:
            return self._from_the_log()
        heard = status.taking_part
        known = [v for v in heard if v.left is None]
        live = status.live
        done = sum(v.left is not None and v.left.done for v in heard)
        if not known:
            if done:
                return f"Nobody trains: {done} of {len(heard)} learners are done."
            return "Nobody trains: no learner is heard." if len(f.history) else "Nobody has trained yet."
        if f.listened_s < f.log.run.pace.silence_s and len(live) < len(known):
            said = (
                f"{len(live)} of {len(known)} learners were heard in the {f.listened_s:.0f} s since this page listens"
            )
        else:
            said = f"{len(live)} of {len(known)} learners train"
        waiting = [r for r in open_rounds if r["waits_for"]]
        if waiting:
            names = time_views.named(waiting[0]["waits_for"])
            said += f"; rounds open: {len(waiting)}, and that of fragment {waiting[0]['fragment']} waits for {names}"
        return f"{said}." + (f" {done} are done." if done else "")

    def _from_the_log(self) -> str:
        f = self.feed
        totals = time_views.totals(f.history, math.inf)
        if not totals["commits"]:
            return "Nothing has been merged yet."
        return (
            f"By its log: {totals['commits']:,} commits with {totals['updates']:,} updates of {totals['learners']} "
            "learners. Who trains now is not known."
        )

    async def series(self, query: Query) -> Answer:
        """Return lines over time: from the log, and from the learners' heartbeats."""
        begin, end = self._stretch(query)
        points = int(_number(query, "points", time_views.POINTS_MAX))
        c = self.feed.history
        return {
            "begin": begin,
            "end": end,
            "log": time_views.series(c, begin, end, points),
            "losses": time_views.losses(c, begin, end, points),
            "heard": time_views.heard(c, begin, end, points),
        }

    async def measured(self, _: Query) -> Answer:
        """Return what counts of the measurements by followers: by name, a series of [time, cut, value]."""
        f = self.feed
        if self._measured is None or f.runtime.now() - self._measured[0] > 30.0:
            found: Answer = {}
            contested: Answer = {}
            try:
                for name in await evaluations.names(f.asked):
                    series = await evaluations.series(f.asked, name, time_views.POINTS_MAX)
                    found[name] = [[p.at, p.cut, p.value] for p in sorted(series.points, key=lambda p: p.at)]
                    contested[name] = [str(one) for one in series.contested]
            except Denied as error:
                self._measured = f.runtime.now(), {"series": {}, "contested": {}, "why": f"may not be read: {error}"}
            else:
                self._measured = f.runtime.now(), {"series": found, "contested": contested, "why": ""}
        return self._measured[1]

    async def ledger(self, _: Query) -> Answer:
        """Return each learner's ledger by fragment, as of its newest checkpoint."""
        f = self.feed
        try:
            return {
                "learners": await read_ledgers(f.asked, checkpoints_in(await f.asked.store.list(LEARNERS))),
                "why": "",
            }
        except Denied as error:
            return {"learners": {}, "why": f"checkpoints may not be read: {error}"}

    # --- learners, fragments, commits ---------------------------------------------------------------------------------

    async def learners(self, query: Query) -> Answer:
        """Return a row for each learner."""
        at = _time(query, "at")
        f = self.feed
        rows = time_views.learners(f.history, self._moment(at))
        status = f.live.status() if at is None and f.has_bus else None
        if status is not None:
            listening = f.listened_s < f.log.run.pace.silence_s
            for row in rows:
                view = status.hearing.learners.get(row["learner"])
                row["state"] = "never heard" if view is None else status.why_behind(view) or "training"
                if row["state"] == "silent" and listening:
                    row["state"] = "not heard yet"
        if at is None:
            gone = {one.learner: one for one in expulsions(f.log.members, (row["learner"] for row in rows))}
            for row in (row for row in rows if row["learner"] in gone):
                row["state"] = f"expelled by membership {gone[row['learner']].version}"
        return {"at": self._moment(at), "as_of": self._whole(at), "learners": rows}

    def _whole(self, at: float | None) -> float:
        """Return the time up to which the sums by learner count [seconds since 1970]."""
        return time_views.as_of(self.feed.history, self._moment(at))

    async def learner(self, name: str, query: Query) -> Answer:
        """Return a learner's row, its incarnations, and what became of its newest updates."""
        at = _time(query, "at")
        f = self.feed
        if (number := f.history.learners.find(name)) is None:
            raise Unknown(f"no learner {name!r} is known in this run")
        moment = self._moment(at)
        found = await self.learners(query)
        return {
            "at": moment,
            "as_of": found["as_of"],
            "row": found["learners"][number],
            "incarnations": [
                one | {"last": min(one["last"], moment)}
                for one in time_views.incarnations(f.history)
                if one["learner"] == name and one["began"] <= moment
            ],
            "story": await commit_views.story(f.asked, f.history, name, moment),
        }

    async def lanes(self, query: Query) -> Answer:
        """Return a lane for each learner and, unless there are too many commits, each of its activities."""
        begin, end = self._stretch(query)
        c = self.feed.history
        return {
            "begin": begin,
            "end": end,
            **time_views.lanes(c, begin, end),
            "pieces": await commit_views.pieces(self.feed.asked, c, begin, end),
        }

    async def fragments(self, query: Query) -> Answer:
        """Return a row for each fragment."""
        begin, end = self._stretch(query)
        at = _time(query, "at")
        moment = self._moment(at)
        return {
            "at": moment,
            "begin": begin,
            "end": end,
            **time_views.fragments(self.feed.history, begin, end, moment, self._clock(at)),
        }

    async def fragment(self, p: int, query: Query) -> Answer:
        """Return a fragment's row, its open round if there is one, and its newest commits."""
        all_or(self.feed.log, [p])
        at = _time(query, "at")
        c, moment = self.feed.history, self._moment(at)
        open_rounds = await self._open(at, self.feed.live.status() if at is None else None)
        row = time_views.fragments(c, c.run.header.created_at, moment, moment, self._clock(at))["fragments"][p]
        return {
            "at": moment,
            "row": row,
            "open": next((x for x in open_rounds if x["fragment"] == p), None),
            **time_views.commits(c, moment, fragment=p),
        }

    async def commits(self, query: Query) -> Answer:
        """Return a page of commits, newest first."""
        at, only = _time(query, "at"), _word(query, "only")
        if only and only not in time_views.ONLY:
            raise InputError(f"only={only}: there are {', '.join(time_views.ONLY)}")
        fragment = _word(query, "fragment")
        if fragment:
            all_or(self.feed.log, [_whole(fragment)])
        before = _word(query, "before")
        return time_views.commits(
            self.feed.history,
            math.inf if at is None else at,
            fragment=_whole(fragment) if fragment else None,
            closed_by=_word(query, "closed_by"),
            only=only,
            before=_whole(before) if before else None,
        )

    async def commit(self, p: int, version: int) -> Answer:
        """Return the explanation of a commit, its round as a picture, and the main fields of its header."""
        all_or(self.feed.log, [p])
        commit = await self.feed.asked.commit(p, version) if version else None
        if commit is None:
            raise Unknown(f"there is no commit {p}/{version} in this run")
        told = await explain(self.feed.asked, f"{p}/{version}")
        return {
            "fragment": p,
            "version": version,
            "newest": self.feed.history.ends[p].version,
            "lines": told.lines,
            "facts": told.facts,
            "round": commit_views.round_picture(commit.header),
            "header": commit_views.told(commit.header),
            "packed": commit.in_segment,
        }

    async def update(self, p: int, learner: str, base: int) -> Answer:
        """Return the explanation of a learner's update on a base."""
        require_name("learner", learner)
        told = await explain(self.feed.asked, f"{p}/{learner}/{base}")
        return {"fragment": p, "learner": learner, "base": base, "lines": told.lines, "facts": told.facts}

    async def what_if(self, p: int, version: int, query: Query) -> Answer:
        """Return one round merged under other rules. The query sets them, as `set=quorum=3`, any number of times."""
        settings = whatif.parse(query.get("set", ()))
        async with self._folding:
            found = await whatif.one_round(self.feed.folded, p, version, settings)
        answer: Answer = dataclasses.asdict(found)
        return {
            "fragment": p,
            "version": version,
            "set": list(query.get("set", ())),
            **{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in answer.items()},
        }

    async def services(self, query: Query) -> Answer:
        """Return the syncers, their takeovers, restarts of learners, and the response times of store and bus."""
        at = _time(query, "at")
        f = self.feed
        moment = self._moment(at)
        begin, end = self._stretch(query)
        found = time_views.syncers(f.history, moment)
        if at is None and f.has_bus:
            status = f.live.status()
            said = status.hearing.syncers
            found["alive"] = [
                row | {"stopping": said[row["syncer"]].stopping} for row in _rows(status.as_json()["syncers"])
            ]
        return {
            "at": moment,
            **found,
            "store_ms": spread(f.store_ms) if at is None else None,
            "bus_ms": spread(f.bus_ms) if at is None and f.has_bus else None,
            "lines": {
                key: value
                for key, value in time_views.series(f.history, begin, end).items()
                if key in ("at", "seconds", "merge_s", "publish_s", "commit_s", "waited_s")
            },
        }

    def _stretch(self, query: Query) -> tuple[float, float]:
        begin, end = time_views.span(self.feed.history, self.feed.wall)
        first, last = _time(query, "from"), _time(query, "to")
        begin, end = (begin if first is None else first), (end if last is None else last)
        if end < begin:
            raise InputError(f"from={begin:.3f} is after to={end:.3f}")
        return begin, max(end, begin + 1e-3)


def _rows(value: object) -> list[Answer]:
    assert isinstance(value, list), "a list of rows"
    return value


def _whole(text: str) -> int:
    """Return a text of at most 12 digits as a number. Raises `InputError` for any other text."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 12):
        raise InputError(f"{text!r} is no whole number")
    return int(text)


def _word(query: Query, name: str) -> str:
    found = query.get(name, ())
    return found[-1] if found else ""


def _time(query: Query, name: str) -> float | None:
    """Return a time in the query [seconds since 1970], or None if it is absent. Raises `InputError`."""
    text = _word(query, name)
    return _number(query, name, 0.0) if text else None


def _number(query: Query, name: str, default: float) -> float:
    text = _word(query, name)
    try:
        found = float(text) if text else default
    except ValueError:
        found = math.nan
    if not 0.0 <= found < 1e11:
        raise InputError(f"{name}={text}: write it as a number; times are seconds since 1970")
    return found
