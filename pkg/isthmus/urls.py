"""Where things are: taking URLs apart, and showing them without what opens doors."""

from urllib.parse import SplitResult, urlsplit

from isthmus.errors import InputError


def redacted(url: str) -> str:
    """Return a URL as it may be shown: without user, password and query, however it is mistyped."""
    scheme, colon, rest = url.partition("://")
    if not colon:
        scheme, rest = "", url
    return f"{scheme}{colon}{rest.rpartition('@')[2].partition('?')[0]}"


def split(url: str) -> SplitResult:
    """Return the parts of a URL. Raises `InputError` that does not repeat it."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # checked only when asked for
    except ValueError as error:
        # urllib's own words may quote the password.
        hint = "characters such as / [ # @ in a password are written %2F %5B %23 %40"
        raise InputError(f"{redacted(url)}: this URL cannot be read ({hint})") from error.__cause__
    return parts
