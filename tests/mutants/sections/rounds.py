"""Mistakes in rounds."""

from mutants.mutant import of, row

MUTANTS = [
    *of(
        "rounds/grace.py",
        "tests/unit/test_rounds_told.py tests/unit/test_rounds.py tests/unit/test_admission.py",
        row(
            "slack-without-the-way-down",
            "slack = overlap * terms.fastest_step_s - (quorum_s + terms.sync_s)",
            "slack = overlap * terms.fastest_step_s - quorum_s",
        ),
    ),
    *of(
        "rounds/rounds.py",
        "tests/unit/test_rounds_told.py tests/unit/test_rounds.py tests/unit/test_admission.py",
        row(
            "what-is-being-fetched-is-not-waited-for",
            "(here - absent) | {learner for learner, _ in self._fetching}",
            "here - absent",
        ),
        row(
            "a-round-gives-up-before-anything-can-come",
            "first_by = 0.0 if r.arrived else",
            "first_by = 0.0 if True else",
        ),
        row(
            "a-base-just-ahead-is-made-up",
            "if pointer.base > self.head + AHEAD_MAX:",
            "if pointer.base >= self.head + AHEAD_MAX:",
        ),
        row(
            "fewer-tokens-replace-more",
            "known is not None and known.rank > pointer.rank:",
            "known is not None and known.rank < pointer.rank:",
        ),
        row(
            "pointers-without-end",
            "if settled is None and known is None and len(self._waiting) >= POINTERS_MAX:",
            "if False:",
        ),
        row(
            "staleness-is-exclusive",
            "if pointer.base < self.head - self._pace.staleness:",
            "if pointer.base <= self.head - self._pace.staleness:",
        ),
        row(
            "what-was-refused-is-fetched-again",
            "or self._losses.get(pointer.digest, (0, False))[1]:",
            "or False:",
        ),
        row(
            "late-work-makes-a-quorum",
            "if self.phase is Phase.OPEN and len(r.fresh) >= r.quorum:",
            "if self.phase is Phase.OPEN and len(r.arrived) >= r.quorum:",
        ),
        row(
            "a-call-at-every-look",
            "            r.called_at = now\n            return [self._call",
            "            return [self._call",
        ),
        row(
            "what-is-overdue-is-not-due",
            "return max(now, min(times))",
            "return min((at for at in times if at > now), default=None)",
        ),
        row(
            "grace-never-ended-a-round",
            "over = self.phase is Phase.GRACE and last > self._grace_ends(r)",
            "over = False",
        ),
        row(
            "what-was-left-over-is-forgotten",
            "leftover = list(self.round.arrived.values()) if self.round else []",
            "leftover: list[Pointer] = []",
        ),
        row(
            "one-commit-is-remembered",
            "{given.learner for given in commit.inputs}][-2:]",
            "{given.learner for given in commit.inputs}][-1:]",
        ),
        row("anybody-takes-anybodys-place", "(not final or p[0] == pointer.learner)]", "True]"),
        row(
            "duplicates-come-first",
            "order.append((place[2] not in FINAL, turns[place[0]], place))",
            "order.append((False, turns[place[0]], place))",
        ),
        row(
            "merging-takes-no-time",
            "return replace(terms, sync_s=terms.sync_s + self._close_to_commit.value)",
            "return terms",
        ),
        row(
            "those-heard-are-everybody",
            "return max(r.quorum_at + r.grace_s, self._live.all_heard_at)",
            "return r.quorum_at + r.grace_s",
        ),
        row(
            "an-outage-outdates-what-is-there-only",
            "(self.round.outdated.add if self._is_of_before(pointer) else",
            "(self.round.outdated.add if False else",
        ),
        row("an-outage-outdates-what-comes-only", "if self._is_of_before(pointer)}", "if False}"),
        row(
            "an-outage-outdates-old-bases",
            "return pointer.base == self.head and of_before",
            "return of_before",
        ),
        row(
            "anything-there-is-accepted",
            "return self._waiting.get((pointer.learner, pointer.base)) is pointer",
            "return (pointer.learner, pointer.base) in self._waiting",
        ),
        row(
            "a-pass-for-any-round",
            "if self.round is not None and version == self.head + 1 and learner",
            "if self.round is not None and learner",
        ),
        row(
            "what-was-replaced-is-read-all-the-same",
            "        return self._waiting.get((pointer.learner, pointer.base), pointer)",
            "        return pointer",
        ),
        row(
            "what-is-being-read-is-replaced",
            "        elif place in self._begun:",
            "        elif False:",
        ),
        row(
            "the-longer-one-is-forgotten-with-the-one-that-failed",
            "            if longer := self._longer.pop(place, None):\n                self._waiting[place] = longer\n",
            "            self._longer.pop(place, None)\n",
        ),
        row(
            "what-waits-to-be-read-keeps-no-round-open",
            "        return max(self._begun.get(place, math.inf) for",
            "        return max(self._begun.get(place, -math.inf) for",
        ),
        row(
            "a-slow-body-keeps-a-round-open",
            "for place in self._fetching) + self._admission.patience_s",
            "for place in self._fetching) + math.inf",
        ),
        row(
            "no-grace-waits-for-what-is-to-be-read",
            " or (self.phase is Phase.GRACE and self._pace.grace == 0.0):",
            ":",
        ),
        row(
            "a-round-does-not-say-that-it-was-kept-open",
            "self.round.own_until = now if self.round.kept_open else -math.inf",
            "self.round.own_until = -math.inf",
        ),
        row(
            "whoever-needs-the-admission-no-more-stays-in-line",
            "        if self._in_line and not self._may_open:\n            self._leave_line()\n",
            "",
        ),
        row(
            "a-line-without-anything-due-stays",
            "        if not ready or not self._may_open:\n            self._leave_line()\n",
            "        if not ready or not self._may_open:\n",
        ),
        row(
            "late-work-opens-no-round",
            "return may_at if self._is_due(pointer) else",
            "return math.inf if not self._is_due(pointer) else",
        ),
        row(
            "late-work-opens-a-round-at-once",
            "return may_at if self._is_due(pointer) else max(may_at, self._idle_at(pointer))",
            "return may_at",
        ),
        row(
            "a-base-that-is-not-known-opens", "        if pointer.base > self.head:\n            return math.inf\n", ""
        ),
        row("late-work-opens-before-due-work", "max(ready, key=self._is_due)", "min(ready, key=self._is_due)"),
        row(
            "a-late-round-has-been-due-for-long",
            "opener.boundary_at if self._is_due(opener) else now",
            "opener.boundary_at",
        ),
        row("late-work-opens-whatever-ended-since", "max(pointer.heard_at, self._ended_at) +", "pointer.heard_at +"),
        row("late-work-opens-whenever-it-came", "max(pointer.heard_at, self._ended_at) +", "self._ended_at +"),
        row(
            "late-work-waits-for-silence-alone",
            "max(self._pace.silence_s, IDLE_PERIODS * usual_s)",
            "self._pace.silence_s",
        ),
        row(
            "late-work-waits-for-no-silence",
            "max(self._pace.silence_s, IDLE_PERIODS * usual_s)",
            "IDLE_PERIODS * usual_s",
        ),
        row(
            "nobody-looks-at-late-work", "opens = math.inf if self._in_line else self._opens_next()", "opens = math.inf"
        ),
        row("work-is-lost-each-time-it-is-announced", "(pointer.digest in self._losses or", "("),
        row(
            "what-is-rejected-for-now-is-never-lost",
            "            self._put_off[pointer.learner, pointer.base] = pointer\n",
            "            pass\n",
        ),
        row("what-is-merged-stays-lost", "        self._take_back(pointer, now)\n", ""),
        row("more-work-than-was-merged-is-no-loss", "if pointer.tokens <= tokens:", "if tokens:"),
        row(
            "merged-bases-are-forgotten-a-version-early",
            "oldest, recent = commit.version - self._pace.staleness,",
            "oldest, recent = commit.version - self._pace.staleness + 1,",
        ),
    ),
    *of(
        "rounds/rounds.py",
        "tests/integration/test_stood_still.py tests/simulation/test_outages.py",
        row("what-waited-is-new", "(pointer.old and self._live.back_at > -math.inf)", "False"),
        row("no-round-is-overtaken", "self.round.opened_at < self._live.back_at", "False"),
        row(
            "what-was-fetched-before-is-taken",
            "return self.wants(pointer) and (pointer.learner, pointer.base) not in self.round.outdated",
            "return self.wants(pointer)",
        ),
    ),
    *of(
        "syncer/coordinator.py",
        "tests/integration/test_stood_still.py tests/simulation/test_outages.py",
        row("a-round-goes-on-after-a-freeze", "        if not self.rounds.overtaken:\n", "        if True:\n"),
        row(
            "a-merge-of-before-is-committed",
            "        if self.rounds.overtaken:\n            return self._again_after_a_gap()\n",
            "",
        ),
        row(
            "a-round-that-begins-again-keeps-its-sum",
            "            return []\n        self._release()\n        self.rounds.on(Lost()",
            "            return []\n        self.rounds.on(Lost()",
        ),
    ),
    *of(
        "syncer/agent.py",
        "tests/simulation/test_outages.py",
        row("what-waited-was-said-now", "(stream, said, self._listener.behind)", "(stream, said, False)"),
        row("who-stood-still-is-not-behind", "        self._listener.behind = True\n", ""),
        row("who-stood-still-had-no-gap", "        self._gap(for_s)\n", ""),
    ),
    *of(
        "bus/endpoints.py",
        "tests/unit/test_bus_listening.py tests/simulation/test_outages.py",
        row("behind-for-ever", "                self.behind = any(", "                self.behind = True or any("),
        row("one-message-and-it-has-caught-up", "            if behind:\n", "            if self.behind:\n"),
    ),
    *of(
        "agent/health.py",
        "tests/unit/test_vitals.py tests/simulation/test_outages.py",
        row("standing-still-is-not-told", "            self._stood(lag)\n", ""),
        row("any-look-is-a-tick", "if not ticked and lag <= STOOD_S:", "if not ticked:"),
    ),
    *of(
        "rounds/live_learners.py",
        "tests/unit/test_members_heard.py tests/unit/test_members.py tests/unit/test_bounds.py tests/unit/test_live_learners.py",
        row("any-gap-is-an-outage", "if away_s > AFRESH_LEADS * self.lead_s():", "if away_s > 0.0:"),
        row("no-gap-is-an-outage", "if away_s > AFRESH_LEADS * self.lead_s():", "if False:"),
        row("after-an-outage-silence-counts-at-once", "self._deaf_before = self.all_heard_at - silence_s", "pass"),
        row(
            "the-wait-has-no-end",
            "min(max(silence_s, PATIENCE * away_s), PATIENCE_SILENCES * silence_s)",
            "max(silence_s, PATIENCE * away_s)",
        ),
        row("any-age-of-silence-is-long", "before = now - FORGET_SILENCES * self._pace.silence_s", "before = now"),
        row("the-silent-are-waited-for", "if since >= silent_before:", "if True:"),
        row(
            "a-gap-makes-everybody-silent",
            "        self._deaf_before = now\n        self.all_heard_at",
            "        self.all_heard_at",
        ),
        row(
            "a-late-word-brings-back-who-left",
            "if self._left.get(learner, -1) >= incarnation:",
            "if self._left.get(learner, -1) > incarnation:",
        ),
        row(
            "a-new-life-has-the-old-ones-durations",
            "if known is None or known.incarnation < incarnation:",
            "if known is None:",
        ),
        row("silence-begins-at-l", "if m.heard_at >= before}", "if m.heard_at > before}"),
        row(
            "its-word-counts-more-than-what-was-measured",
            "m.answer_s or self._believed(m, m.upload_s, upload_s)",
            "self._believed(m, m.upload_s, upload_s) or m.answer_s",
        ),
        row("an-old-farewell-counts", "if known is None or known.incarnation <= incarnation:", "if True:"),
        row(
            "its-own-farewell-does-not-count",
            "if known is None or known.incarnation <= incarnation:",
            "if known is None or known.incarnation < incarnation:",
        ),
        row("those-that-left-are-kept-for-ever", "while len(self._left) > LEFT_MAX:", "while False:"),
        row("the-cap-is-of-all-that-are-expected", "upload_s) for m in late)", "upload_s) for m in found)"),
        row("nobody-the-log-knows-is-left-out", "if name in self._left:", "if False:"),
        row(
            "of-whom-nothing-came-is-believed-as-much",
            "self._bounds.slow if known.step_most_s else self._bounds.fast)",
            "self._bounds.slow)",
        ),
        row(
            "a-step-is-longer-than-what-came-had-time-for",
            "most = self._bounds.fast * known.step_most_s if known.step_most_s else math.inf",
            "most = math.inf",
        ),
    ),
    *of(
        "rounds/admission.py",
        "tests/unit/test_admission.py",
        row("fetches-are-not-counted", "queued = sum(self._owed.values()) - useful", "queued = 0"),
        row(
            "nothing-is-let-in-beyond-what-is-read-at-once",
            "return waits_s <= lead_s",
            "return waits_s <= 0.0",
        ),
        row("merges-are-not-counted", "unmerged * self.merge_s / self._merges)", "0.0)"),
        row("whoever-asks-is-let-in-before-others", "self._first() == fragment and", "True and"),
        row("the-last-comes-first", "return min(self._waiting,", "return max(self._waiting,"),
        row("nobody-is-told-of-room", "                first.tell()\n", "                pass\n"),
        row("one-is-told-again-and-again", "                first.told = True\n", ""),
        row(
            "who-leaves-tells-nobody",
            "            self._let_in()\n\n    def _first",
            "            pass\n\n    def _first",
        ),
        row("the-mean-of-fetches", "statistics.median(self._timed)", "statistics.fmean(self._timed)"),
        row("what-tells-nothing-is-believed", "self._useful if self._telling else", "self._useful if True else"),
        row("windows-of-long-ago-count", "w.number > self._number - WINDOWS_KNOWN", "w.number > 0"),
        row(
            "what-is-not-known-counts-as-quick",
            "        if queued > 0 and not self._timed:\n            return False  # nothing is known yet\n",
            "",
        ),
    ),
]
