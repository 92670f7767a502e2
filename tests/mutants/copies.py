"""Copy the packages into separate folders, and run tests on a copy."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from isthmus_services.processes import tied

ROOT = Path(__file__).parents[2]
PACKAGES = ("pkg", "services")
KERNELS = "pkg/isthmus/codecs/kernels/"
"""The modules that numba compiles. A copy with a mistake in one of them has its own cache of machine code."""

TEST_S = 60.0
"""Limit for one test. A test that takes longer counts as failed: it probably waits for something that never happens."""

PASSED, FAILED, INTERRUPTED = 0, 1, 2
"""Exit codes of pytest. With any other code, no test has run."""


def copy_packages(source: Path, to: Path) -> Path:
    """Copy the packages with their compiled kernels, so that only changed modules are compiled again."""
    for name in PACKAGES:
        shutil.copytree(source / name, to / name)
    return to


def environment(folder: Path, *, own_cache: bool = False) -> dict[str, str]:
    """Return the environment in which Python imports the packages from this folder."""
    found = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    if own_cache:
        found["NUMBA_CACHE_DIR"] = str(folder / "numba")
    paths = [*(folder / name for name in PACKAGES), ROOT / "tests"]
    return found | {"PYTHONPATH": os.pathsep.join(map(str, paths))}


async def run_pytest(
    folder: Path, tests: Iterable[str], *, timeout_s: float, own_cache: bool = False
) -> tuple[int, str]:
    """Run tests on the packages in a folder, up to the first failure.

    Returns the exit code and the output. Raises `TimeoutError`.
    """
    process = await asyncio.create_subprocess_exec(
        *tied([
            sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", f"--timeout={TEST_S:g}",
            "-o", "timeout_func_only=true",  # a session fixture compiles the kernels
            f"--basetemp={folder / 'tmp'}", *tests,
        ]),
        cwd=ROOT, env=environment(folder, own_cache=own_cache), start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace")


def first_failure(output: str) -> str:
    """Return the id of the first test that failed, or an empty string."""
    lines = (line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR ")))
    return next((line.split(" ", 1)[1].split(" - ")[0] for line in lines), "")


async def require_copy(folder: Path) -> None:
    """Raise `SystemExit` unless Python imports the copies: otherwise no mistake would ever be run."""
    for module in ("isthmus", "isthmus_services", "isthmus_lab"):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", f"import {module}; print({module}.__file__)",
            env=environment(folder), stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        found = (await process.communicate())[0].decode().strip()
        if not Path(found).is_relative_to(folder):
            raise SystemExit(f"{found} is imported, not the copy in {folder}: mistakes would never be run")
