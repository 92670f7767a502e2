"""Every mutant in the table applies to the library in exactly one place, and leaves a module that compiles."""

from pathlib import Path

from mutants.table import MUTANTS, faults

ROOT = Path(__file__).parents[2]


def test_every_mutant_fits_the_library_as_it_is() -> None:
    assert [f"{mutant.name}: {why}" for mutant in MUTANTS for why in faults(mutant, ROOT)] == []


def test_every_mutant_has_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
