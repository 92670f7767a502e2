"""Which room of the library may import which: from the ground up, a floor stands on those below it and on no other.

Rooms of one floor do not know each other. Whoever needs something from above, or from next door, moves what is shared
down; a new room gets a place in this table.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FLOORS = (
    # room, and what it knows
    "averages digests interrupts memory permissions reasons runtime version",  # moving averages · what names bytes · signals, held back · what is kept of arrays · who may do what · why updates are turned away · clocks and threads · the version
    "errors metrics",
    "kernels layout sinks urls",  # hot loops · what a model is cut into · where figures go · where things are
    "isotropic signing",  # what merges of whole matrices cost · keys, and what is signed with them
    "rules",
    "codecs",
    "records",  # objects, messages and trees of state as bytes, and the keys they live under
    "bus rounds store",  # the two ports · when to stop waiting, without I/O
    "health log tolerance",  # is a process well · state = fold(merge, snapshot, log) · refusals that pass
    "beside concern ports speed",  # a thread with a loop · what keeps an agent from its work, said · the ways to a run, opened · how fast this machine merges
    "doctor learner readers syncer",  # who takes part, and who only reads
    "owners",  # arrays of a learner's fragments, spread over its processes
    "pytorch simulate",
    "following forecast shell",  # the global model, used · what a run would come to · the thread of a learner's agent
    "link",  # the front door
    "demo integrations",  # · the loops of others
    "lab",
)
"""Of `isthmus`: modules and packages, the ground first."""

SERVICES = (
    "policies probe processes",  # who may do what, in the words of servers
    "servers",
    "process",  # logs, health, a line a minute
    "output",
    "settings",
    "bench board",  # · a page of a run
    "commands",  # one module each
    "demo",
    "cli lab_worker",
)
"""Of `isthmus_services`, which stands on all of `isthmus`."""

AT_HOME = {
    "accelerate": {"integrations"},
    "aiobotocore": {"store"},
    "blake3": {"digests"},
    "botocore": {"store"},
    "cryptography": {"signing"},
    "lightning": {"integrations"},
    "matplotlib": set(),
    "numba": {"kernels"},
    "prometheus_client": {"metrics"},
    "obstore": {"store"},
    "redis": {"bus"},
    "sqlite3": {"bus"},
    "torch": {"demo", "doctor", "following", "integrations", "lab", "link", "pytorch", "sinks"},
    "transformers": {"integrations"},
}
"""Libraries that only these rooms may import: a syncer runs without torch, and a port hides what is behind it."""


def imports(package: str, folder: str) -> Iterator[tuple[Path, str, str]]:
    """Yield every import of a package: the file, its room, and the dotted name that is imported."""
    base = ROOT / folder / package
    for path in sorted(base.rglob("*.py")):
        inside = path.relative_to(base).with_suffix("").parts
        room = inside[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                # `from isthmus import kernels` names a room, `from isthmus.log import fold` has named it already.
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                names = whole if node.module == package else [node.module]
            else:
                continue
            for name in names:
                yield path.relative_to(ROOT), room, name


@pytest.mark.parametrize(
    ("package", "folder", "floors"), [("isthmus", "pkg", FLOORS), ("isthmus_services", "services", SERVICES)]
)
def test_nobody_imports_from_above_or_from_next_door(package: str, folder: str, floors: tuple[str, ...]) -> None:
    floor = {room: number for number, rooms in enumerate(floors) for room in rooms.split()}
    wrong = []
    for path, room, name in imports(package, folder):
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


def test_the_library_knows_nothing_of_the_command() -> None:
    assert [str(path) for path, _, name in imports("isthmus", "pkg") if name.startswith("isthmus_services")] == []


def test_what_is_behind_a_port_is_imported_at_home_only() -> None:
    found = [
        f"{path} imports {name}: only {', '.join(sorted(AT_HOME[top])) or 'services'} may"
        for path, room, name in imports("isthmus", "pkg")
        if (top := name.partition(".")[0]) in AT_HOME and room not in AT_HOME[top]
    ]
    assert not found, "\n".join(found)


def test_every_room_of_the_table_is_there() -> None:
    """A table that lists what is gone is no plan."""
    for package, floors in (("pkg/isthmus", FLOORS), ("services/isthmus_services", SERVICES)):
        for room in " ".join(floors).split():
            place = ROOT / package / room
            assert place.is_dir() or place.with_suffix(".py").exists(), (
                f"{package}/{room} is in the table, not in the tree"
            )


def test_help_needs_nothing_that_takes_long_to_import() -> None:
    code = "import sys, isthmus_services.cli; print(*sorted({'aiobotocore', 'numba', 'redis', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
