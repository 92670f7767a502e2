"""Fixtures of the tests that follow advice."""

import functools

import pytest

from advice.doctors import Doctor
from isthmus.doctor import machine

fingerprint = functools.cache(machine.fingerprint)


@pytest.fixture
def doctor(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Doctor:
    """Return the doctor with the rows of the test. It computes the bits of this process's kernels once."""
    monkeypatch.setattr(machine, "fingerprint", fingerprint)
    return Doctor(getattr(request.function, "rows", ()), capsys)
