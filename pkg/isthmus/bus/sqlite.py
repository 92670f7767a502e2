"""The embedded bus: one SQLite file, several processes at once, no server.

Statements are short and run on the event loop itself; a reader polls the file's change counter. The file may be
deleted at any time: like every loss of the bus, that loses no data.
"""

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from isthmus.bus.base import READ_MAX, RETAINED_MESSAGES, Said
from isthmus.errors import Denied, Unavailable

T = TypeVar("T")

POLL_S = 0.008
TRIM_EVERY = 64  # appends to a stream
_LOCKED_S = 0.02  # between tries while another process writes
_LOCKED_TRIES = 100

EXPIRE_S = 7 * 86400
"""A stream nobody has written to for about this long is dropped."""

_NOW = "(julianday('now') - 2440587.5) * 86400.0"
"""SQLite's own clock, in seconds since 1970: one for all processes on the machine."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS said (
    run TEXT NOT NULL, stream TEXT NOT NULL, id INTEGER NOT NULL, at REAL NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (run, stream, id)
) WITHOUT ROWID
"""


class SqliteBus:
    """Streams of one run in a SQLite file. Positions are decimal message numbers, counted per stream."""

    def __init__(self, path: Path, run: str) -> None:
        self.url = f"sqlite://{path}"
        self._path = path
        self._run = run
        self._db: sqlite3.Connection | None = None
        self._inode = -1
        self._written = 0

    async def append(self, stream: str, *bodies: bytes) -> None:
        """See `Bus.append`."""

        def insert(db: sqlite3.Connection) -> None:
            with db:
                db.execute("BEGIN IMMEDIATE")
                newest = _newest(db, self._run, stream)
                rows = [(self._run, stream, newest + i, body) for i, body in enumerate(bodies, 1)]
                db.executemany(f"INSERT INTO said VALUES (?, ?, ?, {_NOW}, ?)", rows)
                if -newest % TRIM_EVERY < len(bodies):
                    db.execute(
                        "DELETE FROM said WHERE run = ? AND stream = ? AND id <= ?",
                        (self._run, stream, newest - RETAINED_MESSAGES),
                    )
                    # Streams of learners that never come back must not stay for ever.
                    db.execute(
                        "DELETE FROM said WHERE (run, stream) IN (SELECT run, stream FROM said GROUP BY run, stream "
                        f"HAVING max(at) < {_NOW} - ?)",
                        (EXPIRE_S,),
                    )

        await self._do(insert)
        self._written += 1

    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[Said]]:
        """See `Bus.read`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        seen: tuple[int, int] | None = None
        while True:
            # data_version moves when another connection wrote; our own writes are counted here.
            version = await self._do(lambda db: (int(db.execute("PRAGMA data_version").fetchone()[0]), self._written))
            if version != seen:
                seen = version
                found = await self._do(lambda db: self._after(db, positions))
                if found:
                    return found
            left = until - loop.time()
            if left <= 0:
                return {}
            await asyncio.sleep(min(POLL_S, left))

    async def ago(self, streams: Sequence[str], seconds: float) -> Mapping[str, str]:
        """See `Bus.ago`."""

        def find(db: sqlite3.Connection) -> Mapping[str, str]:
            before = f"SELECT max(id) FROM said WHERE run = ? AND stream = ? AND at < {_NOW} - ?"
            return {
                stream: str(db.execute(before, (self._run, stream, seconds)).fetchone()[0] or 0) for stream in streams
            }

        return await self._do(find)

    async def tail(self, stream: str) -> str:
        """See `Bus.tail`."""
        return str(await self._do(lambda db: _newest(db, self._run, stream)))

    async def names(self) -> set[str]:
        """See `Bus.names`."""
        rows = await self._do(
            lambda db: db.execute("SELECT DISTINCT stream FROM said WHERE run = ?", (self._run,)).fetchall()
        )
        return {row[0] for row in rows}

    def close(self) -> None:
        """Close the file."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _after(self, db: sqlite3.Connection, positions: Mapping[str, str]) -> Mapping[str, Sequence[Said]]:
        found: dict[str, Sequence[Said]] = {}
        for stream, position in positions.items():
            start = int(position or 0)
            if start > _newest(db, self._run, stream):
                start = 0  # the bus lost what we had read
            rows = db.execute(
                "SELECT id, body FROM said WHERE run = ? AND stream = ? AND id > ? ORDER BY id LIMIT ?",
                (self._run, stream, start, READ_MAX),
            ).fetchall()
            if rows:
                found[stream] = [Said(str(number), body) for number, body in rows]
        return found

    async def _do(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        await asyncio.sleep(0)  # a statement never suspends; without this a busy speaker would own the loop
        for _ in range(_LOCKED_TRIES):
            try:
                return fn(self._open())
            except sqlite3.OperationalError as error:
                message = str(error)
                if "readonly" in message or "unable to open" in message:
                    self.close()
                    raise Denied(f"{self.url}: {message}") from None
                if "locked" not in message and "busy" not in message:
                    self.close()
                    raise Unavailable(f"{self.url}: {message}") from None
            except sqlite3.DatabaseError as error:
                # Damaged, or not a database: drop what we hold; the operator sees it, the run goes on without a bus.
                self.close()
                raise Unavailable(f"{self.url}: {error}") from None
            await asyncio.sleep(_LOCKED_S)
        raise Unavailable(f"{self.url}: another process has held the file locked for {_LOCKED_S * _LOCKED_TRIES:g} s")

    def _open(self) -> sqlite3.Connection:
        with contextlib.suppress(FileNotFoundError):
            if self._db is not None and os.stat(self._path).st_ino == self._inode:
                return self._db
        self.close()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Denied(f"{self.url}: {error}") from None
        db = sqlite3.connect(self._path, isolation_level=None, timeout=0.0)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = OFF")  # the bus may lose everything; waiting for the disk buys nothing
            db.execute(_SCHEMA)
            self._inode = os.stat(self._path).st_ino
        except BaseException:
            db.close()
            raise
        self._db = db
        return db


def _newest(db: sqlite3.Connection, run: str, stream: str) -> int:
    row = db.execute(
        "SELECT id FROM said WHERE run = ? AND stream = ? ORDER BY id DESC LIMIT 1", (run, stream)
    ).fetchone()
    return int(row[0]) if row else 0


@asynccontextmanager
async def open_sqlite(path: Path, run: str) -> AsyncIterator[SqliteBus]:
    """Open the file, creating it where it is missing; closed with the context."""
    bus = SqliteBus(path, run)
    try:
        yield bus
    finally:
        bus.close()
