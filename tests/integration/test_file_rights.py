"""A store in a folder and an embedded bus name the right that is missing, and the command that gives it works."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from advice.test_doctor_store import as_user
from isthmus.bus import open_bus
from isthmus.errors import Denied
from isthmus.runtime.clock import single_threaded
from isthmus.runtime.file_rights import why_denied
from isthmus.store.files import FileStore

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
NOBODY = 65534
DAEMON = 1
ASKS: Mapping[str, Callable[[FileStore], Coroutine[Any, Any, object]]] = {
    "put": lambda store: store.put("commits/new", b"x"),
    "get": lambda store: store.get("commits/k"),
    "list": lambda store: store.list("commits/"),
    "delete": lambda store: store.delete("commits/k"),
}


@pytest.fixture
def above() -> Iterator[Path]:
    """A folder that every user may enter, with a run's folder of root's in it."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "run" / "commits").mkdir(parents=True)
    (folder / "run" / "commits" / "k").write_bytes(b"x")
    yield folder
    shutil.rmtree(folder)


def mends(attempt: str, verb: str, at: Path, command: str) -> None:
    """Assert that a refusal names a right on a path, and a command, and run that command as an administrator."""
    found = re.search(
        r"user (\S+) may not (.+) (/\S+), which is (\S+)'s and has mode \S+: (?:run .+)?`(.+)` allows it"
        r"(?:, but if \S+ runs a process of this run, start that as \S+ first, or this comes again)?$",
        attempt,
    )
    assert found, attempt
    assert found.groups()[1:3] == (verb, str(at)), attempt
    assert found[5].startswith(command), attempt
    subprocess.run(found[5].removeprefix("sudo "), shell=True, check=True)


@pytest.mark.parametrize(
    ("ask", "below", "owner", "mode", "verb", "command"),
    [
        ("put", "run", 0, 0o755, "write in", "sudo chown -R"),
        ("put", "run", NOBODY, 0o500, "write in", "chmod u+rwX"),
        ("put", "run/commits", 0, 0o755, "write in", "sudo chown -R"),
        ("get", "run/commits/k", 0, 0o600, "read", "sudo chown -R"),
        ("get", "run/commits", 0, 0o700, "enter", "sudo chown -R"),
        ("get", "run/commits", NOBODY, 0o600, "enter", "chmod u+rwX"),
        ("list", "run/commits", 0, 0o711, "read", "sudo chown -R"),
        ("list", "run", NOBODY, 0o000, "enter", "chmod u+rwX"),
        ("get", "", 0, 0o700, "enter", "sudo chmod a+x"),
        ("delete", "run/commits", 0, 0o755, "write in", "sudo chown -R"),
        ("put", "run/commits", DAEMON, 0o755, "write in", "sudo chown -R"),
    ],
)  # fmt: skip
def test_a_folder_names_the_right_that_is_missing(
    ask: str, below: str, owner: int, mode: int, verb: str, command: str, above: Path
) -> None:
    if below != "run" or owner:
        for path in (above / "run", *(above / "run").rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    os.chown(above / below, owner, owner)
    (above / below).chmod(mode)

    def again() -> None:
        with as_user():
            asyncio.run(ASKS[ask](FileStore(above / "run", single_threaded())))

    with pytest.raises(Denied) as refused:
        again()
    taken = "run this process as daemon, too, or, if daemon runs nothing of this run, `sudo chown"
    assert (taken in str(refused.value)) == (owner == DAEMON), "a chown would take the folder from a live process"
    hidden = ", but if root runs a process of this run, start that as nobody first, or this comes again"
    assert str(refused.value).endswith(hidden) == (mode == 0o600 and not owner), (
        "such a process hides its next file, too"
    )
    mends(str(refused.value), verb, above / below, command)
    again()


def test_root_without_its_capabilities_is_told_the_mode(above: Path) -> None:
    """Containers often drop them, and root's files then have a mode that counts."""
    folder = above / "run" / "commits"
    folder.chmod(0o555)
    code = "import sys; from isthmus.runtime.file_rights import why_denied; print(why_denied(sys.argv[1:], 4, writing=True))"
    bare = ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search,-fowner"]
    for dropped in (True, False):
        command = [*(bare if dropped else ()), sys.executable, "-c", code, str(folder / "k")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        assert said == (
            f"user root may not write in {folder}, which is root's and has mode dr-xr-xr-x: `chmod u+rwX {folder}` allows it"
            if dropped
            else ""
        )


def test_a_bus_can_be_shared_as_umask_and_folder_allow(tmp_path: Path) -> None:
    async def append() -> None:
        async with open_bus(f"sqlite://{tmp_path}/bus", b"r" * 32, None) as bus:
            await bus.append("s", b"x")
            assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("bus*")} == {0o664}

    before = os.umask(0o002)
    try:
        asyncio.run(append())
    finally:
        os.umask(before)


def test_a_folder_to_come_is_made_for_the_user(above: Path) -> None:
    def again() -> None:
        with as_user():
            asyncio.run(FileStore(above / "a" / "b", single_threaded()).put("k", b"x"))

    with pytest.raises(Denied) as refused:
        again()
    mends(str(refused.value), "write in", above, "sudo install -d -o")
    again()


@pytest.mark.parametrize(
    ("modes", "verb", "at", "command"),
    [
        ({"": 0o755}, "write in", "", "sudo chown"),
        ({"": 0o755, "bus": 0o644}, "write", "bus", "sudo chown"),
        ({"": 0o777, "bus": 0o644, "bus-wal": 0o644}, "write", "bus", "sudo chown"),
        ({"": 0o700}, "enter", "", "sudo chmod a+x"),
    ],
)
def test_a_bus_names_the_right_that_is_missing(
    modes: dict[str, int], verb: str, at: str, command: str, above: Path
) -> None:
    for name, mode in modes.items():
        if name:
            (above / name).touch()
        (above / name).chmod(mode)

    def again() -> None:
        async def append() -> None:
            async with open_bus(f"sqlite://{above}/bus", b"r" * 32, None) as bus:
                await bus.append("s", b"x")

        with as_user():
            asyncio.run(append())

    with pytest.raises(Denied) as refused:
        again()
    mends(str(refused.value), verb, above / at, command)
    if verb == "enter":
        above.chmod(0o777)
    again()


def test_the_folder_of_a_bus_is_made_for_the_user(above: Path) -> None:
    def again() -> None:
        async def append() -> None:
            async with open_bus(f"sqlite://{above}/a/bus", b"r" * 32, None) as bus:
                await bus.append("s", b"x")

        with as_user():
            asyncio.run(append())

    with pytest.raises(Denied) as refused:
        again()
    mends(str(refused.value), "write in", above, "sudo install -d -o")
    again()


def test_a_folder_that_is_immutable_is_not_said_to_lack_a_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After chattr +i owner and mode still allow writing, and no chmod helps."""
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, needs, **more: not needs & os.W_OK and may(path, needs, **more))
    said = why_denied([str(tmp_path / "object")], os.R_OK, writing=True)
    assert f"may not write in {tmp_path}, though owner and mode allow it" in said
    assert f"`sudo chattr -i {tmp_path}` allows it" in said
    assert "chmod" not in said
