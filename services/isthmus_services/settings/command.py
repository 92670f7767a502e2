"""A command: its name, its settings, and the module that runs it. Other packages may add commands."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from isthmus_services.settings.resolve import fields

GROUP = "isthmus.commands"
"""The group of entry points. Each entry point names a module that has `COMMANDS` and `FAMILIES`, as
`isthmus_services.settings.declared` has."""


@dataclass(frozen=True)
class Command:
    """A command. One whose name has two words belongs to a family: `isthmus simulate goodput`."""

    name: str
    settings: type
    help: str
    package: str

    @property
    def module(self) -> str:
        """The module whose `run` takes the settings and returns the exit code."""
        if self.name == "demo":
            return f"{self.package}.demo"
        return f"{self.package}.commands.{self.name.replace(' ', '.')}"


def commands_of(package: str, rows: Iterable[tuple[str, type, str]]) -> tuple[Command, ...]:
    """Return a package's commands. Each row: the family or an empty text, the class of its settings, and its help."""
    return tuple(
        Command(f"{family} {settings.__name__.lower().removeprefix(family)}".strip(), settings, text, package)
        for family, settings, text in rows
    )


@cache
def installed() -> tuple[tuple[Command, ...], dict[str, str]]:
    """Return the commands of all installed packages, and the families of two-word commands with their help."""
    from isthmus_services.settings import declared

    modules = [declared, *(found.load() for found in sorted(metadata.entry_points(group=GROUP)))]
    commands = [command for module in modules for command in module.COMMANDS]
    return tuple(commands), {name: text for module in modules for name, text in module.FAMILIES.items()}


def names() -> dict[str, set[str]]:
    """Return, by command, the names of the settings that a file may set."""
    return {c.name: {s.name for s in fields(c.settings) if not s.flag_only} for c in installed()[0]}
