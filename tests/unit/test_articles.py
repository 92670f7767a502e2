"""Nouns that vary have the article that goes with their sound."""

import re
from pathlib import Path

import pytest

from isthmus.doctor import Role, RoleKind, examine_store
from isthmus.doctor.findings import Finding
from isthmus.log.creation import create_run
from isthmus.runtime.clock import single_threaded
from isthmus.store import open_store
from isthmus.wording import an
from support.world import seed_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("noun", "said"),
    [
        *(("owner", "an owner"), ("operator", "an operator"), ("syncer", "a syncer"), ("object", "an object")),
        *(("update", "an update"), ("unit", "a unit"), ("uint8", "a uint8"), ("Adam", "an Adam")),
    ],
)
def test_an_article_goes_by_the_sound(noun: str, said: str) -> None:
    assert an(noun) == said


async def test_the_doctor_of_an_owner_says_an_owner(tmp_path: Path) -> None:
    runtime = single_threaded(0)
    async with open_store(str(tmp_path), runtime) as store:
        await create_run(store, runtime, seed_of())
    role = Role(RoleKind.OWNER)
    said = [f.said async for f in examine_store(str(tmp_path), role, runtime, 1000) if isinstance(f, Finding)]
    assert any("not only an owner's own objects" in text for text in said)


@pytest.mark.parametrize("folder", ["pkg", "services"])
def test_no_fixed_article_stands_before_a_role_or_a_type(folder: str) -> None:
    varies = re.compile(r"\b[aA] \{[^}]*(?:role\b|role\.|\.kind\b|kind\.name|__name__|__qualname__)")
    for path in (ROOT / folder).rglob("*.py"):
        # A name that contains the article itself, as in `a {'replica' if … else facts.role}`, is no such place.
        found = [m[0] for m in varies.finditer(path.read_text()) if "facts.role" not in m[0]]
        assert not found, f"{path}: use wording.an"
