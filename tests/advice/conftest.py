"""Fixtures of the tests that follow advice."""

import pytest

from advice.doctors import Doctor


@pytest.fixture
def doctor(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Return the doctor with the rows of the test."""
    return Doctor(getattr(request.function, "rows", ()), capsys)
