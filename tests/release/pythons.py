"""Finds the Pythons for which the wheel is installed: supported versions on PATH, and the Python of the tests."""

import functools
import shutil
import subprocess
import sys

PYTHONS = ("3.11", "3.12", "3.13", "3.14")


@functools.cache
def interpreter(version: str) -> str | None:
    """Return a Python of this version, if there is one that runs (a version manager's stand-ins do not)."""
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return sys.executable
    found = shutil.which(f"python{version}")
    runs = found is not None and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0
    return found if runs else None


def at_hand() -> list[str]:
    """Return the supported versions for which this machine has a Python."""
    return [version for version in PYTHONS if interpreter(version)]


def said() -> str:
    """Return a line that says which supported versions this machine has and which it lacks."""
    missing = [version for version in PYTHONS if version not in at_hand()]
    return f"the wheel is installed for Python {', '.join(at_hand())}; not at hand: {', '.join(missing) or 'none'}"
