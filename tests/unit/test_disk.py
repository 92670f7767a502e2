"""How full a disk is: bytes, and files that it can still hold."""

from pathlib import Path

import pytest

from isthmus.doctor import machine
from isthmus.doctor.findings import FAILURE, OK, WARNING
from isthmus.runtime.disk import Room, room_in

GB = 1 << 30


@pytest.mark.parametrize(
    ("room", "outcome", "said"),
    [
        (Room(5 * GB, None), OK, "5.4 GB free below"),
        (Room(5 * GB, 100_000), OK, "5.4 GB free below"),
        (Room(5 * GB, 99_999), WARNING, "5.4 GB and room for 99,999 more files (inodes: df -i) free below"),
        (Room(5 * GB, 1_000), WARNING, "5.4 GB and room for 1,000 more files (inodes: df -i) free below"),
        (Room(5 * GB, 999), FAILURE, "5.4 GB and room for 999 more files (inodes: df -i) free below"),
        (Room(2 * GB, None), OK, "2.1 GB free below"),
        (Room(2 * GB - 1, None), WARNING, "2.1 GB free below"),
        (Room((100 << 20) - 1, None), FAILURE, "105 MB free below"),
    ],
)
def test_the_doctor_counts_bytes_and_files(
    room: Room, outcome: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "room_in", lambda _: room)
    found = machine._disk(tmp_path / "to" / "come", signed=False)
    assert (found.outcome, found.said) == (outcome, f"{said} {tmp_path}")


def test_a_file_system_without_a_limit_of_files_has_none(tmp_path: Path) -> None:
    assert room_in(tmp_path).bytes > 0
    assert room_in(Path("/proc")).files is None, "it has no inodes of a disk"
