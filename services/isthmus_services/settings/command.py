"""A command: its name, its settings, and the module that runs it. Other packages may add commands."""

from collections.abc import Iterable
from functools import cache
from importlib import import_module, metadata
from typing import NamedTuple, cast

GROUP = "isthmus.commands"
"""The group of entry points. Each entry point names a module that has `COMMANDS` and `FAMILIES`, as
`isthmus_services.settings.listed` has."""


class Command(NamedTuple):
    """A command. One whose name has two words belongs to a family: `isthmus simulate goodput`."""

    name: str
    help: str
    package: str
    declared: tuple[str, str]
    """The module and the name of the class of its settings."""

    @property
    def settings(self) -> type:
        """The class of its settings. `isthmus --help` imports no such class."""
        module, name = self.declared
        return cast(type, getattr(import_module(module), name))

    @property
    def module(self) -> str:
        """The module whose `run` takes the settings and returns the exit code."""
        if self.name == "demo":
            return f"{self.package}.demo"
        return f"{self.package}.commands.{self.name.replace(' ', '.')}"


def commands_of(package: str, declared: str, rows: Iterable[tuple[str, str, str]]) -> tuple[Command, ...]:
    """Return a package's commands. Each row: the family or an empty text, the name of the class of its settings in the
    module `declared`, and its help."""
    return tuple(
        Command(f"{family} {settings.lower().removeprefix(family)}".strip(), text, package, (declared, settings))
        for family, settings, text in rows
    )


@cache
def installed() -> tuple[tuple[Command, ...], dict[str, str]]:
    """Return the commands of all installed packages, and the families of two-word commands with their help."""
    from isthmus_services.settings import listed

    modules = [listed, *(found.load() for found in sorted(metadata.entry_points(group=GROUP)))]
    commands = [command for module in modules for command in module.COMMANDS]
    return tuple(commands), {name: text for module in modules for name, text in module.FAMILIES.items()}


def names() -> dict[str, set[str]]:
    """Return, by command, the names of the settings that a file may set."""
    from isthmus_services.settings.resolve import fields

    return {c.name: {s.name for s in fields(c.settings) if not s.flag_only} for c in installed()[0]}
