"""URLs of runs and buses: how to parse them, and how to show them without secrets."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

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


_NO_COLON = re.compile(r"(s3|gs|az|rediss?|sqlite|unix|file|https?)//")
"""The beginning of an address whose colon was forgotten. It would be a folder."""


@dataclass(frozen=True, slots=True, repr=False)
class Place:
    """The parts of the URL of a run, a bus or a server. A path without a scheme is a folder."""

    url: str
    """The URL as it was given."""
    scheme: str
    """Empty for a path without a scheme."""
    authority: str
    """The bucket; for a server, user, password, host and port as in the URL."""
    host: str
    port: int | None
    path: str
    query: str

    @classmethod
    def of(cls, url: str) -> "Place":
        """Parse a URL. Raises `InputError`, whose text does not repeat user, password and query.

        Every character of a URL counts, or the URL is rejected: `exp#1` and `exp#2` must not become one run.
        """
        try:
            parts = urlsplit(url)
            port = parts.port  # urllib checks the port only when it is read
        except ValueError as error:
            # urllib's own message may quote the password.
            hint = "characters such as / [ # @ in a password are written %2F %5B %23 %40"
            raise InputError(f"{redacted(url)}: this URL cannot be read ({hint})") from error.__cause__
        if typed := _NO_COLON.match(url):
            raise InputError(
                f"{redacted(url)}: the colon is missing: write {typed[1]}://… (./{typed[1]}/… for a folder)"
            )
        if parts.scheme in ("", "sqlite"):
            # What follows is a path, in which ? and # have no special meaning.
            return cls(url, parts.scheme, "", "", None, url.partition("://")[2] if parts.scheme else url, "")
        place = cls(url, parts.scheme, parts.netloc, parts.hostname or "", port, parts.path, parts.query)
        if "#" in url and (place.in_bucket or place.scheme in ("file", "redis", "rediss", "unix")):
            raise InputError(f"{place}: # ends a URL: choose a name without it; in a password it is written %23")
        if place.scheme == "file" and place.authority not in ("", "localhost"):
            raise InputError(f"{place}: a file has no host: write file:///PATH, or the path alone")
        if place.scheme == "file" and "?" in url:
            raise InputError(f"{place}: ? ends a URL: choose a name without it, or leave file:// out")
        if place.in_bucket and place.path not in ("", "/"):
            names = place.path.removeprefix("/").removesuffix("/").split("/")
            if odd := next((name for name in names if name in ("", ".", "..")), None):
                raise InputError(f"{place}: {odd}/ is no folder in a bucket: leave it out")
            if "" in names:
                raise InputError(f"{place}: a folder between two slashes has no name: leave one of them out")
        return place

    @property
    def options(self) -> dict[str, str]:
        """The options after `?`; of an option that is given twice, the last value."""
        return {name: values[-1] for name, values in parse_qs(self.query, keep_blank_values=True).items()}

    @property
    def in_bucket(self) -> bool:
        """Whether this is in a bucket."""
        return self.scheme in ("s3", "s3+obstore", "s3+aiobotocore", "gs", "az")

    @property
    def prefix(self) -> str:
        """What the keys of a run in a bucket begin with: empty, or a path that ends in a slash."""
        return f"{self.path.strip('/')}/".lstrip("/")

    @property
    def folder(self) -> Path | None:
        """The absolute path of a run in a folder; None for any other URL."""
        return Path(self.path).expanduser().absolute() if self.scheme in ("", "file") else None

    @property
    def is_loopback(self) -> bool:
        """Whether the host is this machine."""
        with suppress(ValueError):
            return ip_address(self.host).is_loopback
        return f".{self.host}".endswith(".localhost")

    def __repr__(self) -> str:
        """Return the URL without user, password and query."""
        return redacted(self.url)


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
    place = Place.of(bus)
    if place.scheme not in ("redis", "rediss"):
        raise InputError(f"{place.scheme}:// takes no user or password: leave bus_user and bus_password out")
    if "@" in place.authority:
        raise InputError("the bus's URL and other settings both name a user or password: leave one out")
    return f"{place.scheme}://{quote(user or '', safe='')}:{quote(password or '', safe='')}@{bus.partition('://')[2]}"


def trusting(bus: str, authorities: str | None) -> str:
    """Return the URL of a bus whose certificate is verified against the authorities in a PEM file.

    Raises `InputError`.
    """
    if not authorities:
        return bus
    place = Place.of(bus)
    if place.scheme != "rediss":
        raise InputError(f"bus_ca: {place.scheme}:// uses no certificate: use rediss://, or leave bus_ca out")
    if "ssl_ca_certs" in place.options:
        raise InputError("the bus's URL and bus_ca both name certificate authorities: leave one out")
    if not Path(authorities).is_file():
        raise InputError(f"--bus-ca {authorities}: there is no such file")
    return f"{bus}{'&' if place.query else '?'}ssl_ca_certs={quote(authorities, safe='/')}"


def as_environment_says(bus: str, environment: Mapping[str, str]) -> str:
    """Return the URL of a Redis server, completed with user, password and authorities from `environment`.

    The variables are those of the commands. What the URL already has is kept. Raises `InputError`.
    """
    place = Place.of(bus)
    if place.scheme == "rediss" and "ssl_ca_certs" not in place.options:
        bus = trusting(bus, environment.get("ISTHMUS_BUS_CA"))
    if place.scheme not in ("redis", "rediss") or "@" in place.authority:
        return bus
    names = ("ISTHMUS_BUS_USER", "ISTHMUS_BUS_PASSWORD", "ISTHMUS_BUS_PASSWORD_FILE")
    return as_user(bus, *(environment.get(name) for name in names))
