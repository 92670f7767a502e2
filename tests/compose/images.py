"""Images for the engine: from their registries, or, where these cannot be reached, stand-ins with the same commands.

A stand-in is made of Debian's packages and of wheels. The report names each.
"""

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from compose.engine import CACHE, ROOT, STAND_IN, SUITE, Engine, debian
from isthmus_services.processes import end, tied
from isthmus_services.servers import weed_binary

PYTHON = "python:3.11-slim-bookworm"
SERVERS, GRAFANA = "isthmus-test/servers:1", "isthmus-test/grafana:1"
PORT = 8099
"""Where wheels are served to the build, on the engine's own bridge."""


@dataclass
class Images:
    """What compose.yaml is run with."""

    environment: dict[str, str] = field(default_factory=dict)
    """Variables that name stand-ins."""
    files: list[str] = field(default_factory=lambda: ["compose.yaml"])
    stand_ins: list[tuple[str, str]] = field(default_factory=list)
    """The images that could not be had, each with what stands in for it."""


@contextmanager
def images(found: Engine) -> Iterator[Images]:
    """Yield the images of compose.yaml. While they are, the image of Isthmus can be built."""
    said = Images()
    wanted = _wanted()
    minio = found.has(wanted["OBJECT_STORE_IMAGE"])
    if not minio:
        said.files.append("infra/compose/seaweedfs.yaml")
    missing = [name for name, image in wanted.items() if name != "OBJECT_STORE_IMAGE" and not found.has(image)]
    if not minio and not found.has("chrislusf/seaweedfs:4.48"):
        missing.append("OBJECT_STORE_IMAGE")
    if any(name != "GRAFANA_IMAGE" for name in missing):
        _servers(found)
    # Every server in the stand-in is started by its own name. The image of Prometheus has that name as its entry point.
    names = {
        "REDIS_IMAGE": (SERVERS, f"Debian {SUITE}'s redis-server"),
        "PROMETHEUS_IMAGE": (f"{SERVERS}-prometheus", f"Debian {SUITE}'s prometheus"),
        "OBJECT_STORE_IMAGE": (SERVERS, "SeaweedFS, the wheel's program, with infra/compose/seaweedfs.yaml"),
        "GRAFANA_IMAGE": (GRAFANA, "a program that reads what Grafana is given and answers its health check"),
    }
    for name in missing:
        said.environment[name], what = names[name]
        said.stand_ins.append((wanted[name], what))
    if not minio and "OBJECT_STORE_IMAGE" not in missing:
        said.stand_ins.append((wanted["OBJECT_STORE_IMAGE"], "SeaweedFS's own image"))
    if found.has(PYTHON):
        if "GRAFANA_IMAGE" in missing:
            _grafana(found)
        yield said
        return
    said.stand_ins.append((PYTHON, "Debian bookworm's python3, which installs wheels that were downloaded before"))
    gateway = found.run(
        "docker", "network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}"
    ).stdout.strip()
    _python(found, gateway)
    if "GRAFANA_IMAGE" in missing:
        _grafana(found)
    serve = [sys.executable, "-m", "http.server", "--directory", str(wheels()), "--bind", gateway, str(PORT)]
    server = subprocess.Popen(tied([*found.network, *serve]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield said
    finally:
        end(server, 5.0)


def _wanted() -> Mapping[str, str]:
    """Return the images that compose.yaml names, by their variables, without Isthmus's own."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()
    named = (str(spec["image"]).removeprefix("${").removesuffix("}").partition(":-") for spec in services)
    return {variable: image for variable, _, image in named if variable != "ISTHMUS_IMAGE"}


def wheels() -> Path:
    """Return the folder of the wheels that the image installs, downloaded for its Python."""
    folder = CACHE / "wheels"
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = text["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["torch"], *text["build-system"]["requires"]]
    # Debian's Python 3.11.2 needs async-timeout for redis, which Python 3.11.3 does not.
    needed += ["setuptools", "wheel", "async-timeout"]
    wanted = "\n".join(needed) + (ROOT / "constraints.txt").read_text()
    made = CACHE / "wheels.made"
    if made.exists() and made.read_text() == wanted:
        return folder
    print(f"downloading wheels into {folder.relative_to(ROOT)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    tags = ["manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1"]
    platforms = [word for tag in tags for word in ("--platform", f"{tag}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", "3.11", *platforms, "-c", "constraints.txt", *needed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    made.write_text(wanted)
    return folder


def _python(found: Engine, gateway: str) -> None:
    tree = debian(CACHE / "python", "bookworm", ("python3", "python3-pip", "python3-venv"))
    program = tree / "usr/local/bin/python"
    program.unlink(missing_ok=True)
    program.symlink_to("/usr/bin/python3")
    served = f"no-index = true\nfind-links = http://{gateway}:{PORT}/\ntrusted-host = {gateway}\n"
    (tree / "etc/pip.conf").write_text(f"[global]\n{served}")
    _import(found, tree, PYTHON)


def _servers(found: Engine) -> None:
    """Import Debian's servers and SeaweedFS as one image, if it is not there, and a second one that is Prometheus."""
    if found.here(f"{SERVERS}-prometheus") is not None:
        return
    tree = debian(CACHE / "servers", SUITE, ("redis-server", "prometheus", "busybox"))
    wget = tree / "usr/local/bin/wget"
    wget.unlink(missing_ok=True)
    wget.symlink_to("/usr/bin/busybox")
    shutil.copy2(weed_binary(), tree / "usr/local/bin/weed")
    _import(found, tree, SERVERS)
    _import(found, tree, f"{SERVERS}-prometheus", "--change", 'ENTRYPOINT ["prometheus"]')


def _grafana(found: Engine) -> None:
    folder = CACHE / "grafana"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(Path(__file__).parent / "grafana.py", folder)
    # Compose asks for Grafana's health by this program.
    (folder / "wget").write_text("#!/usr/bin/env python\nimport sys, urllib.request as u\nu.urlopen(sys.argv[-1])\n")
    copy = "COPY grafana.py /\nCOPY --chmod=755 wget /usr/local/bin/\n"
    (folder / "Dockerfile").write_text(f'FROM {PYTHON}\n{copy}ENTRYPOINT ["python", "/grafana.py"]\n')
    found.run("docker", "build", "-q", "-t", GRAFANA, str(folder))


def _import(found: Engine, tree: Path, name: str, *arguments: str) -> None:
    """Import a folder as an image that is marked as a stand-in, if there is none of this name."""
    if found.here(name) is not None:
        return
    print(f"importing {name}", flush=True)
    packed = CACHE / "image.tar"
    subprocess.run(["tar", "-C", str(tree), "-cf", str(packed), "."], check=True)
    found.run("docker", "import", "--change", f"LABEL {STAND_IN}={name}", *arguments, str(packed), name)
    packed.unlink()
