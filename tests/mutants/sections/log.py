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
        row("the-end-is-looked-for-from-the-oldest", "version = snapshots[0][0]", "version = snapshots[-1][0]"),
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
        row(
            "a-commit-of-another-fragment",
            "found, wanted = (header.run, header.fragment, header.version), (self.run.digest, fragment, version)",
            "found, wanted = (header.run, header.version), (self.run.digest, version)",
        ),
        row("any-arithmetic", "if header.arithmetic != ARITHMETIC:", "if header.arithmetic < ARITHMETIC:"),
        row(
            "a-commit-of-nothing",
            "if bool(header.inputs) == (header.healed is not None):",
            "if bool(header.inputs) and header.healed is not None:",
        ),
        row("a-segment-is-taken-on-trust", "if found != at.digest:", "if False:"),
    ),
    *of(
        "log/fold.py",
        "tests/unit/test_fold_walk.py",
        row("the-snapshot-asked-for-is-passed-over", "version > at_most:", "version >= at_most:"),
        row("one-version-too-far", "if at.version == until:", "if until is not None and at.version > until:"),
        row("a-version-short-is-good-enough", "if until is not None and at.version < until:", "if False:"),
        row("one-commit-too-few-is-kept", "max(1, version - keep + 1)", "max(1, version - keep + 2)"),
        row("the-oldest-commits-are-kept", "(*at.last, commit)[-keep:])", "(*at.last, commit)[:keep])"),
        row(
            "any-state-is-believed",
            "        if found != wanted:\n            by =",
            "        if False:\n            by =",
        ),
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
            "any-version-0-will-do",
            "if commit is None and key != snapshot_key(fragment, 0, self.log.run.header.snapshots[fragment]):",
            "if False:",
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
        argued(
            "a-snapshot-of-anything",
            '    if found != wanted:\n        raise LogCorrupt(key, f"is of fragment',
            '    if False:\n        raise LogCorrupt(key, f"is of fragment',
            "what a snapshot is of is checked twice: its state (or published value) must have the digest that the "
            "commit of this fragment and version recorded, and version 0 is the object that the run names by digest",
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
