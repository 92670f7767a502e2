"""Mistakes in what status, plan and the end of a learner say."""

from mutants.mutant import of, row

MUTANTS = [
    *of(
        "inspect/learner_problems.py",
        "tests/unit/test_health.py tests/unit/test_health_damage.py tests/unit/test_health_learners.py tests/advice/test_status_waits.py",
        row("work-rejected-at-half", "tally.rejected <= REJECTED * tally.processed", "tally.rejected <= 0.0"),
    ),
    *of(
        "inspect/health_summary.py",
        "tests/unit/test_health.py tests/unit/test_health_damage.py tests/unit/test_health_learners.py tests/advice/test_status_waits.py tests/advice/test_status_other_bus.py",
        row(
            "the-exploded-are-told-to-come-back",
            "_of_silence([name for name in silent if name not in gone], ",
            "_of_silence(silent, ",
        ),
        row("at-work-elsewhere-is-well", "apart := not status.elsewhere.isdisjoint(status.storing)", "apart := False"),
        row(
            "whoever-stores-is-elsewhere",
            "apart := not status.elsewhere.isdisjoint(status.storing)",
            "apart := bool(status.storing)",
        ),
        row(
            "merged-while-nothing-is", "{0 if stuck else len(judged) - len(troubles)}", "{len(judged) - len(troubles)}"
        ),
    ),
    *of(
        "inspect/health_summary.py",
        "tests/unit/test_health.py tests/unit/test_health_damage.py tests/unit/test_health_learners.py",
        row("the-oldest-syncers-are-frozen", "if not alive.stopping][:-3:-1]", "if not alive.stopping][:2]"),
    ),
    *of(
        "inspect/status.py",
        "tests/advice/test_status_other_bus.py tests/unit/test_health.py tests/unit/test_health_damage.py tests/unit/test_health_learners.py",
        row(
            "a-claim-is-a-checkpoint",
            "for e in entries if not incarnation_in(e.key) and now - e.modified < STORING_S",
            "for e in entries if now - e.modified < STORING_S",
        ),
        row(
            "stored-once-is-storing",
            "if not incarnation_in(e.key) and now - e.modified < STORING_S",
            "if not incarnation_in(e.key)",
        ),
    ),
    *of(
        "learner/summary.py",
        "tests/unit/test_summary.py",
        row("unanswered-hides-what-is-lost", 'kept = more if self.unkept else ""', 'kept = ""'),
        row("what-is-kept-goes-on-twice", 'kept = more if self.unkept else ""', "kept = more"),
    ),
    *of(
        "isthmus_lab/forecast/planner.py",
        "tests/unit/test_plan_choices.py",
        row("the-other-rule-is-not-named", "if len(rules) == 1 and o.rules.merge not in rules][:1]", "if False][:1]"),
        row(
            "ties-do-not-say-what-is-extrapolated",
            '{_beside(case, o, best)}{_marked(o)}" for o in first',
            '{_beside(case, o, best)}" for o in first',
        ),
    ),
    *of(
        "isthmus_lab/forecast/search.py",
        "tests/unit/test_plan_choices.py tests/unit/test_plan.py",
        row(
            "a-tie-is-what-is-shorter-by-the-error",
            "high <= (1.0 + learning.error()) * low",
            "(1.0 - learning.error()) * high <= low",
        ),
        row("every-period-has-its-own-limit", "h - h % max(1, 1 << h.bit_length() >> 7)", "h"),
    ),
    *of(
        "isthmus_lab/forecast/outcome.py",
        "tests/unit/test_plan.py tests/unit/test_plan_merged.py tests/unit/test_plan_choices.py",
        row(
            "rest-is-where-it-is-tried-first",
            "tried = (low + high) // 2\n        return low",
            "tried = high\n        return low",
        ),
        row(
            "later-than-half-a-step",
            "self._later_s(self._opened_s(islands), island, islands, 0.5)",
            "self._later_s(self._opened_s(islands), island, islands, 1.0)",
        ),
    ),
    *of(
        "isthmus_services/servers.py",
        "tests/integration/test_trial_servers.py",
        row("a-port-that-was-used-is-taken", "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)", "pass"),
        row("the-other-server-s-port", '("AWS_ENDPOINT_URL", "ISTHMUS_BUS")', '("ISTHMUS_BUS", "AWS_ENDPOINT_URL")'),
    ),
    *of(
        "isthmus_services/commands/replay.py",
        "tests/integration/test_own_rule.py",
        row("a-failed-evaluation-is-well", "return 1 if a.exec and None in losses else 0", "return 0"),
    ),
    *of(
        "demo/trainer.py",
        "tests/advice/test_logs.py::test_a_schedule_alone_is_no_other_setting",
        row(
            "a-schedule-is-another-setting",
            '{"params": matrices, "weight_decay": WEIGHT_DECAY, "initial_lr": PEAK_LR}',
            '{"params": matrices, "weight_decay": WEIGHT_DECAY}',
        ),
    ),
    *of(
        "syncer/run_object.py",
        "tests/advice/test_run_object.py",
        row(
            "a-run-object-that-is-there-is-missed",
            "newest is None or found is not None or not",
            "newest is None or not",
        ),
        row(
            "a-run-that-is-deleted-gets-its-run-object-back", " or not await is_there(store, commit_key(*newest)):", ":"
        ),
        row("a-denial-is-said-each-minute", "            denied = True\n", ""),
        row("a-cut-run-object-is-said-each-minute", " and not damaged:", ":"),
        row(
            "it-is-said-once-for-ever",
            "damaged = found is not None and found",
            "damaged = damaged or found is not None and found",
        ),
        row("a-run-object-without-bytes", "store.create(RUN_KEY, run.blob)", 'store.create(RUN_KEY, b"")'),
    ),
    *of(
        "log/heal.py",
        "tests/advice/test_heal.py tests/advice/test_heal_lost.py tests/advice/test_heal_objects.py",
        row("a-snapshot-of-a-lost-version-stays", "sorted(beyond.keys)", "sorted(beyond.keys)[1:]"),
        row(
            "a-commit-that-is-gone-is-to-be-deleted",
            "if await is_there(log.store, error.key) else []\n    there +=",
            "if True else []\n    there +=",
        ),
        row("a-lost-version-with-a-snapshot-was-none", "if adopted or beyond.others:", "if adopted:"),
        row(
            "what-is-missing-has-its-old-advice",
            "if commit_in(error.key) == at.version + 1:\n",
            "if False:\n",
        ),
    ),
    *of(
        "log/commits.py",
        "tests/advice/test_heal.py tests/advice/test_heal_lost.py tests/advice/test_heal_objects.py tests/advice/test_doctor_run.py::test_holes_in_the_log",
        row("damage-behind-a-hole-is-not-seen", "return found, wrong\n", "return found, None\n"),
        row("a-time-before-the-damage-is-refused", "time > newest.header.written_at", "time > 0.0"),
        row("a-time-after-the-damage-is-answered", "time > newest.header.written_at", "False"),
    ),
    *of(
        "inspect/export.py",
        "tests/advice/test_heal_lost.py::test_a_newest_commit_that_is_damaged_and_has_a_snapshot",
        row("no-version-before-damage", "(version is None or version > least)", "True"),
        row("damage-is-no-end", "(version is None or version > least)", "False"),
    ),
    *of(
        "torch/loop.py",
        "tests/advice/test_logs.py tests/unit/test_loop.py",
        row(
            "steps-that-nobody-was-told-of-are-never-too-many",
            "self._begun, self._untold = False, 0",
            "self._begun = False",
        ),
        row(
            "a-call-for-each-micro-batch",
            "few, many = self._steps < STEPPED * IDLE_STEPS,",
            "few, many = not self._steps,",
        ),
        row("a-scaler-skips-too-many", "STEPPED = 0.75", "STEPPED = 0.8"),
        row("two-steps-a-call", "STEPPED * self._made > self._calls", "False"),
        row("each-window-warns-of-few", "if few and not self._few:", "if few:"),
        row("each-window-warns-of-many", "if many and not self._many:", "if many:"),
        row("a-schedule-may-be-another", "now != plan.get(key, now)", "False"),
        row(
            "a-passed-schedule-begins-anew",
            "                catch_up(schedule, place)\n",
            "                catch_up(schedule, 0)\n",
        ),
        row("a-plateau-has-a-place", "LRScheduler) or watches:", "LRScheduler):"),
        row("a-place-is-a-setting", '"last_lr", "T_cur", "T_i"}', '"last_lr"}'),
    ),
    *of(
        "torch/moments.py",
        "tests/unit/test_loop.py",
        row("a-cycled-momentum-is-a-setting", 'if name not in CYCLED or "max_momentum" not in here', "if True"),
        row("a-passed-cycle-keeps-its-old-peak", '"initial_lr", "max_lr", "min_lr")', '"initial_lr")'),
    ),
    *of(
        "inspect/health_summary.py",
        "tests/advice/test_status_stands.py tests/unit/test_health.py tests/unit/test_health_damage.py tests/unit/test_health_learners.py",
        row(
            "work-is-never-too-old",
            "2 * sum(base < status.version(p) - status.pace.staleness",
            "0 * sum(base < status.version(p) - status.pace.staleness",
        ),
        row(
            "work-on-the-version-before-is-too-old",
            "status.version(p) - status.pace.staleness for",
            "status.version(p) for",
        ),
    ),
    *of(
        "inspect/learner_problems.py",
        "tests/unit/test_health.py tests/unit/test_health_damage.py tests/unit/test_health_learners.py",
        row("one-that-moves-hardly-moves", "if all(2 * sum(short[other])", "if any(2 * sum(short[other])"),
        row("nobody-hardly-moves", "if all(2 * sum(short[other])", "if False and all(2 * sum(short[other])"),
    ),
    *of(
        "inspect/learner_problems.py",
        "tests/advice/test_status_stands.py",
        row("a-loop-is-never-behind", "if behind < STANDS_STILL or", "if True or"),
        row("nobody-ever-stepped", "    if beat.step_s:\n        said", "    if False:\n        said"),
    ),
    *of(
        "doctor/findings.py",
        "tests/advice/test_doctor_bus.py::test_a_bus_in_a_folder_to_come",
        row("a-reader-needs-no-run", "self.kind in (RoleKind.OPERATOR, RoleKind.OWNER)", "True"),
        row("an-operator-needs-a-run", "self.kind in (RoleKind.OPERATOR, RoleKind.OWNER)", "False"),
    ),
    *of(
        "learner/global_local.py",
        "tests/integration/test_global_buffers.py",
        row("no-learner-counts", "        if commit is not None:\n", "        if False:\n"),
    ),
    *of(
        "isthmus_lab/forecast/island.py",
        "tests/unit/test_plan_choices.py::test_a_restart_is_a_start_and_what_reading_the_checkpoint_takes",
        row("a-restart-reads-nothing", "return self.restart_s + self.reading_s(size)", "return self.restart_s"),
    ),
    *of(
        "isthmus_lab/forecast/compare.py",
        "tests/unit/test_compare.py",
        row("one-place-reads-too", "i.restart_s if read is None else i.away_s(read)", "i.away_s(read or 2.4e9)"),
    ),
    *of(
        "inspect/bursts.py",
        "tests/unit/test_bursts.py",
        row("a-loss-that-stays-high-leapt", "min(losses[number] / LEAP, LEAP * before)", "losses[number]"),
        row("a-loss-that-scatters-leaps", "BEFORE_LOSS = 64", "BEFORE_LOSS = 8"),
    ),
    *of(
        "inspect/losses.py",
        "tests/unit/test_losses.py",
        row("diverged-at-once-is-well", "if first > 0.0 and min(newest) > WORSE * first:", "if False:"),
        row("the-worst-first-loss-counts", "first = min(point.loss", "first = max(point.loss"),
    ),
    *of(
        "inspect/learner_problems.py",
        "tests/unit/test_health.py tests/unit/test_health_damage.py tests/unit/test_health_learners.py",
        row("whoever-leaves-may-diverge", "(name in left and not ended)", "name in left"),
        row("whoever-left-is-named", "(name in left and not ended)", "False"),
        row("few-cuts-are-an-explosion", "seen >= MANY and", "True and"),
        row("cuts-go-on-unnamed", "len(halved) + len(gone) > STEADILY * seen", "False"),
    ),
    *of(
        "inspect/health_summary.py",
        "tests/unit/test_health.py tests/unit/test_health_damage.py tests/unit/test_health_learners.py tests/advice/test_status.py::test_work_of_one_that_left_while_no_syncer_was_there "
        "tests/advice/test_status.py::test_a_bus_that_is_full tests/advice/test_logs.py::test_two_syncers_of_one_name "
        "tests/advice/test_status.py::test_the_command_for_a_syncer_has_the_quorum_of_the_one_before",
        row("the-oldest-silence-comes-first", "(-versions.get(name, 0), name)", "(versions[name], name)"),
        row("a-stopped-syncer-may-be-frozen", " if not alive.stopping][:-3:-1]", "][:-3:-1]"),
        row("a-twin-is-no-trouble", "if alive.twin:", "if False:"),
        row("a-full-bus-is-any-silence", "        if status.bus_refusing:", "        if False:"),
        row(
            "work-that-waits-is-forgotten",
            "        if unanswered := _unanswered(status):\n            do",
            "        if unanswered := []:\n            do",
        ),
    ),
    *of(
        "syncer/agent.py",
        "tests/advice/test_logs.py::test_a_syncer_alone_is_no_twin_after_the_bus_was_away "
        "tests/advice/test_logs.py::test_a_syncer_that_hears_no_learner "
        "tests/advice/test_logs.py::test_two_syncers_of_one_name",
        row("waiting-heartbeats-are-a-twins", "OWN_BEATS = 2 * UNSAID_MAX", "OWN_BEATS = 64"),
        row("a-heard-learner-is-not-heard", "self._heard_learners |= not old", "pass"),
        row(
            "a-twin-is-not-told",
            "twin=self._runtime.now() < self._twin_at",
            "twin=False and self._runtime.now() < self._twin_at",
        ),
    ),
    *of(
        "bus/redis.py",
        "tests/advice/test_status.py::test_a_bus_that_is_full tests/advice/test_status.py::test_a_bus_that_was_demoted "
        "tests/advice/test_status.py::test_processes_that_were_all_killed",
        row("no-bus-is-full", "if used > FULL * most > 0:", "if False:"),
        row("no-bus-is-a-replica", "if facts.role != PRIMARY:", "if False:"),
    ),
    *of(
        "link/agent_thread.py",
        "tests/integration/test_own_loop_logs.py::test_a_closed_link_whose_agent_had_failed_was_closed",
        row(
            "a-closed-link-was-not-closed",
            "        atexit.unregister(self._at_exit)\n        loop, thread",
            "        loop, thread",
        ),
    ),
]
