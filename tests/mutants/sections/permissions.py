"""Mistakes in permissions."""

from mutants.mutant import of, row

MUTANTS = [
    *of(
        "format/signing/sshsig.py",
        "tests/unit/test_signing.py",
        row("any-key-is-a-key", "if is_small_order(author) or is_small_order(signature[:32]):", "if False:"),
        row("r-is-not-looked-at", "or is_small_order(signature[:32]):", "or False:"),
        row(
            "kinds-are-one",
            'MAGIC + string(namespace) + string(b"") + string(HASH) + string(hashlib',
            'MAGIC + string(b"x") + string(b"") + string(HASH) + string(hashlib',
        ),
    ),
    *of(
        "format/signing/keys.py",
        "tests/unit/test_signing.py",
        row("others-may-read-it", "and not _is_mounted(path):", "and False:"),
        row("keys-are-written-over", "        if file.exists():\n", "        if False:\n"),
    ),
    *of(
        "format/records/frame.py",
        "tests/integration/test_signed.py tests/integration/test_signed_histories.py",
        row(
            "the-payload-is-not-signed",
            'return b"".join((head[: _SIGNATURE.start], UNSIGNED_SIGNATURE, head[_SIGNATURE.stop :], payload))',
            'return b"".join((head[: _SIGNATURE.start], UNSIGNED_SIGNATURE, head[_SIGNATURE.stop :]))',
        ),
        row(
            "unsigned-is-anybodys",
            "    if author == UNSIGNED_AUTHOR:\n        raise RecordInvalid(Reason.UNSIGNED",
            "    if author == UNSIGNED_AUTHOR:\n        return author\n        raise RecordInvalid(Reason.UNSIGNED",
        ),
    ),
    *of(
        "log/membership.py",
        "tests/unit/test_membership.py tests/integration/test_signed.py tests/integration/test_signed_histories.py",
        row("any-key-for-a-name", "found.key == author and found.role in roles", "found.role in roles"),
        row("any-role", "found.key == author and found.role in roles", "found.key == author"),
        row("patterns-before-names", "return self._named.get(name) or next(", "return next("),
        row("anybody-may-be-the-owner", "if author != before.owner:", "if False:"),
        row(
            "nobody-asks-the-next-owner",
            "if (header.owner != before.owner) != (header.accepted is not None):",
            "if False:",
        ),
        row(
            "histories-of-members-are-not-chained",
            "(header.version, header.previous) != (before.version + 1, before.digest)",
            "header.version != before.version + 1",
        ),
        row("an-old-membership-is-for-ever", "if m.until and version > m.until[fragment]", "if False"),
        row(
            "what-a-member-was-it-is",
            "judges = reversed(self.versions) if under is None else [self.versions[under]]",
            "judges = reversed(self.versions)",
        ),
    ),
    *of(
        "log/commits.py",
        "tests/integration/test_signed.py tests/integration/test_signed_histories.py",
        row("membership-may-go-back", "if commit.header.members < members:", "if False:"),
    ),
    *of(
        "log/bus_messages.py",
        "tests/integration/test_signed.py tests/integration/test_signed_histories.py",
        row("one-batch-of-several", "if len(names) > 1:", "if False:"),
        row(
            "learners-are-syncers",
            "role = MemberRole.SYNCER if owner is None else MemberRole.LEARNER",
            "role = MemberRole.LEARNER",
        ),
    ),
    *of(
        "log/fork_detection.py",
        "tests/unit/test_membership.py",
        row("what-was-said-before-is-forgotten", "if (said := words.pop(version, digest)) != digest:", "if False:"),
        row("one-author-takes-all-places", "self._said.setdefault(by, {})", 'self._said.setdefault("", {})'),
        row("authors-without-end", "if by not in self._said and len(self._said) == AUTHORS_MAX:", "if False:"),
    ),
    *of(
        "syncer/coordinator.py",
        "tests/integration/test_signed.py tests/integration/test_signed_histories.py tests/integration/test_one_learner.py",
        row(
            "an-expelled-learner-is-merged-on",
            "if self._members.signed and not judge.permits(",
            "if False and not judge.permits(",
        ),
    ),
    *of(
        "syncer/round_sum.py",
        "tests/integration/test_one_learner.py tests/integration/test_late_syncer.py",
        row("who-comes-first-decides", "        if not self.usual.known:", "        if False:"),
        row("first-work-at-the-usual-rate", "outers(self._rules, self.inputs)", "outers(self._rules)"),
    ),
    *of(
        "rounds/bounds.py",
        "tests/unit/test_bounds.py",
        row("steps-take-no-time", "if claim.step_s > 0.0 and math.isfinite(claim.elapsed_s):", "if False:"),
        row("untimed-is-boundless", "elif others := self._with(", "elif False and self._with("),
        row(
            "claimed-steps-make-long",
            "length = claim.norm / math.sqrt(min(steps, max(1, statistics.median_low(usual_steps))))",
            "length = claim.norm / math.sqrt(claim.steps)",
        ),
        row("first-work-is-cut-to-the-model", "first *= math.sqrt(min(periods, FIRST_PERIODS))", "first *= 1.0"),
        row("first-steps-are-worth-any-length", "min(periods, FIRST_PERIODS)", "periods"),
        row("any-round-is-a-first-one", "periods = 1.0 if self.known else", "periods ="),
        row("two-are-a-majority", "MAJORITY = 3", "MAJORITY = 2"),
        row("two-may-rise-at-once", "RISES * self._length)", "math.inf)"),
        row("two-may-fall-at-once", "max(min(lengths), FALLS * self._length)", "min(lengths)"),
        row(
            "the-first-is-boundless",
            "if self._length <= 0.0 and len(seen) < MAJORITY and claim.norm * scale > first:",
            "if False:",
        ),
        row("few-are-kept-out", "and len(seen) >= MAJORITY and length > b.refused", "and length > b.refused"),
        row("any-weight", "if weight > (room :=", "if False and weight > (room :="),
        row(
            "each-update-weighs-by-itself",
            "b.weight * statistics.median(weights) - already.learner)",
            "b.weight * statistics.median(weights))",
        ),
        row("any-length", "if length > b.norm * usually:", "if False:"),
        row(
            "who-is-fast-is-long",
            "math.sqrt(min(steps, max(1, statistics.median_low(usual_steps))))",
            "math.sqrt(steps)",
        ),
        row("the-long-are-heavy", "if len(seen) >= MAJORITY and weight > (most :=", "if False and weight > (most :="),
        row(
            "the-mean-of-two-is-usual",
            "statistics.median_low(usual_rates)",
            "statistics.median(usual_rates)",
        ),
        row("the-least-is-of-the-largest", "LEAST * statistics.median_low(weights)", "LEAST * max(weights)"),
        row(
            "the-short-are-loud",
            "elif (short := claim.norm / math.sqrt(steps)) < usually / b.norm:",
            "elif (short := claim.norm / math.sqrt(steps)) < 0.0:",
        ),
        row("nobody-is-too-long", "and length > b.refused * usually", "and False"),
        row("what-is-usual-is-for-ever", "if version - seen.version < REMEMBERED", "if True"),
    ),
    *of(
        "rounds/rounds.py",
        "tests/unit/test_bounds.py",
        row(
            "always-due-is-always-open",
            "-math.inf if last is None else last + limit",
            "-math.inf",
        ),
        row(
            "ages-are-believed",
            "if since is not None and pointer.boundary_at < since and not pointer.old:",
            "if False:",
        ),
        row("who-never-comes-is-waited-for", "return (here - absent) | {learner", "return here | {learner"),
        row("who-comes-at-times-is-not", "(ABSENT_KNOWN if self._live.has_come(learner) else 1)", "1"),
        row("an-overflow-turns-all-away", "if pointer.digest in by:", "if True:"),
    ),
    *of(
        "format/permissions.py",
        "tests/unit/test_permissions.py",
        row("a-fragment-reaches-across-slashes", 'FRAGMENT: "[0-9]{5}"', 'FRAGMENT: ".*"'),
        row("a-learner-deletes-claims", "_grant(DELETE, _CHECKPOINTS,", '_grant(DELETE, f"learners/{OWN}/*",'),
        row(
            "strict-learners-have-donors",
            "if checkpoints else ()",
            "if True else ()",
        ),
        row("a-commit-is-written-over", '_grant(CREATE, "commits/*",', '_grant(REPLACE, "commits/*",'),
        row("a-learner-hears-all", '(("syncer", f"learner/{OWN}"), ', "((ALL_STREAMS,), "),
        row("who-replaces-creates-nothing", "enough = {operation, REPLACE} if operation == CREATE else", "enough ="),
    ),
    *of(
        "doctor/rights.py",
        "tests/integration/test_permissions.py::test_the_doctor_finds_what_is_missing_and_what_is_too_much "
        "tests/integration/test_permissions.py::test_the_doctor_finds_an_administrator_out",
        row(
            "what-is-refused-is-allowed",
            "            except Denied as error:\n                return error",
            "            except Denied as error:\n                return None",
        ),
        row("others-keys-are-free-to-delete", "if not role.may(DELETE, key)]", "if role.may(DELETE, key)]"),
        row(
            "others-keys-are-free-to-create", "free = [key for key in others if not", "free = [key for key in others if"
        ),
        row(
            "others-names-are-free-to-list",
            "_none_may(store, LIST, hidden,",
            "_none_may(store, LIST, [],",
        ),
    ),
    *of(
        "doctor/bus.py",
        "tests/integration/test_tls.py",
        row("whoever-answers-is-verified", "    if not bus.verifies:", "    if bus.verifies:"),
    ),
    *of(
        "doctor/findings.py",
        "tests/integration/test_tls.py",
        row("this-machine-is-far-away", "or place.is_loopback:", "or not place.is_loopback:"),
        row("tls-is-in-the-clear", 'if place.scheme in ("https", "rediss")', 'if place.scheme in ("https",)'),
    ),
    *of(
        "runtime/urls.py",
        "tests/integration/test_tls.py",
        row("authorities-for-what-shows-none", 'if place.scheme != "rediss":', 'if place.scheme == "sqlite":'),
        row("authorities-that-are-not-there", "if not Path(authorities).is_file():", "if not authorities:"),
    ),
    *of(
        "store/bucket.py",
        "tests/infra/test_aws.py::test_what_is_too_large_for_one_request_is_created_all_the_same",
        row("in-parts-again", 'and not (self._whole and mode == "create"):', ":"),
    ),
    *of(
        "log/promotions.py",
        "tests/unit/test_promotions.py",
        row("any-follower-promotes", "if h.by not in gate.promoters:", "if not gate.promoters:"),
        row("any-member-evaluates", "if by is None or by not in gate.evaluators:", "if by is None:"),
        row(
            "one-counts-twice", "if by in names or one.author in authors:", "if by in names and one.author in authors:"
        ),
        row("of-any-cut", "if (m.cut, m.published) != (h.versions[0], h.published):", "if m.cut < 0:"),
        row("the-tolerance-twice", "before + gate.tolerance if", "before + 2 * gate.tolerance if"),
        row(
            "the-median-for-all",
            "before = statistics.median(last.values.values()) if own is None else own",
            "before = statistics.median(last.values.values())",
        ),
        row("one-too-few", "if len(names) < gate.least:", "if len(names) + 1 < gate.least:"),
        row("back-in-time", "if last and h.versions[0] < last.version:", "if last and h.versions[0] < 0:"),
        row(
            "by-the-rule-of-then",
            "if h.members < (newest := max(cut.members,",
            "if h.members < (newest := min(cut.members,",
        ),
        row("of-other-bytes", "if h.published != cut.published:", "if not h.published:"),
        row(
            "a-fork-is-followed",
            "if h.previous != (last.digest if last else members.run.digest):",
            "if not h.previous:",
        ),
        row(
            "evidence-may-lie-anywhere",
            "or not named.key.startswith(evaluations_prefix(gate.series)):",
            "or not named.key:",
        ),
    ),
    *of(
        "log/gc.py",
        "tests/integration/test_promote.py",
        row(
            "what-is-promoted-goes",
            "found.promoted = promotion.version if promotion else None",
            "found.promoted = None",
        ),
        row("its-snapshot-goes", "< start and version_in(e.key) != promoted_from", "< start"),
    ),
    *of(
        "log/manifests.py",
        "tests/unit/test_manifest.py tests/integration/test_manifests.py",
        row("any-source-may-be-declared", "if allowed and source.name not in allowed", "if False"),
        row("no-manifest-is-as-good", "    if named is None:\n        raise", "    if False:\n        raise"),
        row("any-model-is-the-runs", "if header.model != model_digest(log.run.layout):", "if False:"),
    ),
    *of(
        "learner/manifest.py",
        "tests/unit/test_manifest.py tests/integration/test_manifests.py",
        row("a-strangers-manifest-is-its-own", "ManifestHeader, in_force=True)", "ManifestHeader)"),
    ),
    *of(
        "syncer/coordinator.py",
        "tests/integration/test_manifests.py",
        row(
            "an-update-is-not-judged-again",
            "            manifests.require(judge, pointer.learner, update.header.manifest, update.manifest)\n",
            "            pass\n",
        ),
    ),
    *of(
        "inspect/replay.py",
        "tests/integration/test_manifests.py",
        row("a-lost-manifest-is-a-fault", "if error.reason != Reason.UNREAD_MANIFEST:", "if True:"),
        row("any-manifest-was-recorded", "        if given.manifest != h.manifest:", "        if False:"),
    ),
]
