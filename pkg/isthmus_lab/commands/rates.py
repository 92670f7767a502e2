"""Rates of links as users write them: "200Mbit/s", "0.5Gbps", "25 MB/s"."""

import re

from isthmus.errors import InputError

BARE_MOST = 100.0
"""Largest number without a unit that is taken as Gbit/s; larger ones are most likely in Mbit/s."""

UNITS = "Mbit/s, Gbit/s or MB/s"

_RATE = re.compile(
    r"(?P<number>[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(?:(?P<prefix>[kKmMgGtT]?)"
    r"(?:(?P<bits>[bB]its?(?:/s)?|bps|b/s|b)|(?P<bytes>[bB]ytes?(?:/s)?|Bps|B/s|B)))?"
)

_PREFIXES = {"": 1e-9, "k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}
"""Gigabits in a bit with this prefix."""


def gbit_s(word: str) -> float:
    """Return a rate in Gbit/s. A small b is a bit, a capital B a byte; a number without a unit is in Gbit/s.

    Raises `InputError` for anything else, for zero, and for a number above `BARE_MOST` without a unit.
    """
    found = _RATE.fullmatch(word.strip())
    try:
        number = float(found["number"]) if found else -1.0
    except ValueError:
        number = -1.0
    if found is None or number < 0.0:
        raise InputError(f"{word}: write a number and its unit, {UNITS}, such as 200Mbit/s")
    if number == 0.0:
        raise InputError(f"{word}: must be more than 0, such as 200Mbit/s")
    if found["bits"] or found["bytes"]:
        return number * _PREFIXES[found["prefix"].lower()] * (8.0 if found["bytes"] else 1.0)
    if number > BARE_MOST:
        raise InputError(f"{word}: which unit? write {number:g}Mbit/s, {number:g}Gbit/s or {number:g}MB/s")
    return number


def shown(rate: float) -> str:
    """Return a rate in Gbit/s with the unit in which it is read."""
    return f"{rate:.3g} Gbit/s" if rate >= 1.0 else f"{1000.0 * rate:.3g} Mbit/s"
