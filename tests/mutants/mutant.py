"""One mistake: the text as it is in a module, what a slip of the hand would make of it, and the tests that notice."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake in one module."""

    name: str
    file: str
    """Below pkg/isthmus; another package's begins with the package."""
    before: str
    after: str
    tests: tuple[str, ...]
    """Files or tests that should notice, below the root."""
    equivalent: str = ""
    """Why nothing that can be seen changes; empty where a test has to notice."""

    @property
    def path(self) -> str:
        """Where the module is, below the root."""
        package = self.file.partition("/")[0]
        folder = {"isthmus_services": "services", "isthmus_lab": "pkg"}.get(package, "pkg/isthmus")
        return f"{folder}/{self.file}"


@dataclass(frozen=True, slots=True)
class Row:
    """A mutant before it is known where it belongs."""

    name: str
    before: str
    after: str
    why: str = ""


def row(name: str, before: str, after: str) -> Row:
    """Return a mistake that has to be noticed."""
    return Row(name, before, after)


def argued(name: str, before: str, after: str, why: str) -> Row:
    """Return a mistake that cannot be noticed, and why."""
    return Row(name, before, after, why)


def of(file: str, tests: str, *rows: Row) -> list[Mutant]:
    """Return the mutants of a module that the same tests (separated by blanks) look at."""
    home = file.removesuffix(".py")
    return [Mutant(f"{home}/{r.name}", file, r.before, r.after, tuple(tests.split()), r.why) for r in rows]
