"""On a terminal of 80 columns, `isthmus` names every column that it hides."""

import asyncio
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from isthmus.format.rules import Pace, Rules
from support.world import seed_of, serving, train, world

pytestmark = pytest.mark.tier("test")

COLUMNS = 80
NAMES = ("frankfurt-spot-17", "iowa-reserved-2")
PACE = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Create a run in a folder, with learners that have long names."""
    folder = tmp_path_factory.mktemp("a-place-with-a-rather-long-name-of-its-own") / "run"

    async def body() -> None:
        async with (
            world(folder, seed_of(Rules(fragments=4, sync_every=4), PACE)) as w,
            serving(w.syncer("syncer-of-the-first-region")) as s,
        ):
            enough = lambda: min(k.head for k in s.coordinators) >= 4  # noqa: E731
            await asyncio.gather(*(train(w.learner(n), 20, seed=i, enough=enough) for i, n in enumerate(NAMES)))

    asyncio.run(body())
    return str(folder)


def on_a_terminal(*words: str, columns: int = COLUMNS) -> str:
    """Return what a command shows on a new terminal."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        (sys.executable, "-m", "isthmus_services.main", *words),
        stdin=subprocess.DEVNULL,
        stdout=side,
        stderr=side,
        env=environment,
    )
    os.close(side)
    said = b""
    try:
        while chunk := os.read(main, 1 << 16):
            said += chunk
    except OSError:
        pass  # a closed terminal raises this
    finally:
        process.wait(120)
        os.close(main)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.decode()).replace("\r", "")


def test_status_names_what_it_hides(run: str) -> None:
    said = on_a_terminal("status", run)
    assert "…" not in said
    for name in NAMES:
        assert name in said
    hidden = re.search(r"hidden at this width: ([^:]+):\s+widen\s+or\s+use\s+--json", said)
    assert hidden, said
    head = said[: hidden.start()]
    named = re.split(r",\s+", hidden[1])
    assert {"overwritten", "late", "pending"} <= set(named)
    for name in ("rejected", "lost"):  # shown where a learner has such tokens
        assert (name in named) != (f" {name} " in head), name
    for name in ("step", "loss", "versions", "merged", "state"):
        assert (name in named) != (f" {name} " in head), name
    assert said.count("hidden at this width") == 2, "once for learners, and once for fragments"
    # A command is in one line, to be copied.
    assert max(len(line) for line in said.splitlines() if "→ isthmus" not in line) <= COLUMNS


def test_status_hides_nothing_where_there_is_room(run: str) -> None:
    said = on_a_terminal("status", run, columns=250)
    assert "hidden" not in said
    for name in ("overwritten", "pending", "missing", "writer", "ckpt MB", "syncer-of-the-first-region"):
        assert name in said


def test_gc_says_its_title_in_one_piece(run: str) -> None:
    said = on_a_terminal("gc", run, "--keep", "1", "--min-age", "0")
    assert "…" not in said
    assert f"garbage of {run}\n" in said
    assert "foldable afterwards: from version" in said


def test_explain_and_doctor_are_whole(run: str) -> None:
    said = on_a_terminal("explain", run, "0/2")
    assert "…" not in said
    assert "in the log" in said
    said = on_a_terminal("doctor", run, "--size", "0.01")
    assert "…" not in said
    assert f"{run} answers: median" in said
    assert "0 failures" in said


def test_settings_are_folded_not_cut(run: str) -> None:
    said = on_a_terminal("syncer", run, "--show-settings")
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= COLUMNS
