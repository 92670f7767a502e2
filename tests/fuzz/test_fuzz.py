"""Every parser keeps to its errors and to its memory on the corpus and on seeded mutations of it."""

import random
import tracemalloc
import zlib

import pytest

from fuzz.mutate import MOST, mutated
from fuzz.targets import CORPUS, TARGETS, Target, originals, seeds
from isthmus.format.records import frame

INPUTS = 1500
"""Mutations for each target. `make fuzz` runs millions."""

FEW = 200
"""Mutations for the target `readers`, where each takes as long as fifty others."""

LIMIT = 96 << 20
"""Most bytes that a parser may have allocated at once for an input of a few KiB. (One header may have 16 MiB.)"""


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
def test_nothing_but_what_a_parser_may_raise_comes_out_of_it(target: Target) -> None:
    draw = random.Random(zlib.crc32(target.name.encode()))
    known = seeds(target)
    assert len(known) > 1, "the corpus must have a real object for this target"
    for data in known:
        target.run(data)
    for _ in range(FEW if target.name == "readers" else INPUTS):
        data = mutated(draw.choice(known), draw, draw.choice(known), target.framed)
        try:
            target.run(data)
        except BaseException as error:
            error.add_note(f"{target.name}, of {data.hex()}")
            raise


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
def test_no_input_takes_more_memory_than_it_may(target: Target) -> None:
    draw = random.Random(1)
    known = seeds(target)
    inputs = [mutated(draw.choice(known), draw, draw.choice(known), target.framed) for _ in range(150)]
    target.run(known[0])  # what the first run loads and compiles must not count
    tracemalloc.start()
    try:
        for data in inputs:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            target.run(data)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < LIMIT, f"{peak} bytes for {data[:4096].hex()}"
    finally:
        tracemalloc.stop()


def test_a_mutation_gets_behind_the_checksum() -> None:
    """Otherwise the checksum would reject every mutation, and the code behind it would not be fuzzed."""
    draw = random.Random(0)
    target = TARGETS["record-commit"]
    known = seeds(target)
    passed = 0
    for _ in range(300):
        data = mutated(draw.choice(known[:-1]), draw)
        size = frame.header_size(data) if len(data) >= frame.PREFIX.size else 0
        raw = data[frame.PREFIX.size : frame.PREFIX.size + size]
        passed += len(raw) == size > 0 and zlib.crc32(raw) == frame.PREFIX.unpack_from(data)[5]
    assert passed > 100
    assert all(len(mutated(seed, draw)) <= MOST for seed in known)


def test_the_corpus_is_small_and_of_every_kind() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 512 << 10
    assert len(originals()) > 40
