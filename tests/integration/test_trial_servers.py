"""The servers for trials have the ports of their last start, so that runs and shells that know them go on."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def _started(folder: Path) -> Iterator[tuple[int, int]]:
    """Run both servers; yield the ports of S3 and Redis."""
    words = [sys.executable, "-m", "isthmus_services.servers", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.match(r"S3 at \S+:(\d+), Redis at \S+:(\d+), until", process.stdout.readline())
            assert found
            yield int(found[1]), int(found[2])
        finally:
            process.terminate()


def test_servers_that_are_started_again_have_their_ports_unless_one_is_taken(tmp_path: Path) -> None:
    with _started(tmp_path) as first:
        said = (tmp_path / "env").read_text()
    with _started(tmp_path) as again:
        assert again == first
        assert (tmp_path / "env").read_text() == said
    with socket.create_server(("127.0.0.1", first[1])), _started(tmp_path) as other:
        assert (other[0], other[1] != first[1]) == (first[0], True)
