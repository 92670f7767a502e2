"""The embedded bus: one SQLite file, several processes at once, no server.

Statements are short and run on the event loop itself; a reader polls the file's change counter. The file may be
deleted at any time: like any loss of the bus, this loses no training data.
"""

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from isthmus.bus.base import NAMES_MAX, READ_MAX, RETAINED_MESSAGES, Bus, BusItem, Refused
from isthmus.errors import Denied, Unavailable
from isthmus.runtime.disk import room_in
from isthmus.runtime.file_rights import why_denied

T = TypeVar("T")


def remade(path: Path) -> str:
    """Return what to do with the file of a bus that is damaged."""
    return f"delete {path}, {path}-wal and {path}-shm: processes make the bus anew, and nothing that was merged is lost"


POLL_S = 0.008
TRIM_EVERY = 64  # appends to a stream
_LOCKED_S = 0.02  # between tries while another process writes
_LOCKED_TRIES = 100

EXPIRE_S = 7 * 86400
"""A stream that has had no writes for about this long is dropped."""

_ABSENT = -1
"""Inode of a file that does not exist."""

ROOM = 1 << 20
"""Free bytes on the disk below which an I/O error is put down to a lack of room."""

_NOW = "(julianday('now') - 2440587.5) * 86400.0"
"""SQL for the time in seconds since 1970, on the one clock that all processes on the machine share."""

_SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS messages (
    run TEXT NOT NULL, stream TEXT NOT NULL, id INTEGER NOT NULL, at REAL NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (run, stream, id)
) WITHOUT ROWID
""",
    # The number and time of each stream's newest message. A search for streams, or for new messages in many streams,
    # reads this table and not the messages.
    """
CREATE TABLE IF NOT EXISTS streams (
    run TEXT NOT NULL, stream TEXT NOT NULL, newest INTEGER NOT NULL, at REAL NOT NULL, PRIMARY KEY (run, stream)
) WITHOUT ROWID
""",
    "CREATE INDEX IF NOT EXISTS streams_at ON streams (run, at)",
)

ONE_BY_ONE = 32
"""Up to this many streams, the newest message numbers are read one by one; beyond, in one query."""


class SqliteBus(Bus):
    """Streams of one run in a SQLite file. Positions are decimal message numbers, counted per stream."""

    def __init__(self, path: Path, run: str) -> None:
        self.url = f"sqlite://{path}"
        self._path = path
        self._run = run
        self._db: sqlite3.Connection | None = None
        self._inode = _ABSENT
        self._written = 0

    @override
    async def append(self, stream: str, *bodies: bytes) -> None:

        def insert(db: sqlite3.Connection) -> None:
            with db:
                db.execute("BEGIN IMMEDIATE")
                newest = _newest(db, self._run, stream)
                rows = [(self._run, stream, newest + i, body) for i, body in enumerate(bodies, 1)]
                db.executemany(f"INSERT INTO messages VALUES (?, ?, ?, {_NOW}, ?)", rows)
                db.execute(
                    f"INSERT OR REPLACE INTO streams VALUES (?, ?, ?, {_NOW})",
                    (self._run, stream, newest + len(bodies)),
                )
                if -newest % TRIM_EVERY < len(bodies):
                    db.execute(
                        "DELETE FROM messages WHERE run = ? AND stream = ? AND id <= ?",
                        (self._run, stream, newest - RETAINED_MESSAGES),
                    )
                    # Streams of learners that never come back would otherwise stay for ever.
                    old = f"FROM streams WHERE at < {_NOW} - ?"
                    db.execute(f"DELETE FROM messages WHERE (run, stream) IN (SELECT run, stream {old})", (EXPIRE_S,))
                    db.execute(f"DELETE {old}", (EXPIRE_S,))

        await self._do(insert, writes=True)
        self._written += 1

    @override
    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        seen: tuple[int, ...] | None = None
        while True:
            # data_version changes when another connection has written; `_written` counts our own writes.
            version = await self._do(
                lambda db: (self._inode, int(db.execute("PRAGMA data_version").fetchone()[0]), self._written)
            )
            if version != seen:
                seen = version
                found = await self._do(lambda db: self._after(db, positions))
                if found:
                    return found
            left = until - loop.time()
            if left <= 0:
                return {}
            await asyncio.sleep(min(POLL_S, left))

    @override
    async def ago(self, streams: Sequence[str], seconds: float) -> Mapping[str, str]:

        def find(db: sqlite3.Connection) -> Mapping[str, str]:
            before = f"SELECT max(id) FROM messages WHERE run = ? AND stream = ? AND at < {_NOW} - ?"
            return {
                stream: str(db.execute(before, (self._run, stream, seconds)).fetchone()[0] or 0) for stream in streams
            }

        return await self._do(find)

    @override
    async def tail(self, stream: str) -> str:
        return str(await self._do(lambda db: _newest(db, self._run, stream)))

    @override
    async def names(self, within_s: float | None = None) -> set[str]:
        recent = "" if within_s is None else f" AND at >= {_NOW} - {float(within_s)!r}"
        ask = f"SELECT stream FROM streams WHERE run = ?{recent} ORDER BY at DESC LIMIT {NAMES_MAX}"
        rows = await self._do(lambda db: db.execute(ask, (self._run,)).fetchall())
        return {row[0] for row in rows}

    @override
    async def other_runs(self, within_s: float) -> list[str]:
        ask = f"SELECT DISTINCT run FROM streams WHERE run != ? AND at >= {_NOW} - ? ORDER BY run LIMIT {NAMES_MAX}"
        return [row[0] for row in await self._do(lambda db: db.execute(ask, (self._run, within_s)).fetchall())]

    def close(self) -> None:
        """Close the file."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _after(self, db: sqlite3.Connection, positions: Mapping[str, str]) -> Mapping[str, Sequence[BusItem]]:
        found: dict[str, Sequence[BusItem]] = {}
        newest = self._newest_of(db, positions)
        for stream, position in positions.items():
            start = int(position or 0)
            if start == newest.get(stream, 0):
                continue
            if start > newest.get(stream, 0):
                start = 0  # the bus lost what we had read
            rows = db.execute(
                "SELECT id, body FROM messages WHERE run = ? AND stream = ? AND id > ? ORDER BY id LIMIT ?",
                (self._run, stream, start, READ_MAX),
            ).fetchall()
            if rows:
                found[stream] = [BusItem(str(number), body) for number, body in rows]
        return found

    def _newest_of(self, db: sqlite3.Connection, streams: Collection[str]) -> Mapping[str, int]:
        if len(streams) <= ONE_BY_ONE:
            return {stream: _newest(db, self._run, stream) for stream in streams}
        return dict(db.execute("SELECT stream, newest FROM streams WHERE run = ?", (self._run,)).fetchall())

    async def _do(self, fn: Callable[[sqlite3.Connection], T], *, writes: bool = False) -> T:
        await asyncio.sleep(0)  # a statement never suspends; without this a busy writer would block the event loop
        for _ in range(_LOCKED_TRIES):
            try:
                return fn(self._open(writes=writes))
            except sqlite3.OperationalError as error:
                message = str(error)
                if self._lacks_room(error):
                    self.close()
                    raise Refused(f"{self.url}: {message}: free space on its disk") from None
                if "readonly" in message or "unable to open" in message:
                    self.close()
                    raise Denied(f"{self.url}: {self._why() or message}") from None
                if "locked" not in message and "busy" not in message:
                    self.close()
                    if "I/O" in message:
                        message += (
                            ": see whether a limit of file sizes (ulimit -f) or a quota is reached, or the disk fails"
                        )
                    raise Unavailable(f"{self.url}: {message}") from None
            except PermissionError as error:
                self.close()
                raise Denied(f"{self.url}: {self._why() or error}") from None
            except sqlite3.DatabaseError as error:
                # The file is damaged or not a database. The operator sees the error, and the run goes on without a bus.
                self.close()
                raise Unavailable(f"{self.url}: {error}: {remade(self._path)}") from None
            await asyncio.sleep(_LOCKED_S)
        raise Unavailable(f"{self.url}: another process has held the file locked for {_LOCKED_S * _LOCKED_TRIES:g} s")

    def _why(self) -> str:
        """Return which right on the bus's files is missing, and the command that gives it; empty if none is."""
        paths = [f"{self._path}{end}" for end in ("", "-wal", "-shm")]
        return "" if os.path.isdir(self._path) else why_denied(paths, os.R_OK | os.W_OK, writing=True)

    def _lacks_room(self, error: sqlite3.OperationalError) -> bool:
        """Return whether an error comes from a full disk: SQLite says no more than that it cannot read, write or open a
        file if there is no room for its index."""
        kind = error.sqlite_errorcode & 0xFF
        if kind == sqlite3.SQLITE_FULL:
            return True
        if kind not in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) or not self._path.parent.is_dir():
            return False
        left = room_in(self._path.parent)
        return left.files == 0 or (kind == sqlite3.SQLITE_IOERR and left.bytes < ROOM)

    def _open(self, *, writes: bool) -> sqlite3.Connection:
        """Return the open file. One that is missing is made by the first write; until then, an empty one is read."""
        inode = _ABSENT
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            inode = os.stat(self._path).st_ino
        if self._db is not None and inode == self._inode and not (writes and inode == _ABSENT):
            return self._db
        self.close()
        folder = self._path.parent
        # A folder that is made again would stand in the way of the one that comes back.
        if self._inode != _ABSENT and not folder.exists():
            raise Unavailable(f"{self.url}: {folder} is gone: was it moved, or a mount lost?")
        if not writes and not os.path.lexists(self._path):
            self._db, self._inode = _prepared(":memory:"), _ABSENT
            return self._db
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = why_denied([str(folder)], os.R_OK, writing=True, place=folder)
            raise Denied(f"{self.url}: {why or error}") from None
        if self._path.is_symlink():  # an attacker who can write here would choose which file we write to
            raise Denied(f"{self.url}: it is a link to another file, and is not followed: remove it, or name that file")
        # SQLite makes files that only their owner may write, whatever the umask or the folder's access list allows.
        with contextlib.suppress(OSError):
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666))
        self._db, self._inode = _prepared(self._path), os.stat(self._path).st_ino
        return self._db


def _prepared(path: Path | str) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, timeout=0.0)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")  # the bus may lose everything, so waiting for the disk gains nothing
        for statement in _SCHEMA:
            db.execute(statement)
    except BaseException:
        db.close()
        raise
    return db


def _newest(db: sqlite3.Connection, run: str, stream: str) -> int:
    row = db.execute("SELECT newest FROM streams WHERE run = ? AND stream = ?", (run, stream)).fetchone()
    return int(row[0]) if row else 0


@asynccontextmanager
async def open_sqlite(path: Path, run: str) -> AsyncIterator[SqliteBus]:
    """Open the bus in a file; the file is created with the first message and closed with the context."""
    bus = SqliteBus(path, run)
    try:
        yield bus
    finally:
        bus.close()
