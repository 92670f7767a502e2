"""Mistakes in what status, plan and the end of a learner say."""

from mutants.mutant import of, row

MUTANTS = [
    *of(
        "inspect/learner_problems.py",
        "tests/unit/test_health.py tests/advice/test_status_waits.py",
        row("work-rejected-at-half", "tally.rejected <= REJECTED * tally.processed", "tally.rejected <= 0.0"),
    ),
    *of(
        "inspect/health_summary.py",
        "tests/unit/test_health.py tests/advice/test_status_waits.py tests/advice/test_status_other_bus.py",
        row(
            "the-exploded-are-told-to-come-back",
            "if silent := [name for name in silent if name not in gone]:",
            "if silent := [name for name in silent]:",
        ),
        row("at-work-elsewhere-is-well", "ok = ok and status.elsewhere.isdisjoint(status.storing)", "ok = ok and True"),
        row(
            "whoever-stores-is-elsewhere",
            "ok = ok and status.elsewhere.isdisjoint(status.storing)",
            "ok = ok and not status.storing",
        ),
        row(
            "merged-while-nothing-is", "{0 if stuck else len(judged) - len(troubles)}", "{len(judged) - len(troubles)}"
        ),
    ),
    *of(
        "inspect/health_summary.py",
        "tests/unit/test_health.py",
        row(
            "the-oldest-syncers-are-frozen", "list(status.hearing.syncers)[:-3:-1]", "list(status.hearing.syncers)[:2]"
        ),
    ),
    *of(
        "inspect/status.py",
        "tests/advice/test_status_other_bus.py tests/unit/test_health.py",
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
            '{_beside(o, best)}{_per_usd(case)}{_marked(o)}" for o in first',
            '{_beside(o, best)}{_per_usd(case)}" for o in first',
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
]
