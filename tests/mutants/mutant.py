"""One mistake: a text in a module, the text with a small error, and the tests that notice the error."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake in one module."""

    name: str
    file: str
    """Path below pkg/isthmus. For another package it begins with the name of the package."""
    before: str
    after: str
    tests: tuple[str, ...]
    """Files or tests that should notice, below the root."""
    equivalent: str = ""
    """Why the mistake has no visible effect; empty if a test must notice it."""

    @property
    def path(self) -> str:
        """The path of the module, below the root."""
        package = self.file.partition("/")[0]
        folder = {"isthmus_services": "services", "isthmus_lab": "pkg"}.get(package, "pkg/isthmus")
        return f"{folder}/{self.file}"


@dataclass(frozen=True, slots=True)
class Row:
    """A mutant whose module is not known yet."""

    name: str
    before: str
    after: str
    why: str = ""


def row(name: str, before: str, after: str) -> Row:
    """Return a mistake that a test must notice."""
    return Row(name, before, after)


def argued(name: str, before: str, after: str, why: str) -> Row:
    """Return a mistake that no test can notice, and why."""
    return Row(name, before, after, why)


def of(file: str, tests: str, *rows: Row) -> list[Mutant]:
    """Return mutants of a module that have the same tests, whose names are separated by blanks."""
    home = file.removesuffix(".py")
    return [Mutant(f"{home}/{r.name}", file, r.before, r.after, tuple(tests.split()), r.why) for r in rows]
