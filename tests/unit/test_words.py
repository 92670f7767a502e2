"""Each concept has one word: no old name is left, and every name in the table of words exists."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OVERVIEW = ROOT / "docs/design/overview.md"

CLASSES = {
    "Away": "ShardToWrite",
    "Beside": "LoopThread",
    "Chronicle": "RunHistory",
    "Concern": "TroubleLog",
    "Crew": "ComputePool",
    "Freeze": "CopyState",
    "Frozen": "StateCopy",
    "Gate": "Verifier",
    "Hearing": "BusView",
    "Held": "ArrayRef",
    "Histories": "ForkDetection",
    "Judge": "DonorCheck",
    "Keeper": "FragmentCoordinator",
    "Lane": "DeviceStream",
    "Lies": "ShardRef",
    "OwnSteward": "LocalBackend",
    "Parcel": "PackedUpdate",
    "Publishing": "PublishedValue",
    "Reach": "Connectivity",
    "Shelf": "ArrayTable",
    "Shell": "AgentThread",
    "Steward": "ArrayBackend",
    "Tenure": "Incarnation",
    "Together": "GroupCheck",
    "Told": "RunInfo or Explanation",
    "Voice": "Reporter",
    "Weather": "Conditions",
}
"""Old names of classes, which were private language, and their present names."""

MODULES = {
    "asked": "client",
    "beside": "loop_thread",
    "chronicle": "history",
    "concern": "trouble",
    "gate": "verify",
    "heard": "bus_view",
    "histories": "fork_detection",
    "keeper": "coordinator",
    "owners": "ranks",
    "pytorch": "torch",
    "readers": "inspect",
    "scenes": "commit_views",
    "select": "listing",
    "served": "server",
    "shelf": "arrays",
    "shell": "agent_thread",
    "speech": "authenticate",
    "steward": "backend",
    "tenure": "incarnation",
    "trial": "donor_check",
    "verdict": "health_summary",
    "voice": "reporter",
    "weather": "conditions",
}
"""The same for modules and packages."""


@cache
def sources() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for base in ("pkg", "services") for path in (ROOT / base).rglob("*.py")}


def test_no_class_has_a_name_of_before() -> None:
    left = [
        f"{path.relative_to(ROOT)}: {node.name} is called {CLASSES[node.name]} now"
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name in CLASSES
    ]
    assert not left, "\n".join(left)


def test_no_module_has_a_name_of_before() -> None:
    left = [
        f"{path.relative_to(ROOT)}: {part} is called {MODULES[part]} now"
        for path in sources()
        for part in path.relative_to(ROOT).with_suffix("").parts
        if part in MODULES
    ]
    assert not left, "\n".join(left)


def names() -> Iterator[str]:
    """Yield the names in the table of words."""
    table = OVERVIEW.read_text().split("## Words, and where they live")[1].split("\n## ")[0]
    for row in re.findall(r"^\| (?!word|---).*$", table, re.MULTILINE):
        yield from re.findall(r"`([\w.]+)`", row)


@pytest.mark.parametrize("name", list(names()))
def test_every_name_of_the_table_of_words_exists(name: str) -> None:
    *path, last = f"isthmus.{name}".split(".")
    found = import_module(path[0])
    for part in path[1:]:
        found = getattr(found, part) if hasattr(found, part) else import_module(f"{found.__name__}.{part}")
    assert hasattr(found, last), f"{name}: `{'.'.join(path)}` has no {last}"
