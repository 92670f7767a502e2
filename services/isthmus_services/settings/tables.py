"""TOML files that settings name: tables of islands, speeds or prices."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from isthmus.errors import InputError

T = TypeVar("T")


def read_table(path: str) -> dict[str, Any]:
    """Return the contents of a TOML file. Raises `InputError`."""
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None


def converted(table: object, kind: type[T], where: str) -> T:
    """Return a table converted to a type. Raises `InputError` that says where the table is wrong."""
    known = set(kind.__annotations__)
    if isinstance(table, dict) and (unknown := sorted(table.keys() - known)):
        raise InputError(f"{where}: unknown {unknown[0]}: there are {', '.join(sorted(known))}")
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {error}") from None


# --- shown ------------------------------------------------------------------------------------------------------------
