"""The last line of `isthmus doctor` counts its findings by outcome."""

import pytest

from isthmus.doctor import FAILURE, NOTE, OK, WARNING
from isthmus_services.commands.doctor import summary


@pytest.mark.parametrize(
    ("warnings", "failures", "said"),
    [
        (0, 0, "9 ok, 0 warnings, 0 failures"),
        (1, 0, "9 ok, 1 warning, 0 failures"),
        (2, 1, "9 ok, 2 warnings, 1 failure"),
    ],
)
def test_one_of_a_kind_is_singular(warnings: int, failures: int, said: str) -> None:
    assert summary({NOTE: 0, OK: 9, WARNING: warnings, FAILURE: failures}) == said
    assert summary({OK: 9, WARNING: warnings, FAILURE: failures}) == said


def test_notes_are_counted_where_there_are_any() -> None:
    assert summary({OK: 9, NOTE: 1, WARNING: 0, FAILURE: 0}) == "9 ok, 1 note, 0 warnings, 0 failures"
