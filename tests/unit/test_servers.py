"""The command that runs an S3 server and a Redis."""

import subprocess
import sys
from pathlib import Path


def test_help_starts_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "isthmus_services.servers", "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "FOLDER" in done.stdout, [*tmp_path.iterdir()]) == (0, True, []), done.stderr
