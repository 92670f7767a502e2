"""`isthmus status --watch` on a live run shows a display on a terminal, and prints occasional lines into a pipe."""

import asyncio
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from isthmus.format.rules import Rules
from isthmus_services.commands.status import LINES_EVERY_S
from support.world import QUICK, World, seed_of, serving, train, world

WATCH = (sys.executable, "-m", "isthmus_services.main", "status")


@asynccontextmanager
async def living(folder: Path) -> AsyncIterator[World]:
    """Run two learners and a syncer until the body ends."""
    async with world(folder, seed_of(Rules(fragments=4, sync_every=40), QUICK)) as w, serving(w.syncer()):
        enough = False
        tasks = [asyncio.ensure_future(train(w.learner(n), 1, enough=lambda: enough)) for n in ("eu-1", "us-1")]
        try:
            yield w
        finally:
            enough = True
            await asyncio.gather(*tasks)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Restore SIGINT: tests that a shell starts in the background ignore it, and their processes would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def on_a_terminal(command: Sequence[str], until: Callable[[str], object], timeout_s: float = 120.0) -> tuple[str, int]:
    """Run a command on a new terminal until `until` accepts its output; then interrupt it as Ctrl-C does."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        command,
        stdin=side,
        stdout=side,
        stderr=side,
        env=environment,
        start_new_session=True,
    )
    os.close(side)
    text, end = "", time.monotonic() + timeout_s
    try:
        while not until(text):
            assert time.monotonic() < end, text
            ready, _, _ = select.select([main], [], [], 0.5)
            if ready:
                text += os.read(main, 1 << 16).decode(errors="replace")
                text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            assert time.monotonic() < end + 60, "the command does not end"
            ready, _, _ = select.select([main], [], [], 0.2)
            if ready:
                try:
                    os.read(main, 1 << 16)
                except OSError:
                    break
        return text, process.wait(60)
    finally:
        process.kill()
        process.wait()
        os.close(main)


async def test_a_terminal_shows_learners_fragments_rounds_ledger_and_bytes(folder: Path) -> None:
    def enough(text: str) -> object:
        return re.search(
            r"\d+ commits, 2 of 2 learners here.*syncer s1: alive, holds 4 of 4.*rejected:", text, re.DOTALL
        )

    async with living(folder):
        text, code = await asyncio.to_thread(on_a_terminal, (*WATCH, str(folder), "--watch"), enough)
    assert code == 130
    for word in ("eu-1", "us-1", "training", "open round", "MB up", "merged", "overwritten"):
        assert word in text, word


async def test_a_pipe_is_told_of_a_problem_once_and_of_its_end(folder: Path) -> None:
    async with living(folder) as w:
        process = await asyncio.create_subprocess_exec(
            *WATCH, str(folder), "--watch", "--expect", "3", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        try:
            lines = [(await asyncio.wait_for(process.stdout.readline(), 120)).decode() for _ in range(5)]
            assert lines[1:3] == [
                "  3 learners expected, 2 heard\n",
                "    → start the others, or expect fewer\n",
            ]
            assert all(re.match(r"\d\d:\d\d:\d\d  .*; 2 of 2 learners merge$", line) for line in (lines[0], *lines[3:]))
            async with serving(w.syncer("late")):
                extra = asyncio.ensure_future(train(w.learner("ap-1"), 10**9))
                line = ""
                while "over:" not in line:
                    line = (await asyncio.wait_for(process.stdout.readline(), 120)).decode()
                assert line == "  over: 3 learners expected, 2 heard\n"
                extra.cancel()
                await asyncio.gather(extra, return_exceptions=True)
        finally:
            process.send_signal(signal.SIGINT)
            await process.wait()


async def test_a_pipe_gets_a_line_now_and_then(folder: Path) -> None:
    async with living(folder):
        process = await asyncio.create_subprocess_exec(
            *WATCH,
            str(folder),
            "--watch",
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        try:
            line = (await asyncio.wait_for(process.stdout.readline(), 120 + LINES_EVERY_S)).decode()
            assert re.search(r"^\d\d:\d\d:\d\d  \d+ commits, 2 of 2 learners here, [\d,]+ tokens: merged", line)
            assert "; 2 of 2 learners merge" in line
        finally:
            process.send_signal(signal.SIGINT)
            await process.wait()
        code = process.returncode
    assert code == 130
