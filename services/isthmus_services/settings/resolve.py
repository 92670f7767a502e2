"""Where a command's settings come from: flags, then `ISTHMUS_…` in the environment, then a TOML file, then defaults.

A command declares one frozen dataclass; flags, environment names, file keys, checks and help are all made from it.
Standard variables of other tools, such as AWS_ENDPOINT_URL, keep their names and are read by those tools.
"""

import argparse
import dataclasses
import os
import re
import socket
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

if typing.TYPE_CHECKING:
    from rich.console import Console

from isthmus.errors import InputError, plainly
from isthmus.format.rules import Pace, Rules, metadata
from isthmus.runtime.urls import redacted

T = TypeVar("T")

PREFIX = "ISTHMUS_"
CONFIG = "config"
HOSTNAME = "@hostname"
"""A name that stands for the host's name, so that replicas of one container get different names."""

NOT_SET = "not set"

_AWS_SHOWN = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE")
_AWS_HIDDEN = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_ELSEWHERE = frozenset({"ISTHMUS_KERNELS", "ISTHMUS_KEY_PASSPHRASE", "ISTHMUS_KEY_PASSPHRASE_FILE"})
"""Variables that are not a setting of any command: `isthmus.codecs.kernels` and `isthmus.format.signing` read them."""

_OF_TESTS = PREFIX + "REQUIRE_"


@dataclass(frozen=True)
class Setting:
    """A field of a settings class: `Annotated[float, Setting("seconds between checkpoints", metavar="S", gt=0)]`."""

    description: str = ""
    """Help text. `fields` appends the default, if it is a word or a number, unless the text ends with a parenthesis."""
    _: dataclasses.KW_ONLY
    name: str = ""
    """Name of the setting; empty: the field's name."""
    metavar: str | None = None
    short: str = ""
    choices: tuple[str, ...] = ()
    positional: bool = False
    flag_only: bool = False
    """Whether only a flag sets it: a one-time request (`--apply`) must not linger in an environment."""
    once: bool = False
    """Whether a second, different value is an error. Else the last one counts, as wrappers of a command expect."""
    with_commas: bool = False
    """Whether a comma in a value of a list belongs to the value; else it divides two values."""
    secret: bool = False
    """Whether it is never shown, and set only by the environment or a file: all users of a machine can read a flag."""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    check: Callable[[str], object] | None = None
    """Raises `InputError`, with the text "what it is: what is wrong", for an unknown word."""
    within: type[Rules] | type[Pace] | None = None
    """The struct whose field `of` says the rest: the help text before `description`, metavar, limits and default."""
    of: str = ""
    """Name of the field of rules or pace that it sets; empty: the setting's field has the same name."""
    field: str = ""
    type: Any = None
    default: Any = None
    owner: Any = None
    """The class that declares the setting. Its docstring heads the group in the help.

    `fields` sets `field`, `type`, `default` and `owner`. If there is no default, it is `dataclasses.MISSING`.
    """

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return self.metavar or self.name.upper() if self.positional else "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The name in the environment."""
        return PREFIX + self.name.upper()

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value."""
        return typing.get_args(self.type)[0] is bool

    @property
    def is_list(self) -> bool:
        """Whether its flag takes several values: `--n 1 2`, `--n 1,2`, `--n 1 --n 2`."""
        return typing.get_origin(typing.get_args(self.type)[0]) is list

    @property
    def item(self) -> type:
        """The type of a list's items."""
        return typing.get_args(typing.get_args(self.type)[0])[0]

    @property
    def is_free(self) -> bool:
        """Whether it is a list of arbitrary words, which cannot be told from the words after them."""
        return self.is_list and self.item is str and "=" not in (self.metavar or "")

    def is_item(self, word: str) -> bool:
        """Return whether a word can only be a value of this list."""
        if self.item is str:
            return "=" in word and not self.is_free
        return all(_is_number(piece) for piece in _pieces(word))

    def shown(self, value: object) -> str:
        """Return a value as text that may be printed: no secret, and no password in a URL."""
        if value is None:
            return ""
        if self.secret:
            return "(set, not shown)"
        return redacted(str(value)) if self.name in ("bus", "run", "store") else str(value)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def settings_class(cls: type[T]) -> type[T]:
    """Return a frozen dataclass of settings that cannot be compared or printed.

    All share the methods below. A dataclass compiles methods of its own, and all commands declare their settings at
    every start: 0.2 ms for each of 45 classes.
    """
    made = dataclass(kw_only=True, init=False, eq=False, repr=False)(cls)
    methods = {"__init__": _set_all, "__setattr__": _set_none, "__delattr__": _set_none}
    for name, method in methods.items():
        setattr(made, name, method)
    return made


def _set_all(self: object, **given: object) -> None:
    known = {field.name: field.default for field in dataclasses.fields(type(self))}  # type: ignore[arg-type]
    values = known | given
    unknown, missing = given.keys() - known.keys(), [n for n, v in values.items() if v is dataclasses.MISSING]
    if unknown or missing:
        raise TypeError(f"{type(self).__name__}: unknown {sorted(unknown)}, missing {missing}")
    self.__dict__.update(values)


def _set_none(self: object, name: str, *_: object) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot assign to or delete {name}")


@dataclass(frozen=True)
class Resolved(typing.Generic[T]):
    """Settings, and the source of each."""

    values: T
    sources: Mapping[str, str]
    """By field."""
    stray: tuple[str, ...]
    """A warning for each ISTHMUS_… variable that belongs to no command."""


def fields(cls: type) -> list[Setting]:
    """Return the settings that a class declares, in the order of its help."""
    found = []
    for field in dataclasses.fields(cls):
        kind, said = typing.get_args(field.type)[:2]
        limits: dict[str, Any] = {"ge": said.ge, "gt": said.gt, "le": said.le}
        holds, of = field.default, said.of or field.name
        if said.within is not None:
            limits, holds = metadata(said.within, of), getattr(said.within(), of)
            text, metavar = f"{limits.pop('description')} {said.description}".rstrip(), limits.pop("title", None)
            said = dataclasses.replace(said, description=text, metavar=said.metavar or metavar)
        shown = "" if isinstance(holds, bool) else f"{holds:g}" if isinstance(holds, int | float) else holds
        silent = shown and not said.description.endswith(")")
        found.append(
            dataclasses.replace(
                said,
                description=f"{said.description} ({shown})" if silent and isinstance(shown, str) else said.description,
                name=said.name or field.name,
                field=field.name,
                of=of,
                # A value that is given is never None; a default may be.
                type=typing.Annotated[_without_none(kind), msgspec.Meta(**limits)],
                default=field.default,
                owner=next(c for c in reversed(cls.__mro__) if field.name in getattr(c, "__annotations__", {})),
            )
        )
    order = cls.__mro__.index
    # Shared settings come first among positionals (RUN), a command's own first among flags.
    return sorted(found, key=lambda s: (not s.positional, -order(s.owner) if s.positional else order(s.owner)))


def public(values: object) -> dict[str, object]:
    """Return settings as plain data that may be stored: no secrets, and no password in a URL."""
    given = {s: getattr(values, s.field) for s in fields(type(values))}
    return {s.field: s.shown(value) if s.secret or isinstance(value, str) else value for s, value in given.items()}


def add_flags(parser: argparse.ArgumentParser, cls: type, environment: Mapping[str, str]) -> None:
    """Add the flags of a settings class to a parser."""
    settings = fields(cls)
    positionals = [s for s in settings if s.positional]
    only = positionals[0] if len(positionals) == 1 else None
    groups: dict[type, Any] = {}
    for s in settings:
        if s.secret:
            continue
        if s.owner not in groups:
            # Flags of the command's own class have no heading.
            title = (s.owner.__doc__ or "").splitlines()[0].rstrip(".").lower()
            groups[s.owner] = parser if s.owner is cls else parser.add_argument_group(title)
        text = s.description.replace("%", "%%")
        shared: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
        if s.positional:
            # One of several positionals is optional only if it may come from the environment or a file: argparse gives
            # an optional one nothing when a flag stands between two positionals.
            elsewhere = only is not None or s.variable in environment or PREFIX + CONFIG.upper() in environment
            more = {"nargs": "?"} if elsewhere and not s.flag_only else {}
            groups[s.owner].add_argument(s.field, metavar=s.flag, action=_Once, **more, **shared)
        elif s.is_switch:
            # A switch whose default is not False needs a flag for either value.
            action = "store_true" if s.default is False else argparse.BooleanOptionalAction
            groups[s.owner].add_argument(s.flag, dest=s.field, action=action, **shared)
        else:
            names = (s.short, s.flag) if s.short else (s.flag,)
            metavar = s.metavar or (f"{{{','.join(s.choices)}}}" if s.choices else None)
            several: dict[str, Any] = {"action": _several(s, only), "nargs": "+"} if s.is_list else {}
            several |= {"action": _Once} if s.once else {}
            groups[s.owner].add_argument(*names, dest=s.field, metavar=metavar, **several, **shared)
    where = parser.add_argument_group("sources of settings, in this order: flags, ISTHMUS_… variables, a file")
    where.add_argument(
        "--config", metavar="FILE", help="TOML file: settings for all commands, then one table per command"
    )
    where.add_argument("--show-settings", action="store_true", help="print every setting and its source, then exit")


def resolve(
    cls: type[T],
    command: str,
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    everything: Callable[[], Mapping[str, set[str]]],
) -> Resolved[T]:
    """Return the settings of a command. Raises `InputError` that names the source of an invalid value.

    `everything` returns, by command, the names of its settings. An unknown name in a file is an error. `everything`
    imports the settings of all commands, so it is called only for a file, or for a variable that this command lacks.
    """
    path = arguments.config or environment.get(PREFIX + CONFIG.upper())
    file = _read(Path(path), everything()) if path else {}
    values, sources = {}, {}
    missing = []
    for s in fields(cls):
        given, source = _find(s, command, vars(arguments), environment, file, path)
        if source == "default":
            if given is dataclasses.MISSING:
                missing.append(s)
                continue
            values[s.field] = given
        else:
            values[s.field] = _convert(s, given, source)
        sources[s.field] = source
    if missing and not arguments.show_settings:
        names = ", ".join(s.flag if s.flag_only else f"{s.flag} (or {s.variable})" for s in missing)
        raise InputError(f"missing: {names}")
    for s in missing:
        values[s.field], sources[s.field] = None, "missing"
    own = {s.variable for s in fields(cls) if not s.flag_only} | {PREFIX + CONFIG.upper(), *_ELSEWHERE}
    others = [n for n in sorted(environment.keys() - own) if n.startswith(PREFIX) and not n.startswith(_OF_TESTS)]
    known = [PREFIX + name.upper() for name in sorted(set.union(*everything().values()) | {CONFIG})] if others else []
    stray = tuple(
        f"{name} is not a setting of any command{did_you_mean(name, known)}" for name in others if name not in known
    )
    return Resolved(cls(**values), sources, stray)


def show(
    resolved: Resolved[Any],
    console: "Console",
    environment: Mapping[str, str],
    effective: Mapping[str, tuple[object, str]] | None = None,
) -> None:
    """Print every setting with its value and source; of a secret, only that it is set.

    `effective`: by field, the value of a setting that was not given, and its source.
    """
    from rich.table import Table
    from rich.text import Text  # no word of a value or of a description is markup

    table = Table(title="settings", title_justify="left")
    for column in ("setting", "value", "from", "what it is"):
        table.add_column(column, overflow="fold")
    for s in fields(type(resolved.values)):
        value, source = getattr(resolved.values, s.field), resolved.sources[s.field]
        if value is None and source == "default":
            value, source = (effective or {}).get(s.field, (None, source))
        table.add_row(*(Text(word) for word in (s.name, s.shown(value) or NOT_SET, source, s.description)))
    for name in _AWS_SHOWN + _AWS_HIDDEN:
        if name in environment:
            shown = "(set, not shown)" if name in _AWS_HIDDEN else redacted(environment[name])
            table.add_row(name, Text(shown), name, "read by the AWS client itself")
    console.print(table)
    for said in resolved.stray:
        console.print(said, style="yellow", highlight=False)


def did_you_mean(word: str, known: Iterable[str], form: str = "{}") -> str:
    """Return ": did you mean …?" with the nearest known name, or an empty text if none is near enough."""
    import difflib

    near = difflib.get_close_matches(word, list(known), 1)
    return f": did you mean {form.format(near[0])}?" if near else ""


def host_name(name: str) -> str:
    """Return the name; the host's name for `HOSTNAME`."""
    return socket.gethostname() if name == HOSTNAME else name


def _find(
    s: Setting,
    command: str,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Mapping[str, Any],
    path: str | None,
) -> tuple[Any, str]:
    if s.field in flags:
        return flags[s.field], s.flag
    if not s.flag_only:
        if environment.get(s.variable, "") != "":
            return environment[s.variable], s.variable
        family, _, last = command.rpartition(" ")
        own = (file.get(family, {}) if family else file).get(last, {})
        for table, where in ((own, f"{path} [{command.replace(' ', '.')}]"), (file, str(path))):
            # A table at the top belongs to a command, even if a setting has the same name (learner).
            if s.name in table and not isinstance(table[s.name], dict):
                return table[s.name], where
    return s.default, "default"


class _Once(argparse.Action):
    """Stores a value, and reports a second, different one: one of the two would be dropped without a word."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if (before := getattr(namespace, self.dest, values)) != values:
            parser.error(f"{option_string or self.metavar} is given twice: {before} and {values}")
        setattr(namespace, self.dest, values)


def _several(s: Setting, only: Setting | None) -> type[argparse.Action]:
    """Return the action of a list. It takes the words after its flag; the last may be the missing positional."""

    class Several(argparse.Action):
        def __call__(
            self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
        ) -> None:
            words = list(values)
            if only is not None and not hasattr(namespace, only.field) and len(words) > 1 and not s.is_item(words[-1]):
                if s.is_free and len(words) > 2:
                    parser.error(f"put {only.flag} before {s.flag} and its values")
                setattr(namespace, only.field, words.pop())
            setattr(namespace, s.field, [*getattr(namespace, s.field, ()), *words])

    return Several


def _pieces(word: str) -> list[str]:
    """Return the parts between commas. A word without any is returned whole, for the check of values to report."""
    return [piece.strip() for piece in word.split(",") if piece.strip()] or [word]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _convert(s: Setting, given: Any, source: str) -> Any:
    if s.is_list:
        words = given if isinstance(given, list) else [given]
        pieces = [
            piece
            for word in words
            for piece in (_pieces(word) if isinstance(word, str) and not s.with_commas else [word])
        ]
        return [_convert_one(s, typing.Annotated[s.item, typing.get_args(s.type)[1]], p, source) for p in pieces]
    return _convert_one(s, s.type, given, source)


def _convert_one(s: Setting, kind: Any, given: Any, source: str) -> Any:
    shown = s.shown(given)
    where = source if source == s.flag else f"{source}, {s.name}" if source != s.variable else source
    if typing.get_args(kind)[0] is float and isinstance(given, str | float) and str(given).strip().lower() == "nan":
        raise InputError(f"{where} {shown}: must be a number")  # NaN is below no bound and above none
    if s.check is not None and isinstance(given, float | int):
        given = f"{given}"  # a file may hold a number where a word may have a unit
    if typing.get_args(kind)[0] is float and isinstance(given, str):
        with suppress(ValueError):
            given = float(given)  # .5 and 2. are numbers, too
    try:
        value = msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InputError(f"{where} {shown}: must be {plainly(str(error))}{_in_digits(given)}") from None
    if s.choices and value not in s.choices:
        raise InputError(f"{where} {shown}: choose one of {', '.join(s.choices)}")
    if s.check is not None and isinstance(value, str):
        try:
            s.check(value)
        except InputError as error:
            named, _, why = str(error).partition(": ")  # the message names the value already
            raise InputError(f"{where} {shown}: {why or named}") from None
    return value


_POWERS = {"k": 3, "m": 6, "g": 9, "b": 9}


def _in_digits(given: Any) -> str:
    """Return how to write a number that has a letter for thousands, millions or billions; else nothing."""
    found = re.fullmatch(r"([0-9]+(?:[.][0-9]+)?)([kmgb])", str(given).strip().lower())
    return f", without a letter: {float(found[1]) * 10 ** _POWERS[found[2]]:.15g}" if found else ""


def _read(path: Path, everything: Mapping[str, set[str]]) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            read = tomllib.load(file)
    except OSError as error:
        raise InputError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path}: {error}") from None
    shared = set.union(*everything.values())
    families = {name.rpartition(" ")[0] for name in everything} - {""}

    def check(table: Mapping[str, Any], allowed: set[str], command: str) -> None:
        for name, value in table.items():
            inner = f"{command} {name}".strip()
            if isinstance(value, dict):
                if inner not in everything and inner not in families:
                    tables = [name.replace(" ", ".") for name in (*everything, *families)]
                    missing = inner.replace(" ", ".")
                    hint = did_you_mean(missing, tables, "[{}]")
                    raise InputError(f"--config {path}: there is no command [{missing}]{hint}")
                check(value, everything.get(inner, set()), inner)
            elif name not in allowed:
                raise InputError(f"--config {path}: unknown setting {name}{did_you_mean(name, allowed)}")

    check(read, shared, "")
    return read


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        return next(k for k in typing.get_args(kind) if k is not type(None))
    return kind


def environment() -> Mapping[str, str]:
    """Return the process's environment, from which settings are read."""
    return os.environ
