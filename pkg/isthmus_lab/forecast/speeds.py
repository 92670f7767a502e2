"""Speed of a syncer's arithmetic on a machine, from a table by class of CPU or from a file of measurements.

Nothing is timed unless the user asks for it: timings on a busy machine do not predict the speed of a syncer.
"""

import math
import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files

import msgspec

from isthmus.agent.speed import Speeds, measure, products
from isthmus.codecs import CODECS
from isthmus.errors import InputError
from isthmus.format.rules import Rules, rate_of

RATE = "q1.5"
"""Codec that is timed to represent all codecs with a rate."""

TIMED = (*CODECS, RATE)


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One class of CPU: seconds per parameter, by codec."""

    cpu: str
    how: str
    """How the figures were obtained."""
    add_s: dict[str, float]
    round_s: dict[str, float]
    flop_s: float
    """Operations a second of matrix products that are summed in a fixed order."""

    def of(self, rules: Rules) -> Speeds:
        """Return the speeds under these rules."""
        up, down = (RATE if rate_of(name) else name for name in (rules.codec_up, rules.codec_down))
        return Speeds(add_s=self.add_s[up], round_s=self.round_s[down], flop_s=self.flop_s)


class _Classes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    default: str
    classes: dict[str, Table]


def classes() -> tuple[str, Mapping[str, Table]]:
    """Return the name of the default class, and the classes that come with the package."""
    read = tomllib.loads(files("isthmus_lab.forecast").joinpath("speeds.toml").read_text())
    found = msgspec.convert(read, _Classes)
    return found.default, found.classes


def table(data: object, where: str) -> Table:
    """Return a measured table. Raises `InputError` that names `where` and says what is wrong."""
    try:
        found = msgspec.convert(data, Table)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {error}; isthmus plan --measure FILE writes such a file") from None
    for part in ("add_s", "round_s"):
        of = getattr(found, part)
        if missing := [name for name in TIMED if name not in of]:
            raise InputError(f"{where}: {part} has no {missing[0]}; isthmus plan --measure FILE writes all")
        for name, seconds in of.items():
            if not (math.isfinite(seconds) and 0.0 < seconds < 1e-3):
                raise InputError(
                    f"{where}: {part} of {name} is {seconds:g} s per parameter; some nanoseconds are usual"
                )
    if not (math.isfinite(found.flop_s) and 1e8 < found.flop_s < 1e13):
        raise InputError(f"{where}: flop_s is {found.flop_s:g}; some 1e10 a second are usual")
    return found


def written(found: Table) -> str:
    """Return a table as the text of a TOML file."""
    lines = [f"cpu = {_quoted(found.cpu)}", f"how = {_quoted(found.how)}", f"flop_s = {found.flop_s:.3g}"]
    for part in ("add_s", "round_s"):
        lines += ["", f"[{part}]", *(f"{_key(name)} = {seconds:.3g}" for name, seconds in getattr(found, part).items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if name.isalnum() else _quoted(name)


def _quoted(words: str) -> str:
    return msgspec.json.encode(words).decode()


def measured(now: Callable[[], float], cpu: str, when: str, repeats: int = 15, size: int = 1 << 20) -> Table:
    """Time every codec on one core of this machine; return the table."""
    found = {name: measure(now, name, name, size, repeats) for name in TIMED}
    return Table(
        cpu=cpu,
        how=f"fastest of {repeats} repeats on a fragment of {size:,} parameters, one core, {when}",
        add_s={name: speeds.add_s for name, speeds in found.items()},
        round_s={name: speeds.round_s for name, speeds in found.items()},
        flop_s=products(now, repeats),
    )
