"""Each room of the library imports only from the floors below its own.

A room is a module or package at the top of a package. Rooms of one floor do not import each other. If a room needs code
from its own floor or from above, move the shared code down. A new room gets a place in this table.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LIBRARY = (
    # the rooms of a floor, and what they contain
    "interrupts reasons version wording",  # holding signals back · why updates are rejected · counts in sentences
    "errors",
    "format runtime sinks",  # file formats, permissions · clocks, threads, metrics, URLs · where figures go
    "codecs rounds store",  # packing of arrays · rounds, without I/O · the port to object stores
    "bus",  # the other port; it can be in the store
    "log",  # state = fold(merge, snapshot, commits)
    "agent inspect",  # what both kinds of agents share · reading the log only
    "doctor learner syncer",
    "torch",
    "link",  # what training loops import
    "demo integrations",  # models and data to try · hooks into other training libraries
)
"""Modules and packages of `isthmus`, the lowest floor first."""

COMMANDS = (
    "board output policies process processes",  # pages · tables · permissions at servers · logs, health · child processes
    "servers settings",
    "commands main",  # one module each
    "demo probe",
)
"""Modules and packages of `isthmus_services`, which may import all of `isthmus`."""

LABORATORY = (
    "simulate working_time",  # worlds in virtual time · what goodput is
    "forecast training",  # forecasts of a run · experiments with real gradients
    "bench worker",
    "commands",
)
"""Modules and packages of `isthmus_lab`, which may import both."""

PACKAGES = (("isthmus", "pkg", LIBRARY), ("isthmus_services", "services", COMMANDS), ("isthmus_lab", "pkg", LABORATORY))

AT_HOME = {
    "accelerate": {"integrations"},
    "aiobotocore": {"store"},
    "blake3": {"format.digests"},
    "botocore": {"store"},
    "cryptography": {"format.signing"},
    "lightning": {"integrations"},
    "matplotlib": set(),
    "numba": {"codecs.kernels"},
    "prometheus_client": {"runtime.metrics"},
    "obstore": {"store"},
    "redis": {"bus"},
    "sqlite3": {"bus"},
    "torch": {"demo", "doctor", "integrations", "link", "sinks", "torch"},
    "transformers": {"integrations"},
}
"""Libraries that only these modules of `isthmus` may import: a syncer runs without torch, and a port hides the library
behind it."""


def imports(package: str, folder: str) -> Iterator[tuple[Path, str, str]]:
    """Yield every import of a package: the file, its dotted name below the package, and the name that is imported."""
    base = ROOT / folder / package
    for path in sorted(base.rglob("*.py")):
        module = ".".join(path.relative_to(base).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                # In `from isthmus import log` the imported name is the room; in `from isthmus.log import fold` the room
                # is in the module's name.
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                names = whole if node.module == package else [node.module]
            else:
                continue
            for name in names:
                yield path.relative_to(ROOT), module, name


@pytest.mark.parametrize(("package", "folder", "floors"), PACKAGES)
def test_nobody_imports_from_above_or_from_next_door(package: str, folder: str, floors: tuple[str, ...]) -> None:
    floor = {room: number for number, rooms in enumerate(floors) for room in rooms.split()}
    wrong = []
    for path, module, name in imports(package, folder):
        room = module.partition(".")[0]
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if top != package or other in ("", room) or room == "__init__":
            continue
        for which in (room, other):
            assert which in floor, f"{path}: {which} has no floor: give it one in {Path(__file__).name}, and say why"
        if floor[other] >= floor[room]:
            wrong.append(
                f"{path} imports {name}: `{room}` is on floor {floor[room]} and may know what lies below it, `{other}` "
                f"is on floor {floor[other]}. Move what both need down, or hand it over as an argument"
            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("package", "folder", "unknown"),
    [("isthmus", "pkg", ("isthmus_services", "isthmus_lab")), ("isthmus_services", "services", ("isthmus_lab",))],
)
def test_no_package_imports_one_that_stands_on_it(package: str, folder: str, unknown: tuple[str, ...]) -> None:
    assert [str(path) for path, _, name in imports(package, folder) if name.partition(".")[0] in unknown] == []


def test_what_is_behind_a_port_is_imported_at_home_only() -> None:
    found = [
        f"{path} imports {name}: only {', '.join(sorted(AT_HOME[top])) or 'services'} may"
        for path, module, name in imports("isthmus", "pkg")
        if (top := name.partition(".")[0]) in AT_HOME
        and not any(f"{module}.".startswith(f"{home}.") for home in AT_HOME[top])
    ]
    assert not found, "\n".join(found)


def test_every_room_of_the_table_is_there() -> None:
    """The table must not list rooms that are gone."""
    for package, folder, floors in PACKAGES:
        for room in " ".join(floors).split():
            place = ROOT / folder / package / room
            assert place.is_dir() or place.with_suffix(".py").exists(), (
                f"{package}/{room} is in the table, not in the tree"
            )


def test_help_needs_nothing_that_takes_long_to_import() -> None:
    """`isthmus --help` lists the commands without their settings; the help of one needs no library of ports or numbers."""
    for words, unneeded in (
        (["--help"], {"asyncio", "dataclasses", "logging", "msgspec", "numpy"}),
        (["status", "--help"], {"aiobotocore", "asyncio", "numba", "numpy", "redis", "torch"}),
    ):
        code = f"import sys\nfrom isthmus_services.main import main\ntry: main({words})\n"
        code += f"finally: print(sorted({unneeded} & set(sys.modules)), file=sys.stderr)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("usage: ")
        assert done.stderr.split() == ["[]"]
