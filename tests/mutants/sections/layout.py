"""Mistakes in how a model is cut into fragments."""

from mutants.mutant import of, row

MUTANTS = [
    *of(
        "format/layout.py",
        "tests/unit/test_layout.py",
        row("no-tensor-is-cut", "if spec.size > max(limit, CUT_FROM) else 1", "if spec.size < 0 else 1"),
        row("small-tensors-are-cut-too", "if spec.size > max(limit, CUT_FROM) else 1", "if spec.size > limit else 1"),
        row("uneven-is-good-enough", "if not finer or heaviest <= BALANCED * mean or limit <= PIECE_MIN:", "if best:"),
        row("a-fragment-may-be-empty", "if sorted(tensors) != list(range(len(tensors))):", "if not tensors:"),
        row("every-piece-begins-at-the-first-row", "return 0 if self.rows is None else self.rows[0] *", "return 0 *"),
        row("rows-may-be-missing", "if sum(rows for _, rows in cuts) != height:", "if not cuts:"),
    ),
    *of(
        "torch/shard_transfer.py",
        "tests/unit/test_shards.py",
        row("overlaps-are-no-matter", "if not (apart and inside and", "if not (inside and"),
        row("gaps-are-no-matter", "and sum(p.block.size for p in found) == prod(shape)):", "):"),
        row("the-last-replica-gives", "first.setdefault(blocks[rank], rank)", "first[blocks[rank]] = rank"),
        row(
            "empty-blocks-are-pieces",
            "        if blocks[rank].size:\n            first",
            "        if True:\n            first",
        ),
    ),
    *of(
        "torch/ranks.py",
        "tests/unit/test_shards.py",
        row("any-dimension-is-a-shard", "if dimension in REFUSED:", "if dimension in ():"),
        row("one-long-is-several", "            if size > 1:\n", "            if size > 0:\n"),
        row(
            "some-replicas-are-all",
            "m.process_group.size() < dist.get_world_size() for m",
            "m.process_group.size() < 1 for m",
        ),
    ),
    *of(
        "format/memory.py",
        "tests/unit/test_memory.py",
        row(
            "what-a-view-shows-is-given-away",
            "array = np.frombuffer(memory, np.uint8)",
            "array = np.frombuffer(memory, np.uint8)[:]",
        ),
        row("all-is-kept", "if self.kept + size <= self.kept_max:", "if True:"),
        row("nothing-is-kept", "if self.kept + size <= self.kept_max:", "if False:"),
        row("nothing-makes-way", "if s != size]:", "if False]:"),
        row("zeros-are-what-was-there", "    found.fill(0.0)\n", ""),
    ),
]
