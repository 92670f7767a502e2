"""Debian's Chromium for tests of pages; without it they are skipped, or fail where a browser is required."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser, and end it after the body."""
    path = shutil.which("chromium")
    if path is None:
        why = "not run: no chromium on PATH (Debian has it in the package chromium)"
        if os.environ.get("ISTHMUS_REQUIRE_CHROMIUM") == "1":
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield found
        found.close()
