"""tools/offline.py collects the packages that a machine without network needs, and reports which are missing there."""

import sys
from collections.abc import Iterable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def offline() -> Any:
    """The tool as a module: tools/ is not on the import path."""
    spec = spec_from_file_location("isthmus_tools_offline", ROOT / "tools/offline.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def requirements(*texts: str) -> list[Requirement]:
    return [Requirement(text) for text in texts]


def installed(folder: Path, name: str, version: str, *requires: str) -> None:
    """Write the metadata of an installed package into a folder."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def wheels(folder: Path, sizes: Iterable[tuple[str, int]]) -> None:
    for name, size in sizes:
        (folder / f"{name}-py3-none-any.whl").write_bytes(bytes(size))


def test_what_the_machine_has_is_left_out_with_what_only_it_requires(offline: Any) -> None:
    releases = {
        "client": offline.Release("1", ("http>=3", "Torch", "keys[ssh]")),
        "http": offline.Release("3", ("sockets",)),
        "sockets": offline.Release("1", ()),
        "keys": offline.Release("2", ('hash; extra == "ssh"', 'paint; extra == "colour"')),
        "hash": offline.Release("5", ()),
    }
    markers = offline.Target.parse("3.12", "manylinux_2_35_x86_64").markers
    bring, unknown = offline.needed(requirements("client"), releases, {"http", "torch"}, markers)
    assert bring == {"client", "keys", "hash"}
    assert unknown == []


def test_markers_are_those_of_the_target(offline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip evaluates markers for the Python that runs it, so the tool corrects pip's result."""
    known = {
        "client": offline.Release("1", ('old; python_version < "3.9"', 'new[fast]>=2; python_version >= "3.9"')),
        "old": offline.Release("1", ()),
        "new": offline.Release("2.1", ()),
    }
    asked: list[list[str]] = []

    def by_pip(wanted: list[Requirement], target: object) -> dict[str, Any]:
        names = [r.name for r in wanted]
        asked.append(names)
        return {name: known[name] for name in [*names, "old"]}  # as a Python 3.8 sees it

    monkeypatch.setattr(offline, "resolved_by_pip", by_pip)
    target = offline.Target.parse("3.12", "manylinux_2_35_x86_64")
    wanted = requirements("client", "torch>=2", 'gone; sys_platform == "win32"')
    assert offline.resolve(wanted, {"torch"}, target) == {"client": "1", "new": "2.1"}
    assert asked == [["client"], ["client", "new"]]


def test_the_default_list_leaves_nothing_out_that_isthmus_alone_brings(offline: Any) -> None:
    declared = {r.name for r in offline.declared()}
    assert {"torch", "numpy", "numba", "llvmlite", "pytest-xdist", "hypothesis"} <= declared & offline.HAS
    assert {"aiobotocore", "blake3", "cryptography", "hatchling", "obstore", "pytest-asyncio"} <= declared - offline.HAS


def test_pip_is_told_every_manylinux_tag_from_the_newest_on(offline: Any) -> None:
    arguments = offline.Target.parse("3.12", "manylinux_2_28_aarch64").pip_arguments
    tags = [a for a in arguments if a.startswith("manylinux")]
    assert tags[:2] == ["manylinux_2_28_aarch64", "manylinux_2_27_aarch64"]
    assert {"manylinux_2_17_aarch64", "manylinux2014_aarch64"} <= set(tags)


@pytest.mark.parametrize(
    ("python", "platform", "said"),
    [
        ("3", "manylinux_2_35_x86_64", "--python 3: give a version such as 3.12"),
        ("3.12", "linux_x86_64", "--platform linux_x86_64: give the newest tag"),
    ],
)
def test_a_malformed_target_is_rejected(offline: Any, python: str, platform: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        offline.Target.parse(python, platform)


def test_above_the_limit_the_error_names_the_largest(offline: Any, tmp_path: Path) -> None:
    wheels(tmp_path, [("small-1", 10), ("large-2", 2**21), ("larger-2", 3 * 2**20), ("medium-1", 2**20)])
    found = offline.wheels_in(tmp_path)
    assert list(offline.table(found))[-1].split() == ["4", "wheels", "6.00", "MiB"]
    offline.check_limit(found, 6.1)
    with pytest.raises(
        SystemExit, match=r"6\.0 MiB, more than .* 5 MiB \(largest: larger 3\.0, large 2\.0, medium 1\.0\)"
    ):
        offline.check_limit(found, 5)


def test_two_versions_of_a_package_are_rejected(offline: Any, tmp_path: Path) -> None:
    wheels(tmp_path, [("Some_Name-1", 1), ("some_name-2", 1)])
    with pytest.raises(SystemExit, match=r"holds Some_Name-1.* and some_name-2.*: delete one"):
        offline.wheels_in(tmp_path)


def test_torch_is_never_brought_along(offline: Any, tmp_path: Path) -> None:
    target = offline.Target.parse("3.12", "manylinux_2_35_x86_64")
    with pytest.raises(SystemExit, match="a CUDA build is too large"):
        offline.collect(offline.HAS, {"torch"}, target, tmp_path, 60)


def test_without_wheels_the_error_says_where_to_collect_them(offline: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no wheels in .*: run `make wheels` on a machine with network"):
        offline.install(tmp_path, tmp_path / "site")


def test_what_is_missing_or_too_old_is_named_with_the_fix(
    offline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, machine = tmp_path / "site", tmp_path / "machine"
    installed(site, "client", "1.5", "http>=3", "date<3", 'paint; extra == "colour"', 'old; python_version < "3"')
    installed(machine, "client", "0.1")  # the folder is searched first
    installed(machine, "http", "2.9", "absent")  # packages of the machine are assumed to fit together
    installed(machine, "date", "4.0")
    installed(machine, "torch", "1.0+cu130")
    monkeypatch.setattr(sys, "path", [str(machine)])
    found = offline.visible_from(site)
    wanted = requirements("client>=1", "torch>=2", "some_name>=5")
    problems = offline.unmet(wanted, found, {"client"})
    assert problems == [
        "date 4.0 does not fit: client 1.5 needs date<3",
        "http 2.9 does not fit: client 1.5 needs http>=3",
        "some-name is missing: isthmus needs some_name>=5",
        "torch 1.0+cu130 does not fit: isthmus needs torch>=2",
    ]
    assert offline.advice(problems) == (
        'run `make wheels ARGS="--bring date,http,some-name"` on a machine with network, and install again; '
        "use a machine, or an image, with another torch: it is too large to bring along"
    )
    assert offline.unmet(requirements("client>=1"), found, set()) == []


def test_a_local_version_of_torch_fits(offline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "torch", "2.11.0+cu130")
    monkeypatch.setattr(sys, "path", [])
    assert offline.unmet(requirements("torch>=2.4"), offline.visible_from(tmp_path), set()) == []


def test_the_environment_of_the_tests_meets_what_is_declared(offline: Any, tmp_path: Path) -> None:
    assert offline.unmet(offline.declared(), offline.visible_from(tmp_path), set()) == []
