"""Mistakes in the log."""

from mutants.mutant import argued, of, row

MUTANTS = [
    *of(
        "log/commits.py",
        "tests/unit/test_log_chain.py",
        row(
            "another-history-is-walked",
            "if digest is not None and commit.header.previous != digest:",
            "if False:",
        ),
        row(
            "a-segment-vouches-for-itself",
            "                if commit.header.previous != found[-1].digest:\n                    break\n",
            "",
        ),
        row(
            "the-last-in-a-segment-is-believed",
            "if len(found) > 1 and await self._pointed_at(fragment, found[-1].version) != found[-1].digest:",
            "if False:",
        ),
        row("what-follows-a-segment-is-passed-over", "asked, width = after, 1", "width = 1"),
        row("several-read-the-same-segment", "asked, width = after, 1", "asked = after"),
        row("all-of-the-log-is-asked-for-at-once", "width = min(AHEAD_MAX, 2 * width)", "width = 2 * width"),
        row("nothing-is-asked-for-ahead", "width = min(AHEAD_MAX, 2 * width)", "width = 1"),
        argued(
            "what-was-read-already-comes-again",
            "                    if commit.version <= after:\n                        continue",
            "                    if False:\n                        continue",
            "requests ahead are dropped whenever a segment brought more than one commit, and what a segment brings "
            "begins behind the commit that was asked for: nothing comes twice",
        ),
        row(
            "the-end-is-looked-for-from-the-oldest",
            "for version, _ in await self.snapshots(fragment):",
            "for version, _ in reversed(await self.snapshots(fragment)):",
        ),
        row(
            "written-at-is-exclusive",
            "if commit.header.written_at <= time else",
            "if commit.header.written_at < time else",
        ),
        row("a-lost-reply-is-a-lost-round", "return found.digest == ours", "return False"),
        row("whatever-is-there-is-ours", "return found.digest == ours", "return True"),
        row(
            "one-try-to-append",
            "            except Unavailable:\n                found = None\n",
            "            except Unavailable:\n                return False\n",
        ),
        row("a-segment-is-taken-on-trust", "if found != at.digest:", "if False:"),
    ),
    *of(
        "log/verify.py",
        "tests/unit/test_verified.py tests/integration/test_late_syncer.py",
        row("any-digest", "if digest is not None and found != digest:", "if False:"),
        row("a-payload-more", "if kind in WITHOUT_PAYLOAD and len(payload):", "if False:"),
        row("any-run", "if run != (bytes(32) if first else self.run.digest):", "if False:"),
        row("any-name", "WRITERS[kind], _name_in(header), by)", "WRITERS[kind], None, by)"),
        row("any-membership", "by = header.members if isinstance(header, CommitHeader) else under", "by = under"),
        row(
            "any-key",
            "if key != (belongs := _KEYS[record](header, named)):",
            "if not (belongs := _KEYS[record](header, named)):",
        ),
        row("any-author", "author = self.members.require_author(blob, kind, under)", "author = frame.author_of(blob)"),
        row("any-arithmetic", "if h.arithmetic != ARITHMETIC:", "if h.arithmetic < ARITHMETIC:"),
        row(
            "a-commit-of-nothing",
            "if bool(h.inputs) == (h.healed is not None):",
            "if h.inputs and h.healed is not None:",
        ),
        row("an-expelled-syncer-goes-on", "if h.members < earliest:", "if False:"),
        row(
            "any-rules",
            "if (h.dense, h.embedding) != (outer[TensorClass.DENSE], outer[TensorClass.EMBEDDING]):",
            "if h.dense != outer[TensorClass.DENSE]:",
        ),
        row("rules-of-any-round", "merge.outers(self.run.rules, h.inputs)", "merge.outers(self.run.rules)"),
        row("any-codec", "if h.codec_down != codec:", "if False:"),
        row(
            "a-value-anywhere", "if h.value_key != keys.value_key(h.fragment, h.version, h.value_digest):", "if False:"
        ),
        row("any-period", "if h.period and not shortest <= h.period <= longest:", "if h.period > longest:"),
        row("the-same-twice", "if len(bases) < len(h.inputs):", "if False:"),
        row("heals-from-the-future", "h.healed.source < h.version and", "h.healed.source <= h.version and"),
        row("broken-in-the-future", " and h.healed.broken_at <= h.version", ""),
        row("an-input-anywhere", "if given.key != keys.update_key(", "if False and given.key != keys.update_key("),
        row("a-base-of-tomorrow", "if given.base >= h.version:", "if given.base > h.version:"),
        row("no-work", "if given.steps < 1 or given.tokens < 1:", "if given.steps < 1:"),
        row("more-than-it-asked", 'return "" if given.weight <= asked else', 'return "" if True else'),
        row("cut-without-a-word", "if (given.weight, given.scale) != (asked, 1.0):", "if given.weight != asked:"),
        row("any-value", "if found.header.codec != h.codec_down:", "if False:"),
        row("any-version-0", "first = self.run.header.snapshots[fragment] if commit is None else None", "first = None"),
        row("any-fragment", "if (found.header.fragment, found.header.version) != (fragment, version):", "if False:"),
        row("any-state", "if commit is not None and state.digest != commit.header.state_digest:", "if False:"),
        row("half-a-value", "if len(begin) < start + size:", "if len(begin) < start:"),
        row(
            "any-published-value",
            "        if found != wanted:\n            by =",
            "        if False:\n            by =",
        ),
        row("heads-are-believed", "if digests.digest(begin) != digest:", "if False:"),
        row("anybody-verifies", "if proof is not _PROOF:", "if False:"),
    ),
    *of(
        "log/fold.py",
        "tests/unit/test_fold_walk.py",
        row("the-snapshot-asked-for-is-passed-over", "version > at_most:", "version >= at_most:"),
        row("one-version-too-far", "if at.version == until:", "if until is not None and at.version > until:"),
        row("a-version-short-is-good-enough", "if until is not None and at.version < until:", "if False:"),
        row("one-commit-too-few-is-kept", "max(1, version - keep + 1)", "max(1, version - keep + 2)"),
        row("the-oldest-commits-are-kept", "(*at.last, commit)[-keep:])", "(*at.last, commit)[:keep])"),
        row("inputs-may-come-to-anything", "if result.state_digest != commit.header.state_digest:", "if False:"),
        row(
            "everybody-weighs-the-same",
            "(add, update.gradient, given.weight, given.scale)",
            "(add, update.gradient, 1.0)",
        ),
        row(
            "a-refused-input-is-an-outage",
            "    except Denied as error:\n        raise LogCorrupt(given.key,",
            "    except Denied as error:\n        raise error\n        raise LogCorrupt(given.key,",
        ),
        row(
            "a-difference-fits-any-version",
            "if merge.array_digest(out) != header.published_digest:",
            "if False:",
        ),
        row(
            "the-first-healing-is-gone-on-from",
            "            found = commit, last\n",
            "            found = commit, last\n            break\n",
        ),
    ),
    *of(
        "log/heal.py",
        "tests/unit/test_fold_walk.py",
        row(
            "a-new-history-is-begun",
            "previous=newest.digest if newest else log.run.digest",
            "previous=log.run.digest",
        ),
        row(
            "totals-begin-anew",
            "rejected_total=dict(newest.header.rejected_total) if newest else {}",
            "rejected_total={}",
        ),
        row(
            "broken-one-version-earlier",
            "wrong.readable[1] + 1 if wrong.readable",
            "wrong.readable[1] if wrong.readable",
        ),
        row("a-version-is-given-away", "until=error.readable[1]))", "until=error.readable[1] - 1))"),
        row(
            "no-snapshot-behind-it",
            "    await log.store.put(snapshot_key(p, version, await log.sealed_digest(blob)), blob)\n",
            "",
        ),
        row(
            "whoever-was-first-is-written-over",
            "    if not await log.append(p, version, body):\n        return None\n",
            "    await log.append(p, version, body)\n",
        ),
    ),
]
