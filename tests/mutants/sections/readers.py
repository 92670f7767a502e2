"""Mistakes in readers, and in the integrations with training frameworks."""

from mutants.mutant import of, row

MUTANTS = [
    *of(
        "inspect/whatif.py",
        "tests/unit/test_whatif_decides.py tests/unit/test_decided_late.py tests/integration/test_late_syncer.py",
        row(
            "first-work-at-another-rate",
            "if any(Clip.PERIODS in given.clipped for given in header.inputs):",
            "if False:",
        ),
        row("first-work-at-its-old-momentum", 'changes.get("momentum", recorded.momentum)', "recorded.momentum"),
        row(
            "late-here-is-late-for-the-next-round",
            "rejected_total={})), closed_at)",
            "rejected_total={})), h.waited.waited_s)",
        ),
        row(
            "the-loop-is-never-busy",
            "self._lag = max((w.waited_s - at for at in due if 0.0 < at <= w.waited_s), default=0.0)",
            "self._lag = 0.0",
        ),
        row(
            "what-misses-its-round-is-forgotten",
            "given |= {i.digest: i for i in h.inputs}",
            "given = {i.digest: i for i in h.inputs}",
        ),
        row(
            "merged-there-is-merged-here",
            "Appended(msgspec.structs.replace(h, inputs=merged, rejected=(), rejected_total={})",
            "Appended(msgspec.structs.replace(h, rejected=(), rejected_total={})",
        ),
        row("who-fell-silent-was-never-there", "            expected.add(seen.learner)\n", "            pass\n"),
        row(
            "rounds-open-at-the-boundary",
            "self._rounds.round.boundary_at, self._rounds.round.gives_up_at = -w.boundary_s, w.gives_up_s",
            "self._rounds.round.gives_up_at = w.gives_up_s",
        ),
        row(
            "a-healing-has-a-round",
            "merged, closed_at = ((), 0.0) if h.healed is not None else _Story(",
            "merged, closed_at = _Story(",
        ),
    ),
    *of(
        "inspect/explain.py",
        "tests/unit/test_explain.py",
        row(
            "everything-is-a-version-later",
            "{version - 1 - i.base} version(s) late",
            "{version - i.base} version(s) late",
        ),
    ),
    *of(
        "inspect/trace.py",
        "tests/unit/test_trace.py",
        row(
            "versions-point-to-the-training-before",
            "trained.setdefault((h.fragment, i.base), []).append(training)",
            "trained.setdefault((h.fragment, h.version), []).append(training)",
        ),
    ),
    *of(
        "isthmus_lab/forecast/outcome.py",
        "tests/unit/test_plan_figures.py",
        row(
            "a-month-is-a-day",
            "stored / 1e9 * prices.storage_gb_month / 30.0",
            "stored / 1e9 * prices.storage_gb_month",
        ),
        row(
            "bytes-are-bits",
            "learners * wire.up * 8.0 * rounds_day / DAY_S / 1e9",
            "learners * wire.up * rounds_day / DAY_S / 1e9",
        ),
    ),
    *of(
        "torch/frozen.py",
        "tests/unit/test_frozen.py",
        row("scales-are-left-out", "sorted(scales.as_dict(packed=False).items())", "()"),
        row(
            "only-the-first-of-its-tensors",
            "for name in tensor.__tensor_flatten__()[0]:",
            "for name in tensor.__tensor_flatten__()[0][:1]:",
        ),
        row("nobody-is-trusted", "if check == FrozenCheck.TRUSTED:", "if not frozen:"),
    ),
    *of(
        "log/run.py",
        "tests/unit/test_frozen.py",
        row("who-trusts-is-asked-for-bytes", " and UNTOLD not in (frozen[name], self.frozen[name])", ""),
    ),
    *of(
        "link/following.py",
        "tests/e2e/test_follow.py",
        row("a-cut-is-given-again", "if cut is None or cut is self._given:", "if cut is None:"),
        row("what-is-returned-is-forgotten", "(found or {}).items()", "{}.items()"),
    ),
    *of(
        "torch/serving.py",
        "tests/e2e/test_follow.py",
        row(
            "more-than-the-run-has-is-left-alone", "        if name not in known:", "        if name not in parameters:"
        ),
        row(
            "shapes-may-differ",
            "if tuple(parameters[name].shape) != tensors[name].shape:",
            "if parameters[name].dim() != tensors[name].ndim:",
        ),
    ),
    *of(
        "inspect/follow.py",
        "tests/e2e/test_follow.py",
        row("a-mixture-is-of-the-least", "number = sum(versions.values())", "number = min(versions.values())"),
    ),
    *of(
        "inspect/export.py",
        "tests/e2e/test_follow.py",
        row(
            "half-a-tensor-is-one",
            "if 0 < sum(fragment in values for fragment, _ in cuts) < len(cuts):",
            "if len(values) < 0:",
        ),
    ),
    *of(
        "log/evaluations.py",
        "tests/e2e/test_follow.py",
        row("the-earlier-one-counts", "key=lambda h: (h.cut, h.written_at)", "key=lambda h: (h.cut, -h.written_at)"),
    ),
    *of(
        "log/evaluations.py",
        "tests/integration/test_promote.py",
        row("different-numbers-count", "if (h.cut, h.by) not in none]", "if h.cut >= 0]"),
        row("a-second-number-counts", "return earlier == [value]", "return True"),
    ),
    *of(
        "torch/dcp.py",
        "tests/e2e/test_exchange.py",
        row("a-block-of-any-size", "if len(words) != prod(shape) * dtype.itemsize:", "if not held:"),
        row("the-whole-checkpoint-is-the-model", "if not name.startswith(below) or", "if not name.startswith('') or"),
    ),
    *of(
        "integrations/hook.py",
        "tests/e2e/test_trainer.py",
        row(
            "the-schedule-sees-the-warm-up",
            "        self._rates = []\n        self._taken += 1",
            "        self._taken += 1",
        ),
        row("warm-up-is-for-ever", '            group["lr"] = lr\n', '            group["lr"] = lr * self.link.rate\n'),
    ),
    *of(
        "integrations/torchtitan.py",
        "tests/e2e/test_torchtitan.py",
        row("schedules-begin-anew", "take_up(schedule, state)", "pass"),
        row("data-begin-anew", 'trainer.dataloader.load_state_dict(state_dict["data"])', "pass"),
    ),
    *of(
        "integrations/lightning.py",
        "tests/e2e/test_lightning.py",
        row("loops-begin-anew", 'self._trainer.fit_loop.load_state_dict(state_dict["fit_loop"])', "pass"),
    ),
    *of(
        "isthmus_services/board/history/time_buckets.py",
        "tests/unit/test_board_history.py",
        row("one-moment-too-many", "while number >= self.most:", "while number > self.most:"),
        row("halves-that-are-forgotten", "merged = first + second", "merged = first"),
        row("whatever-was-committed-last", "alike & (rows[..., field] > others[..., field])", "alike"),
        row(
            "the-first-word-stays",
            "np.where(np.isnan(second), first, second)",
            "np.where(np.isnan(first), second, first)",
        ),
        row("moments-that-do-not-grow", "self.width *= 2.0", "self.width *= 1.0"),
        row(
            "a-moment-that-has-not-ended",
            "return self.over(0, self.whole(at))",
            "return self.over(0, self.whole(at) + 1)",
        ),
        row(
            "before-the-beginning-is-behind-the-end",
            "number = max(0, math.floor((at - self.began) / self.width))\n        while",
            "number = math.floor((at - self.began) / self.width)\n        while",
        ),
    ),
    *of(
        "isthmus_services/board/history/rows.py",
        "tests/unit/test_board_history.py",
        row("the-last-written-is-the-newest", "order[np.maximum.accumulate(first)]", "order"),
        row("out-of-order", "self._sorted = False", "pass"),
        row("sums-of-before-it-was-put-in-order", "{name: (min(first, upto), sums) for", "{name: (upto, sums) for"),
        row("not-yet-at-its-own-time", 'self["written_at"], at, side="right"', 'self["written_at"], at, side="left"'),
        row("healing-closes-a-round", "== int(value)) & ~healed)", "== int(value)))"),
        row("an-order-that-is-old", "self._order[0] != self._count:", "False:"),
        row(
            "a-cache-of-other-columns",
            "if column.shape != (count,) or column.dtype",
            "if column.shape != (count,) and column.dtype",
        ),
    ),
    *of(
        "isthmus_services/board/history/history.py",
        "tests/unit/test_board_history.py",
        row(
            "each-fragment-counts-in-full",
            "sum(i.tokens for i in h.inputs) * float(self.shares[h.fragment])",
            "sum(i.tokens for i in h.inputs)",
        ),
        row(
            "what-is-lost-and-what-is-not-mixed-up",
            "rejected = updates_rejected(h.rejected_total)",
            "rejected = sum(h.rejected_total.values())",
        ),
        row("rejections-of-all-versions-each-time", "max(0, rejected - end.rejected)", "max(0, rejected)"),
        row("fresh-is-any-base", "1, i.base == h.version - 1, bool(i.clipped)", "1, True, bool(i.clipped)"),
        row("an-update-without-a-loss-counts", "if i.loss is not None]:", "]:"),
        row(
            "a-life-begins-with-what-was-read-first",
            "one.began, one.step = min(one.began, began), min(one.step, step)",
            "pass",
        ),
        row("another-run-s-cache", "meta.run != run.digest or", ""),
        row("a-cache-of-another-format", "meta.format != FORMAT or", ""),
        row("half-a-file", "        scratch.replace(path)\n", "        scratch.replace(path.with_suffix('.half'))\n"),
        row("a-commit-that-does-not-follow", "assert h.version == end.version + 1", "assert h.version > 0"),
    ),
    *of(
        "isthmus_services/board/history/time_views.py",
        "tests/unit/test_board_history.py tests/integration/test_board.py",
        row("what-came-after-is-of-the-past", "last = moments.whole(at)\n", "last = moments.whole(at) + 1\n"),
        row("as-old-as-another-clock-says", "at if now is None else now\n", "at\n"),
        row(
            "participation-of-all-that-was-read",
            '_share(rows.until("share", n), rows.until("shared", n))',
            '_share(rows.until("share", len(rows)), rows.until("shared", n))',
        ),
        row("trained-again-before-the-kill", "np.where(known[..., n] == incarnation, again, 0)", "again"),
        row("a-round-is-open-after-it-has-closed", "if opened <= at < closed:", "if opened <= at:"),
        row(
            "a-takeover-within-one-fragment-s-first-commit", "(fragments[1:] == fragments[:-1]) & (writers", "(writers"
        ),
        row("takeovers-of-the-future", "& (order[1:] < count)", ""),
        row("the-oldest-first", "matching = chosen[wanted][::-1]", "matching = chosen[wanted]"),
    ),
    *of(
        "isthmus_services/board/history/commit_views.py",
        "tests/unit/test_board_history.py tests/integration/test_board.py",
        row("asking-makes-room", "c.by_learner.whole(at) + 1]", "c.by_learner.place(at) + 1]"),
        row("it-waits-for-who-has-answered", "- gone - here - answered - passed)", "- gone - here - passed)"),
        row("it-waits-for-who-came-later", "- gone - here - answered - passed)", "- gone - answered - passed)"),
        row("marks-from-the-boundary-on", '("closed", closed, f"closed', '("closed", closed + w.boundary_s, f"closed'),
    ),
    *of(
        "inspect/whatif.py",
        "tests/integration/test_board.py",
        row(
            "one-round-after-itself",
            "until=version - 1, keep=max(2, log.run.pace.staleness + 1)",
            "until=version, keep=max(2, log.run.pace.staleness + 1)",
        ),
        row(
            "one-round-as-it-was",
            "log, state, p, inputs, self.outers(header), codec(header.codec_down), accumulator=accumulator",
            "log, state, p, inputs, fold.outer_of(header), codec(header.codec_down), accumulator=accumulator",
        ),
    ),
]
