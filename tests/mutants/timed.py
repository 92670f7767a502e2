"""A pytest plugin that writes the seconds of each passed test as JSON into the file that `TIMED` names."""

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

_seconds: dict[str, float] = defaultdict(float)
_failed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up setup, call and teardown."""
    _seconds[report.nodeid] += report.duration
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file. Workers of xdist send their reports to the first process, which writes it."""
    if not hasattr(session.config, "workerinput"):
        passed = {test: round(s, 4) for test, s in _seconds.items() if test not in _failed}
        Path(os.environ["TIMED"]).write_text(json.dumps(passed))
