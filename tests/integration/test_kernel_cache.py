"""If compiled kernels on disk are damaged or cannot be written, a process logs a warning and compiles them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.codecs.kernels import cache

ONE = "import numpy as np; from isthmus.codecs import kernels; print(kernels.norm(np.full(100, 0.5, np.float32)))"


def start(cache: Path, **environment: str) -> str:
    """Run a kernel in a new process; return what the process writes to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", ONE], env={**os.environ, "NUMBA_CACHE_DIR": str(cache), **environment},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "5.0\n"), done.stderr
    return done.stderr


def _empty(data: bytes) -> bytes:
    return b""


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    """Flip one bit in the middle: this can be machine code that numba would run."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        ("nbi", _half),
        *(
            pytest.param(suffix, damage, marks=pytest.mark.tier("all"))
            for suffix, damage in (
                ("nbi", _empty),
                ("nbi", _flipped),
                ("nbc", _empty),
                ("nbc", _half),
                ("nbc", _flipped),
            )
        ),
    ],
)
def test_a_damaged_file_is_compiled_anew_and_replaced(
    suffix: str, damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    assert start(tmp_path) == ""
    files = list(tmp_path.rglob(f"*.{suffix}"))
    assert files
    for file in files:
        file.write_bytes(damage(file.read_bytes()))
    said = start(tmp_path)
    assert said.count("cannot use the compiled kernels on disk") == 1
    assert "are not what was written; set NUMBA_CACHE_DIR to another folder" in said
    assert start(tmp_path) == "", "the next start must find valid files"


def test_a_full_disk_costs_a_warning(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no full device")
    full = ONE.replace("import numpy", "import numba.core.caching as c, builtins\n" + FULL + "\nimport numpy", 1)
    done = subprocess.run(
        [sys.executable, "-c", full], env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "5.0\n"), done.stderr
    assert done.stderr.count("cannot keep the compiled kernels on disk") == 1
    assert "No space left on device" in done.stderr


FULL = """
real = builtins.open
def opened(path, mode="r", *more, **named):
    return real("/dev/full" if ".tmp." in str(path) else path, mode, *more, **named)
c.open = opened
"""


def test_a_machine_without_a_writable_home_works(tmp_path: Path) -> None:
    """In a container with a read-only root, for example, neither the library's nor the home folder can be written."""
    copy = tmp_path / "lib"
    copy.mkdir()
    nowhere = ONE.replace("import numpy", "import numba.core.caching as c\n" + NOWHERE + "\nimport numpy", 1)
    done = subprocess.run(
        [sys.executable, "-c", nowhere], env={**os.environ, "HOME": "/proc/nowhere", "NUMBA_CACHE_DIR": ""},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "5.0\n"), done.stderr
    assert done.stderr.count("there is no place for the compiled kernels on disk") == 1


NOWHERE = """
def no(self):
    raise OSError(30, "Read-only file system")
c._CacheLocator.ensure_cache_path = no
"""


def test_a_numba_that_keeps_its_cache_in_another_way_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other(fn: object) -> object:
        raise TypeError("unexpected argument")

    monkeypatch.setattr(cache, "_Cache", other)
    monkeypatch.setattr(cache, "_said", set())
    cache.keep(object(), start)
    assert "there is no place for the compiled kernels on disk" in caplog.text
    assert "unexpected argument" in caplog.text
