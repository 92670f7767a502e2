"""Bring isthmus to a machine that has a GPU but no network.

`collect` downloads, on a machine with network, the wheels that the GPU machine lacks. `install` installs them there,
and isthmus from this source tree, into one folder, without network. Then `PYTHONPATH` names that folder:

    make wheels                                                # here: fills build/wheels
    python3 tools/offline.py install --into /tmp/site          # there, in the copied source tree
    export PYTHONPATH=/tmp/site

torch is never collected: a CUDA build is larger than anything that is copied, and belongs to the machine.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / "build/wheels"
MIB = 2**20

TESTS = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")
"""What the tests need on a GPU machine, beyond what isthmus needs: the names in the extra `dev`."""


def names(text: str) -> frozenset[str]:
    """Return the package names in a list with commas or spaces, normalised."""
    return frozenset(str(canonicalize_name(name)) for name in re.split(r"[,\s]+", text) if name)


HAS = names("""
    torch triton filelock fsspec jinja2 markupsafe mpmath networkx setuptools sympy typing-extensions
    numpy numba llvmlite
    matplotlib contourpy cycler fonttools kiwisolver packaging pillow pyparsing
    pytest pytest-cov pytest-timeout pytest-xdist coverage execnet hypothesis iniconfig pluggy pygments sortedcontainers
    attrs certifi charset-normalizer idna requests urllib3 pyyaml tqdm safetensors psutil
    msgpack prometheus-client rich markdown-it-py mdurl pip wheel
""")
"""What an image with PyTorch for CUDA has, by purpose: torch, arrays, pictures, tests, data, and services.

`collect` leaves these packages out. It brings along a package that such an image may lack, and one that the image may
hold in a version that another collected package does not accept (aiohttp, python-dateutil).
"""

IMPORTS = """
from importlib.metadata import entry_points
import isthmus, isthmus_services, isthmus_lab, isthmus_services.main
for command in entry_points(group="isthmus.commands"):
    command.load()
"""
"""What the installed isthmus must be able to import: its packages, and the commands found by entry point."""


@dataclass(frozen=True)
class Target:
    """The machine that the wheels are for: its Python, and the newest manylinux tag that it accepts."""

    python: str
    glibc: int
    machine: str

    @classmethod
    def parse(cls, python: str, platform: str) -> "Target":
        """Return the target of `--python` and `--platform`. Exits if either is malformed."""
        tag = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", platform)
        if tag is None:
            sys.exit(f"offline: --platform {platform}: give the newest tag it accepts, such as manylinux_2_35_x86_64")
        if not re.fullmatch(r"3\.\d+", python):
            sys.exit(f"offline: --python {python}: give a version such as 3.12")
        return cls(python, int(tag[1]), tag[2])

    @property
    def pip_arguments(self) -> list[str]:
        """Return the arguments that make pip choose wheels for this machine."""
        # pip compares tags exactly, so every older one is named. It prefers those that are named first.
        tags = [f"manylinux_2_{minor}_{self.machine}" for minor in range(self.glibc, 4, -1)]
        tags += [f"{old}_{self.machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1")]
        platforms = [argument for tag in tags for argument in ("--platform", tag)]
        return ["--only-binary=:all:", "--implementation", "cp", "--python-version", self.python, *platforms]

    @property
    def markers(self) -> dict[str, str]:
        """Return the values that environment markers have on this machine."""
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }


@dataclass(frozen=True)
class Release:
    """One version of a package, and what this version requires."""

    version: str
    requires: tuple[str, ...]


def pip(*arguments: str, environment: Mapping[str, str] | None = None, hint: str) -> None:
    """Run this Python's pip. If pip fails, exit with its errors and the hint."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **(environment or {})}, text=True, capture_output=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"offline: pip {arguments[0]} failed: {hint}\n{done.stdout}{done.stderr}")


def declared() -> list[Requirement]:
    """Return what pyproject.toml requires to run isthmus with torch, to test it and to build it."""
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = text["project"]["optional-dependencies"]
    tests = [r for r in extras["dev"] if Requirement(r).name in TESTS]
    every = [*text["project"]["dependencies"], *extras["torch"], *tests, *text["build-system"]["requires"]]
    return [Requirement(r) for r in every]


def applies(requirement: Requirement, extras: Iterable[str], markers: Mapping[str, str] | None = None) -> bool:
    """Return whether a requirement holds for these extras, with these markers or those of the running Python."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**(markers or {}), "extra": e}) for e in ("", *extras))


def needed(
    wanted: Iterable[Requirement], releases: Mapping[str, Release], has: AbstractSet[str], markers: Mapping[str, str]
) -> tuple[set[str], list[Requirement]]:
    """Return the names to bring along, and the requirements that `releases` does not hold.

    A name in `has` is left out, and so is what only such names require.
    """
    bring, unknown, seen = set(), [], set()
    queue = [r for r in wanted if applies(r, (), markers)]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name in has or str(requirement) in seen:
            continue
        seen.add(str(requirement))
        if name not in releases:
            unknown.append(requirement)
            continue
        bring.add(str(name))
        requires = map(Requirement, releases[name].requires)
        queue += [r for r in requires if applies(r, requirement.extras, markers)]
    return bring, unknown


def resolve(wanted: list[Requirement], has: AbstractSet[str], target: Target) -> dict[str, str]:
    """Return the version of each package to bring along, as pip resolves them within constraints.txt."""
    asked = [r for r in wanted if canonicalize_name(r.name) not in has and applies(r, (), target.markers)]
    while asked:
        releases = resolved_by_pip(asked, target)
        bring, unknown = needed(wanted, releases, has, target.markers)
        if not unknown:
            return {name: releases[name].version for name in sorted(bring)}
        # pip evaluates markers for the Python that runs it. What the target alone requires is added by name.
        asked += unknown
    return {}


def resolved_by_pip(asked: Iterable[Requirement], target: Target) -> dict[str, Release]:
    """Return what pip would install for these requirements, whatever their markers say."""
    plain = []
    for requirement in asked:
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        plain.append(f"{requirement.name}{extras}{requirement.specifier}")
    with tempfile.TemporaryDirectory(prefix="offline-") as folder:
        report = Path(folder) / "report.json"
        options = ("--dry-run", "--quiet", "--ignore-installed", "--target", folder, "--report", str(report))
        constraints = ("--constraint", str(ROOT / "constraints.txt"))
        hint = "a requirement has no wheel for this Python and platform, or the package index does not answer"
        pip("install", *options, *constraints, *target.pip_arguments, *plain, hint=hint)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {canonicalize_name(m["name"]): Release(m["version"], tuple(m.get("requires_dist", ()))) for m in found}


def wheels_in(folder: Path) -> dict[str, Path]:
    """Return the wheel of each package in a folder. Exits if a package has two."""
    wheels: dict[str, Path] = {}
    for file in sorted(folder.glob("*.whl")):
        name = str(parse_wheel_filename(file.name)[0])
        if name in wheels:
            sys.exit(f"offline: {folder} holds {wheels[name].name} and {file.name}: delete one, or run `make wheels`")
        wheels[name] = file
    return wheels


def table(wheels: Mapping[str, Path]) -> Iterator[str]:
    """Yield one line per wheel with its package, version and size, and a line with the sum."""
    total = sum(file.stat().st_size for file in wheels.values())
    for name, file in wheels.items():
        yield f"  {name:<24} {parse_wheel_filename(file.name)[1]!s:<16} {file.stat().st_size / MIB:6.2f} MiB"
    yield f"  {f'{len(wheels)} wheels':<24} {'':<16} {total / MIB:6.2f} MiB"


def check_limit(wheels: Mapping[str, Path], limit: float) -> None:
    """Exit if the wheels are together larger than the limit in MiB."""
    size = {name: file.stat().st_size / MIB for name, file in wheels.items()}
    if (total := sum(size.values())) > limit:
        largest = ", ".join(f"{name} {size[name]:.1f}" for name in sorted(size, key=size.__getitem__, reverse=True)[:3])
        sys.exit(
            f"offline: the wheels have {total:.1f} MiB, more than the limit of {limit:g} MiB (largest: {largest}): "
            "name what the machine already has with --has, or raise --limit"
        )


def collect(has: AbstractSet[str], bring: AbstractSet[str], target: Target, into: Path, limit: float) -> None:
    """Download the wheels that the target lacks into a folder, in place of the wheels that lie there."""
    if "torch" in bring:
        sys.exit(
            "offline: --bring torch: install torch on the machine itself; a CUDA build is too large to bring along"
        )
    wanted = declared()
    wanted += [Requirement(name) for name in bring - {canonicalize_name(r.name) for r in wanted}]
    versions = resolve(wanted, (has | {"torch"}) - bring, target)
    into.mkdir(parents=True, exist_ok=True)
    for old in into.glob("*.whl"):
        old.unlink()
    if versions:
        pins = [f"{name}=={version}" for name, version in versions.items()]
        options = ("--quiet", "--no-deps", "--dest", str(into))
        pip("download", *options, *target.pip_arguments, *pins, hint="does the package index answer?")
    wheels = wheels_in(into)
    print(f"{into}, for Python {target.python} on Linux with glibc 2.{target.glibc} or newer ({target.machine}):")
    print("\n".join(table(wheels)))
    check_limit(wheels, limit)


def unmet(wanted: Iterable[Requirement], installed: Mapping[str, Distribution], brought: AbstractSet[str]) -> list[str]:
    """Return one sentence for each requirement that the running Python does not meet, by package.

    The requirements of what was brought along are checked, too. What the machine had before is taken as consistent.
    """
    problems: dict[str, str] = {}
    seen = set()
    queue = [("isthmus", r) for r in wanted if applies(r, ())]
    while queue:
        dependent, requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if (name, str(requirement)) in seen:
            continue
        seen.add((name, str(requirement)))
        found = installed.get(name)
        if found is None:
            problems.setdefault(name, f"{name} is missing: {dependent} needs {requirement}")
            continue
        if not requirement.specifier.contains(found.version, prereleases=True):
            needs = f"{requirement.name}{requirement.specifier}"
            problems.setdefault(name, f"{name} {found.version} does not fit: {dependent} needs {needs}")
        if name in brought:
            label = f"{name} {found.version}"
            requires = map(Requirement, found.requires or ())
            queue += [(label, r) for r in requires if applies(r, requirement.extras)]
    return [problems[name] for name in sorted(problems)]


def advice(problems: Iterable[str]) -> str:
    """Return what to do about unmet requirements, given their sentences."""
    unfit = [problem.split()[0] for problem in problems]
    bring = ",".join(name for name in unfit if name != "torch")
    steps = [f'run `make wheels ARGS="--bring {bring}"` on a machine with network, and install again'] if bring else []
    if "torch" in unfit:
        steps.append("use a machine, or an image, with another torch: it is too large to bring along")
    return "; ".join(steps)


def visible_from(folder: Path) -> dict[str, Distribution]:
    """Return the distributions that Python finds with a folder in front of its path, as an import would."""
    found: dict[str, Distribution] = {}
    for distribution in distributions(path=[str(folder), *sys.path]):
        # A damaged installation on the machine may have no name; isthmus does not need such a package.
        if name := distribution.metadata["Name"]:
            found.setdefault(canonicalize_name(name), distribution)
    return found


def install(source: Path, into: Path) -> None:
    """Install the collected wheels, and isthmus from the source tree, into a folder, without network; check them."""
    began = time.monotonic()
    wheels = wheels_in(source)
    if not wheels:
        sys.exit(f"offline: no wheels in {source}: run `make wheels` on a machine with network, and copy them here")
    into = into.absolute()
    alone = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(into))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    again = f'if the wheels are for another Python, collect with `make wheels ARGS="--python {version}"`'
    pip("install", *alone, *map(str, wheels.values()), hint=again)
    problems = unmet(declared(), visible_from(into), wheels.keys())
    for problem in problems:
        print(f"offline: {problem}", file=sys.stderr)
    path = os.pathsep.join([str(into), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path}
    failed = f"isthmus cannot be built from {ROOT}: {advice(problems) or 'see below'}"
    pip("install", *alone, "--no-build-isolation", str(ROOT), environment=environment, hint=failed)
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(
        command, cwd=into, env={**os.environ, **environment}, text=True, capture_output=True, check=False
    )
    if done.returncode != 0:
        sys.exit(
            f"offline: isthmus is in {into}, but cannot be imported: {advice(problems) or 'see below'}\n{done.stderr}"
        )
    took = time.monotonic() - began
    print(f"isthmus and {len(wheels)} packages are in {into} ({took:.1f} s). To use them: export PYTHONPATH={into}")
    if problems:
        sys.exit(f"offline: {len(problems)} requirements are not met (above): {advice(problems)}")


def main() -> None:
    """Collect wheels, or install them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("collect", help="download the wheels that a GPU machine lacks (needs a package index)")
    one.add_argument("--python", default="3.12", help="Python on that machine (default: %(default)s)")
    one.add_argument(
        "--platform",
        default="manylinux_2_35_x86_64",
        help="newest manylinux tag that machine accepts; older ones are tried, too (default: %(default)s)",
    )
    one.add_argument(
        "--has",
        type=names,
        default=HAS,
        metavar="NAME,NAME",
        help="all that is installed there and left out (default: what an image with PyTorch for CUDA has)",
    )
    one.add_argument(
        "--bring", type=names, default=frozenset(), metavar="NAME,NAME", help="packages to bring along all the same"
    )
    one.add_argument("--into", type=Path, default=WHEELS, help="folder for the wheels (default: build/wheels)")
    one.add_argument("--limit", type=float, default=60, help="MiB that may be brought along (default: %(default)g)")
    two = commands.add_parser("install", help="install the wheels and isthmus into a folder, without network")
    two.add_argument("--from", dest="source", type=Path, default=WHEELS, help="folder with the wheels (build/wheels)")
    two.add_argument("--into", type=Path, required=True, help="folder to install into, for PYTHONPATH")
    given = parser.parse_args()
    if given.command == "collect":
        collect(given.has, given.bring, Target.parse(given.python, given.platform), given.into.absolute(), given.limit)
    else:
        install(given.source.absolute(), given.into)


if __name__ == "__main__":
    main()
