"""Mistakes in what learners send."""

from mutants.mutant import of, row

MUTANTS = [
    *of(
        "log/updates.py",
        "tests/unit/test_update_opened.py",
        row("any-base", "if header.base != base:", "if header.base > base:"),
        row("any-author", "if header.learner != learner:", "if False:"),
        row(
            "any-fragment",
            "if (header.fragment, header.codec) != (fragment.index, run.rules.codec_up):",
            "if header.codec != run.rules.codec_up:",
        ),
        row("nan-is-a-number", "if not math.isfinite(gradient.norm):", "if False:"),
        row("any-length", "if gradient.norm > GRADIENT_NORM_MAX:", "if False:"),
    ),
    *of(
        "syncer/fetcher.py",
        "tests/unit/test_coordinator_claims.py",
        row(
            "what-was-announced-is-not-compared",
            "if (update.header.steps, update.header.tokens) != (pointer.steps, pointer.tokens):",
            "if False:",
        ),
        row(
            "steps-are-not-compared",
            "if (update.header.steps, update.header.tokens) != (pointer.steps, pointer.tokens):",
            "if update.header.tokens != pointer.tokens:",
        ),
        row("a-larger-object-is-not-noticed", "pointer.key, pointer.size + 1, cut", "pointer.key, pointer.size, cut"),
        row("a-refused-update-ends-the-syncer", "return None, Reason.UNREADABLE\n", "raise\n"),
        row("a-refused-syncer-blames-its-learners", "if not await self._is_refused():", "if True:"),
    ),
    *of(
        "syncer/recorder.py",
        "tests/unit/test_coordinator_claims.py",
        row("durations-without-bounds", "return min(max(0.0, seconds), SECONDS_MAX)", "return max(0.0, seconds)"),
    ),
    *of(
        "syncer/fragment_reader.py",
        "tests/integration/test_false_words.py",
        row(
            "a-false-version-is-looked-for-once",
            "(lacking or behind or bool(self.broken))",
            "(lacking or bool(self.broken))",
        ),
    ),
    *of(
        "syncer/agent.py",
        "tests/integration/test_false_words.py",
        row(
            "a-refusal-at-the-start-ends-a-syncer",
            "coordinator.broken and not coordinator.refused for",
            "coordinator.broken for",
        ),
        row(
            "damage-of-everything-ends-no-syncer",
            "if all(coordinator.broken and not",
            "if False and all(coordinator.broken and not",
        ),
    ),
    *of(
        "syncer/fragment_reader.py",
        "tests/unit/test_coordinator_claims.py",
        row("two-commits-are-all-that-is-known", "self.need = max(2, pace.staleness + 1)", "self.need = 2"),
    ),
    *of(
        "syncer/snapshots.py",
        "tests/unit/test_coordinator_claims.py",
        row(
            "all-fragments-write-snapshots-at-once",
            "self._overdue or (version + self._fragment.index) % self._pace.snapshot_every == 0",
            "self._overdue or version % self._pace.snapshot_every == 0",
        ),
    ),
    *of(
        "syncer/fragment_reader.py",
        "tests/unit/test_takeover.py",
        row("what-is-stuck-is-kept", "        if self._folding:", "        if False:"),
        row("folds-that-fail-do-not-count", "            self._failed += 1\n", "            pass\n"),
    ),
    *of(
        "syncer/coordinator.py",
        "tests/unit/test_takeover.py",
        row(
            "what-was-folded-counts-twice",
            "self._snapshots.merged, self._reader.folded =",
            "_, self._reader.folded =",
        ),
    ),
    *of(
        "syncer/snapshots.py",
        "tests/unit/test_takeover.py",
        row(
            "snapshots-follow-versions-alone",
            "(self._overdue or self.merged >= self._after)",
            "(self._overdue or self.merged < self._after)",
        ),
    ),
    *of(
        "syncer/fragment_reader.py",
        "tests/integration/test_holders.py::test_of_what_another_keeps_a_syncer_reads_the_commits_alone_until_it_takes_over",
        row("everyone-folds-everything", "return self.wanted or bool(self.broken) or", "return True or"),
    ),
    *of(
        "syncer/agent.py",
        "tests/unit/test_takeover.py",
        row("a-share-is-folded-the-moment-it-comes", "if now < came_at + wait_s}", "if wait_s < 0.0}"),
    ),
    *of(
        "log/merge.py",
        "tests/unit/test_feedback.py",
        row("what-is-given-up-is-kept", "master if feedback else published", "master"),
        row("versions-are-shortened", "round_.compute, whole=not feedback)", "round_.compute)"),
        row("every-snapshot-has-a-master", "(() if state.is_published else (state.master,))", "(state.master,)"),
    ),
    *of(
        "learner/checkpoint_shards.py",
        "tests/unit/test_parts.py",
        row(
            "a-piece-is-not-checked",
            "if len(blob) != lies.size or digests.digest(blob) != lies.digest:",
            "if len(blob) != lies.size:",
        ),
        row(
            "every-piece-is-fetched",
            "if any(a >= b for a, b in zip(begin, end, strict=True)):",
            "if len(begin) > 9:",
        ),
        row(
            "parts-may-leave-gaps",
            "if not inside or sum(p.size for p in pieces) != spec.size:",
            "if not inside:",
        ),
        row(
            "pieces-may-lie-outside",
            "if not inside or sum(p.size for p in pieces) != spec.size:",
            "if sum(p.size for p in pieces) != spec.size:",
        ),
    ),
    *of(
        "log/gc.py",
        "tests/unit/test_collect_plan.py",
        row("parts-stay", "if _stand(e.key) not in kept)", "if not _stand(e.key))"),
        row("all-parts-go", "if _stand(e.key) not in kept)", "if _stand(e.key))"),
    ),
    *of(
        "learner/ranks/client.py",
        "tests/integration/test_owners.py",
        row("strangers-are-heard", "not is_secret(hello.secret, self._secret)", "not hello.secret"),
        row("who-is-lost-is-asked-on", "            raise self._lost\n", "            pass\n"),
    ),
    *of(
        "learner/ranks/server.py",
        "tests/integration/test_owners.py",
        row("bytes-are-told-twice", "before, self._told = self._told, (up, down)", "before = self._told"),
    ),
    *of(
        "learner/ranks/arrays.py",
        "tests/integration/test_owners.py",
        row("what-is-forgotten-comes-all-the-same", "if number in self._forgotten:", "if number < 0:"),
    ),
    *of(
        "torch/device.py",
        "tests/integration/test_device.py",
        row("rounding-is-local-work", "before = before.to(values.dtype).float()", "before = before.float()"),
        row("what-was-dropped-is-all-there-was", "                        gradient -= said\n", ""),
        row(
            "a-version-stays-on-the-device",
            "    if isinstance(held, Staged):\n        held.block = None",
            "    return",
        ),
        row("not-finite-is-sent", "if not bool(torch.isfinite(gradient).all()):", "if gradient is None:"),
    ),
    *of(
        "torch/device_codecs.py",
        "tests/unit/test_device_codecs.py",
        row("halves-are-swapped", "(low | (high << 4))", "(high | (low << 4))"),
        row("small-scales-stay", "scales.float() < _SMALLEST", "scales.float() < 0.0"),
    ),
    *of(
        "learner/backend.py",
        "tests/unit/test_boundary_uploads.py tests/unit/test_boundary.py",
        row(
            "rounding-is-local-work",
            "(rounded(base, fragment.tensors) if since is None else since)",
            "(base if since is None else since)",
        ),
    ),
    *of(
        "learner/backend.py",
        "tests/unit/test_uplink_settles.py",
        row(
            "an-update-with-the-wrong-sign",
            "kernels.subtract(rounded(base, fragment.tensors), values, gradient)",
            "kernels.subtract(values, rounded(base, fragment.tensors), gradient)",
        ),
        row(
            "updates-are-written-over",
            "await self.log.store.create(key, packed.body)",
            "await self.log.store.put(key, packed.body)",
        ),
        row("nothing-is-fed-back", "            kernels.add(gradient, feedback, gradient)\n", "            pass\n"),
        row("updates-are-shortened", "whole=not self._run.rules.error_feedback)", "whole=False)"),
        row(
            "a-polar-factor-of-any-length", "kernels.scale(level, before / after, difference)", "difference[:] = level"
        ),
        row(
            "zeros-are-divided-by",
            "        if after > 0.0:\n            kernels.scale",
            "        if True:\n            kernels.scale",
        ),
    ),
    *of(
        "format/rules.py",
        "tests/unit/test_uplink_settles.py",
        row(
            "embeddings-are-sent-isotropically",
            "return self.isotropic_up and role == TensorClass.DENSE",
            "return self.isotropic_up",
        ),
    ),
    *of(
        "log/listing.py",
        "tests/integration/test_donors.py",
        row(
            "checkpoints-go-by-step-whatever-life", '(int(e.key.split("/")[2]), version_in(e.key))', "version_in(e.key)"
        ),
    ),
    *of(
        "learner/resume.py",
        "tests/integration/test_donors.py",
        row(
            "the-oldest-donor-first",
            "key=lambda e: (e[0], -e[1].modified))][:DONORS_MAX]",
            "key=lambda e: (e[0], e[1].modified))][:DONORS_MAX]",
        ),
        row("anybody-is-a-donor", "if name != learner and name in among", "if name != learner"),
    ),
    *of(
        "torch/loop.py",
        "tests/integration/test_donors.py",
        row("the-samplers-state-moves-on", "tree.copied(one.state_dict())", "one.state_dict()"),
    ),
    *of(
        "learner/agent.py",
        "tests/integration/test_lingering.py",
        row(
            "answers-are-not-waited-for",
            "self._wait_s and self.uplink.awaits",
            "self._wait_s and not self.uplink.awaits",
        ),
        row(
            "nobody-passes-for-a-loop-that-has-ended",
            "                if not self._lingers:\n",
            "                if True:\n",
        ),
        row("its-own-update-is-passed-over", "elif afresh or version - 1 not in", "elif True or version - 1 not in"),
        row("what-is-to-be-sent-anew-is-waited-for", "elif afresh or version - 1 not in", "elif version - 1 not in"),
    ),
    *of(
        "learner/uplink.py",
        "tests/unit/test_uplink_settles.py",
        row(
            "what-is-on-its-way-is-sent-again",
            "self.taken[p][base], self.residuals[p] = self.residuals[p], None",
            "self.taken[p][base] = self.residuals[p]",
        ),
        row(
            "an-unknown-residual-is-kept",
            '            self.residuals[p], self.residual_of[p] = None, ""\n',
            "            pass\n",
        ),
        row(
            "any-unknown-residual-is-dropped",
            "elif merged.incarnation != self.incarnation and p not in self._own_feedback:",
            "else:",
        ),
        row(
            "a-base-expires-a-version-early",
            "for base in [b for b in self.accounts[p].sent if version - b > self._pace.staleness]:",
            "for base in [b for b in self.accounts[p].sent if version - b >= self._pace.staleness]:",
        ),
        row(
            "what-was-packed-expires-a-version-early",
            "for base in [b for b in self._made[p] if version - b > self._pace.staleness]:",
            "for base in [b for b in self._made[p] if version - b >= self._pace.staleness]:",
        ),
        row(
            "what-was-carried-comes-back-too-early",
            "self._put_back(p, version - self._pace.staleness)",
            "self._put_back(p, version - self._pace.staleness + 1)",
        ),
        row(
            "any-rejection-on-a-base-closes-it",
            "and turned.reason in FINAL and turned.digest == attempt.digest:",
            "and turned.reason in FINAL:",
        ),
        row(
            "a-call-is-answered-with-the-next-one",
            "sent = self.attempts[fragment].get(version - 1)",
            "sent = self.attempts[fragment].get(version)",
        ),
        row(
            "a-call-is-answered-whenever",
            "if sent is not None and self._runtime.now() - sent.said_at > self._pace.heartbeat_s / 4:",
            "if sent is not None:",
        ),
        row("the-oldest-is-said-again", "newest = attempts[max(attempts)]", "newest = attempts[min(attempts)]"),
        row(
            "a-failure-forgets-the-update-before-it",
            "account.unsend(base, earlier.header.tokens if earlier else None)",
            "account.unsend(base, None)",
        ),
        row("one-turn-for-all-that-wait", "        while self.window.full:\n", "        if self.window.full:\n"),
        row("nobody-says-that-the-wire-is-free", "            self._freed.set()\n", ""),
        row("older-bases-stay-open", "for base in [b for b in account.sent if b < given.base]:", "for base in []:"),
    ),
    *of(
        "learner/boundary.py",
        "tests/unit/test_boundary_uploads.py tests/unit/test_boundary.py",
        row("who-waits-adopts-no-more-than-others", "while self.overdue() and (into", "while False and (into"),
        row(
            "a-failed-upload-takes-local-work-along",
            "                        slot.sent_values = None if sent_step is None else slot.prior_values\n",
            "",
        ),
        row(
            "a-failure-on-a-base-that-is-gone",
            "                    if slot.base == base:\n                        # Capture",
            "                    if True:\n                        # Capture",
        ),
        row(
            "too-far-behind-a-version-early",
            "if behind > self._staleness or slot.merged",
            "if behind >= self._staleness or slot.merged",
        ),
        row(
            "a-merged-base-is-answered",
            "if behind > self._staleness or slot.merged or",
            "if behind > self._staleness or",
        ),
        row(
            "an-evaluation-is-a-step",
            "self.step_s = statistics.median(self._durations)",
            "self.step_s = statistics.fmean(self._durations)",
        ),
        row("whoever-was-sent-last-goes-first", "_, _, p = min(wanting)", "_, _, p = max(wanting)"),
        row(
            "the-newest-is-replaced-first",
            "return min(ready)[1] if ready else None",
            "return max(ready)[1] if ready else None",
        ),
        row("rounds-to-come-lie-in-the-past", "(last - version) * self._round_s", "(version - last) * self._round_s"),
        row(
            "an-upload-takes-no-time",
            "return now + self._window.upload_s + LATE_STEPS * self.step_s > closes_at",
            "return now + LATE_STEPS * self.step_s > closes_at",
        ),
        row(
            "what-was-sent-is-kept-twice",
            "slot.origin_step, slot.origin_tokens = slot.sent_step, slot.sent_tokens",
            "pass",
        ),
        row(
            "local-work-is-replaced-unsent",
            "slot.ready.version - slot.base <= self._staleness",
            "slot.ready.version - slot.base < self._staleness",
        ),
    ),
    *of(
        "learner/upload_window.py",
        "tests/unit/test_upload_window.py",
        row("one-more-whenever", "(in_hand == self.limit and self.free_at <= now + step_s)", "(in_hand == self.limit)"),
        row(
            "never-one-more",
            "return in_hand < self.limit or (in_hand == self.limit and self.free_at <= now + step_s)",
            "return in_hand < self.limit",
        ),
        row("a-failure-is-a-measurement", "if stored and now > began_at:", "if now > began_at:"),
        row("only-those-that-were-there-count", "max(beside, len(self._under_way) + 1))", "beside)"),
        row(
            "too-much-is-tried-again-and-again",
            "self._patience = min(TRIES_MAX, 2 * self._patience)",
            "self._patience = min(TRIES_MAX, self._patience)",
        ),
        row(
            "too-much-is-hardly-tried-again",
            "self._patience = min(TRIES_MAX, 2 * self._patience)",
            "self._patience = 2 * self._patience",
        ),
        row("queues-make-it-grow", "if queued > QUEUED_HIGH and", "if queued < QUEUED_LOW and"),
        row("it-never-grows", "            self.limit += 1\n", ""),
        row("free-when-the-last-is-through", "self.free_at = min(at + size", "self.free_at = max(at + size"),
    ),
    *of(
        "learner/downlink.py",
        "tests/unit/test_downlink_order.py",
        row(
            "a-false-word-is-looked-into-for-ever",
            "            known.wanted = known.version  # The",
            "            pass  # The",
        ),
        row("what-has-not-come-is-told-again", "if known.version == before:", "if False:"),
        row("whoever-is-least-behind-goes-first", "p = max(behind, key=", "p = min(behind, key="),
        row(
            "whoever-was-brought-last-goes-first",
            "known.wanted - known.version, -known.brought_at",
            "known.wanted - known.version, known.brought_at",
        ),
        row("to-the-end-of-the-log", "await self._leap(p, wanted)", "await self._leap(p, None)"),
        row("always-from-a-snapshot", "if behind * difference > from_snapshot:", "if behind * difference > 0:"),
        row("never-from-a-snapshot", "if behind * difference > from_snapshot:", "if False:"),
        row(
            "silence-is-not-looked-into",
            "                            self._want(p, commit.version)\n",
            "                            pass\n",
        ),
        row("a-silent-syncer-is-waited-for", "if unheard_s < self._pace.silence_s:", "if True:"),
        row("the-store-is-asked-as-often-for-ever", "unheard_s / 2", "0.0"),
        row("the-store-is-asked-ever-less", "min(longest_s, max", "max(0.0, max"),
        row(
            "what-is-leapt-over-settles-nothing",
            "digest)\n            self._settle(commit)\n",
            "digest)\n",
        ),
        row("two-fetch-the-same", "if k.wanted > k.version and not k.fetching]", "if k.wanted > k.version]"),
        row("a-long-way-is-how-long-one-takes", "if behind == 1:", "if behind >= 1:"),
    ),
]
