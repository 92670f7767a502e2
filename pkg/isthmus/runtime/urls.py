"""URLs of runs and buses: how to parse them, and how to show them without secrets."""

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, quote, urlsplit

from isthmus.errors import InputError


def redacted(url: str) -> str:
    """Return a URL without user, password and query, even if it is mistyped, so that it may be shown."""
    scheme, colon, rest = url.partition("://")
    if not colon:
        scheme, rest = "", url
    return f"{scheme}{colon}{rest.rpartition('@')[2].partition('?')[0]}"


_WITH_PASSWORD = re.compile(r"(?<=://)(?!USER:PASSWORD@)[^\s@'\"]*:[^\s@'\"]*@")


def without_passwords(words: str) -> str:
    """Return a text with the user and password of every URL in it replaced by `…`."""
    return _WITH_PASSWORD.sub("…@", words)


BUCKETS = ("s3", "s3+obstore", "s3+aiobotocore", "gs")
"""URL schemes of buckets."""


def split(url: str) -> SplitResult:
    """Return the parts of a URL. Raises `InputError`, whose text does not repeat user, password and query.

    Every character of a URL counts, or the URL is rejected: `exp#1` and `exp#2` must not become one run. A path without
    a scheme is a folder, whatever characters it has. Of its parts only `scheme`, which is empty, is meaningful.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # urllib checks the port only when it is read
    except ValueError as error:
        # urllib's own message may quote the password.
        hint = "characters such as / [ # @ in a password are written %2F %5B %23 %40"
        raise InputError(f"{redacted(url)}: this URL cannot be read ({hint})") from error.__cause__
    if parts.scheme in (*BUCKETS, "file") and "#" in url:
        raise InputError(f"{redacted(url)}: # ends a URL: choose a name without it")
    if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
        raise InputError(f"{redacted(url)}: a file has no host: write file:///PATH, or the path alone")
    if parts.scheme == "file" and "?" in url:
        raise InputError(f"{redacted(url)}: ? ends a URL: choose a name without it, or leave file:// out")
    if parts.scheme in ("redis", "rediss", "unix") and "#" in url:
        raise InputError(f"{redacted(url)}: # ends a URL; in a password it is written %23")
    if parts.scheme in BUCKETS and parts.path not in ("", "/"):
        names = parts.path.removeprefix("/").removesuffix("/").split("/")
        if odd := next((name for name in names if name in ("", ".", "..")), None):
            raise InputError(f"{redacted(url)}: {odd}/ is no folder in a bucket: leave it out")
        if "" in names:
            raise InputError(f"{redacted(url)}: a folder between two slashes has no name: leave one of them out")
    return parts


def as_user(bus: str, user: str | None, password: str | None, password_file: str | None) -> str:
    """Return the URL of a bus with this user and password in it. Raises `InputError` if URL and arguments conflict."""
    if password_file:
        if password:
            raise InputError("bus_password and bus_password_file are both set: leave one out")
        try:
            password = Path(password_file).read_text().strip()
        except OSError as error:
            raise InputError(f"--bus-password-file {password_file}: {error.strerror}") from None
    if not (user or password):
        return bus
    parts = split(bus)
    if parts.scheme not in ("redis", "rediss"):
        raise InputError(f"{parts.scheme}:// takes no user or password: leave bus_user and bus_password out")
    if "@" in parts.netloc:
        raise InputError("the bus's URL and other settings both name a user or password: leave one out")
    return parts._replace(
        netloc=f"{quote(user or '', safe='')}:{quote(password or '', safe='')}@{parts.netloc}"
    ).geturl()


def trusting(bus: str, authorities: str | None) -> str:
    """Return the URL of a bus whose certificate is verified against the authorities in a PEM file.

    Raises `InputError`.
    """
    if not authorities:
        return bus
    parts = split(bus)
    if parts.scheme != "rediss":
        raise InputError(f"bus_ca: {parts.scheme}:// shows no certificate: use rediss://, or leave bus_ca out")
    if "ssl_ca_certs=" in parts.query:
        raise InputError("the bus's URL and bus_ca both name authorities: leave one out")
    if not Path(authorities).is_file():
        raise InputError(f"--bus-ca {authorities}: there is no such file")
    query = f"{parts.query}&" if parts.query else ""
    return parts._replace(query=f"{query}ssl_ca_certs={quote(authorities, safe='/')}").geturl()


def as_environment_says(bus: str, environment: Mapping[str, str]) -> str:
    """Return the URL of a Redis server, completed with user, password and authorities from `environment`.

    The variables are those of the commands. What the URL already has is kept. Raises `InputError`.
    """
    if bus.startswith("rediss://") and "ssl_ca_certs=" not in split(bus).query:
        bus = trusting(bus, environment.get("ISTHMUS_BUS_CA"))
    if not bus.startswith(("redis://", "rediss://")) or "@" in split(bus).netloc:
        return bus
    names = ("ISTHMUS_BUS_USER", "ISTHMUS_BUS_PASSWORD", "ISTHMUS_BUS_PASSWORD_FILE")
    return as_user(bus, *(environment.get(name) for name in names))
