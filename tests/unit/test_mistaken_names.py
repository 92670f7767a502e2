"""A new name that may be a misspelling of a known one is told from names of one scheme."""

import pytest

from isthmus.link.agent_thread import mistaken


@pytest.mark.parametrize(
    ("name", "known"),
    [("us1", "us-1"), ("su-1", "us-1"), ("leaner-1", "learner-1"), ("EU-1", "eu-1"), ("learner", "learner-a")],
)
def test_a_letter_too_many_or_too_few_or_in_another_place_or_case(name: str, known: str) -> None:
    assert mistaken(name, {"else", known}) == known


@pytest.mark.parametrize(
    ("name", "known"),
    [("eu-1", "us-1"), ("eu-west-1", "us-west-1"), ("gpu-11", "gpu-1"), ("l12", "l21"), ("spot", "home"), ("a", "a")],
)
def test_names_of_one_scheme(name: str, known: str) -> None:
    assert mistaken(name, {known}) == ""
