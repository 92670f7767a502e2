"""Which tests `make check`, `make test` and `make test-all` run: `pytest --tier check|test|all`.

The directory of a test decides. A mark on the module, the test or one of its parameters overrides it. A test that needs
a real server is never in the first tier. Each tier contains the tiers before it. Without `--tier`, pytest runs what it
is given.

    check   algorithm, unit, fuzz, forgery, conformance on a folder, SQLite and the simulator
    test    conformance on real servers, integration, advice, simulation, infra, docs, and what carries `tier("test")`
    all     e2e, chaos, release, scale, gpu, and what carries `tier("all")`

Tests with the mark `gpu` run only by `make gpu`.

A test carries `tier("all")` if it takes more than a few seconds and another test of a lower tier covers its main case,
or if it measures instead of checking. A unit test carries `tier("test")` if it is slow and few changes touch its
subject: the planner, benchmarks. An e2e test carries `tier("test")` if it covers the main job of one area,
or takes less than a second: what runs at night alone is broken unnoticed.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TIERS = ("check", "test", "all")

DIRECTORIES = {
    "unit": "check", "fuzz": "check", "conformance": "check", "forgery": "check", "algorithm": "check",
    "integration": "test", "advice": "test", "simulation": "test", "infra": "test", "docs": "test",
    "e2e": "all", "chaos": "all", "release": "all", "scale": "all", "gpu": "all",
}  # fmt: skip

SERVERS = {"redis", "seaweedfs", "moto", "azurite", "google"}
"""Fixtures that start a real server, and words in the parameters of a test that stand for one."""


def tier_of(item: pytest.Item) -> str:
    """Return the tier that a test is in. Raises `KeyError` for a directory that is in no tier."""
    own = [mark for mark in item.own_markers if mark.name == "tier"]  # marks of parameters come last
    mark = own[-1] if own else item.get_closest_marker("tier")
    tier: str = mark.args[0] if mark else DIRECTORIES[_directory(item)]
    if tier == "check" and _needs_server(item):
        return "test"
    return tier


def _directory(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("tests/").partition("/")[0]


def _needs_server(item: pytest.Item) -> bool:
    fixtures = set(getattr(item, "fixturenames", ()))
    call = getattr(item, "callspec", None)
    words = (
        {word for value in call.params.values() if isinstance(value, str) for word in value.split()} if call else set()
    )
    return bool(SERVERS & (fixtures | words))


def is_above(path: Path, highest: str) -> bool:
    """Return whether a directory or module has no test up to this tier, so that it need not be imported.

    No mark brings a test into the first tier. A module has the mark of a lower tier in its own text.
    """
    if path.parent == TESTS:
        return highest == TIERS[0] and DIRECTORIES.get(path.name, highest) != highest
    own = DIRECTORIES.get(path.relative_to(TESTS).parts[0], highest) if path.is_relative_to(TESTS) else highest
    above = TIERS.index(own) > TIERS.index(highest)
    return above and path.name.startswith("test_") and f'tier("{highest}")' not in path.read_text()


def split(items: Iterable[pytest.Item], highest: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests up to this tier, and the others."""
    chosen: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        (chosen if TIERS.index(tier_of(item)) <= TIERS.index(highest) else others).append(item)
    return chosen, others
