"""Mistakes in garbage collection."""

from mutants.mutant import of, row

MUTANTS = [
    *of(
        "log/gc.py",
        "tests/unit/test_collect_plan.py",
        row(
            "a-young-snapshot-is-no-start",
            "    start = min([start, *young])\n",
            "",
        ),
        row("snapshots-go-last", '    await delete(left.pop("snapshots", []))\n', ""),
        row("a-commit-too-young-is-packed", "if version < young]", "if version <= young]"),
        row(
            "the-oldest-base-that-counts-goes",
            "version_in(e.key) < head - STALENESS_MAX or",
            "version_in(e.key) <= head - STALENESS_MAX or",
        ),
        row(
            "values-above-the-head-go",
            "if version_in(e.key) <= head and version_in(e.key) != start",
            "if version_in(e.key) != start",
        ),
        row(
            "the-snapshot-to-start-from-goes",
            "(e for e in snapshots if version_in(e.key) < start and version_in(e.key) != promoted_from)",
            "(e for e in snapshots if version_in(e.key) <= start and version_in(e.key) != promoted_from)",
        ),
        row("one-version-fewer-is-kept", "at_most=max(0, head - keep))", "at_most=max(0, head - keep + 1))"),
        row(
            "what-unpacked-commits-merged-goes",
            "floor = start if packed_to == start - 1 > 0 else packed_to",
            "floor = start",
        ),
        row("one-checkpoint-is-kept", "return held[:CHECKPOINTS_KEPT]", "return held[: CHECKPOINTS_KEPT - 1]"),
        row(
            "damage-is-packed",
            "lost if following is None else frame.digest(blob) == following.header.previous",
            "lost if following is None else True",
        ),
        row("pointers-do-not-move-on", "        offset += len(blob)\n", ""),
        row(
            "packing-begins-at-the-top",
            "[version for version in reversed(plain) if version < young]",
            "[version for version in plain if version < young]",
        ),
    ),
    *of(
        "log/gc.py",
        "tests/integration/test_full_store.py",
        row("what-commits-name-goes-first", "        for kind in UNNAMED:\n", "        for kind in ():\n"),
        row("a-full-store-stays-full", "            except StoreFull:\n", "            except ZeroDivisionError:\n"),
        row("what-another-fragment-needs-goes", 'int(entry.key.split("/")[1]) == run[0][0] and ', ""),
    ),
]
