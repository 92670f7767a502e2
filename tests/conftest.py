"""Real servers for the tests, started once per session on free loopback ports and stopped at its end."""

import gc
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from isthmus.codecs import kernels
from isthmus.errors import InputError
from isthmus_services.servers import Server, redis_server, s3_server
from release import pythons
from support import reaper, tiers
from support.azure import azure_server

if TYPE_CHECKING:
    import torch

AWS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}

os.environ.pop("COLUMNS", None)  # it would set the width of tables, which tests read

WAITING = 2
"""Workers per core: many tests wait for processes more than they compute."""

BY_FILE = ("docs", "infra", "integration")
"""In these directories each file runs on one worker: its tests share servers that take seconds to start and to stop."""

# Tests that start many processes, or that share something slow to make. The tests of a group run one after the other on
# one worker, so that they do not kill each other's processes or use all cores at once.
GROUPS = {
    **dict.fromkeys(  # traffic is measured once per process
        ("unit/test_plan.py", "unit/test_plan_choices.py", "unit/test_plan_merged.py", "unit/test_compare.py"), "plans"
    ),
    "unit/test_cuda.py": "cuda",  # the simulator of the GPU runs once per process
    "advice/test_doctor_bus.py": "doctor of buses",
    "advice/test_doctor_run.py": "doctor of runs",
    "advice/test_doctor_store.py": "doctor of stores",
    "e2e/test_processes.py": "processes",
    "e2e/test_board.py": "board",
    "e2e/test_create.py": "create",
    "chaos/test_chaos.py": "chaos",
    "docs/test_site.py": "site",
    "gpu/test_ranks.py": "gpu ranks",  # the expected results are made once per process
    "infra/test_compose.py": "compose",
    "infra/test_slurm.py": "slurm",
    "infra/test_skypilot.py": "skypilot",
    "e2e/test_replay.py": "replay",
    "e2e/test_least_privilege.py": "least privilege",
    "integration/test_permissions.py": "permissions",
    "release/test_built.py": "release",
    "release/test_made.py": "release",
    "release/test_installed.py": "release",
}


class Grouped(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives each group to one worker, and other tests to any free worker. (xdist's own groups fail on pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0].removeprefix("tests/")
        return GROUPS.get(file, file if file.startswith(BY_FILE) else nodeid)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--tier`."""
    parser.addoption(
        "--tier", choices=tiers.TIERS, default="all", help="run the tests up to this tier (support/tiers.py)"
    )


def pytest_configure() -> None:
    """Kill every process that the tests have started when this process ends, however it ends."""
    reaper.watch()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import directories without a test in the tier."""
    return True if tiers.is_above(collection_path, config.getoption("tier")) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of higher tiers, and those that need a GPU unless they are asked for."""
    items[:], others = tiers.split(items, config.getoption("tier"))
    if not config.getoption("markexpr"):  # `make gpu` requests them by -m gpu
        others += [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    if others:
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection: with them each collection takes a third of a second."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    """Return which Pythons the tests of the wheel use, and which are missing."""
    return pythons.said()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of workers for `-n auto` and `-n logical`."""
    share = 1.0 if config.getoption("tier") == "check" else WAITING  # tests of the first tier only compute
    return max(2, round(share * len(os.sched_getaffinity(0))))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Grouped:
    """Distribute the tests by group."""
    return Grouped(config, log)


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Compile the kernels before any timeout of a test runs."""
    kernels.warm()


@pytest.fixture(autouse=True)
def _log_of_each_test() -> Iterator[None]:
    """Remove the handlers that commands run in the test have set: their streams are closed when the test is over."""
    root = logging.getLogger()
    level = root.level
    yield
    for handler in [h for h in root.handlers if type(h) is logging.StreamHandler]:
        root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Let torchao step as it is written: what it keeps is the same, and to compile each step takes ten seconds."""
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="session")
def cuda() -> None:
    """Skip the test if there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> "torch.device":
    """Return the device of a test: the CPU, and also a GPU if GPU tests are requested."""
    import torch

    if request.param == "cuda":
        request.getfixturevalue("cuda")
    return torch.device(request.param)


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a real Redis."""
    try:
        with redis_server(tmp_path_factory.mktemp("redis")) as server:
            yield server
    except InputError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a real S3 server."""
    try:
        with s3_server(tmp_path_factory.mktemp("s3")) as server:
            yield server
    except InputError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """Start moto, which imitates AWS's S3. Its create-only PUT looks and writes in two steps. Here no other PUT runs
    between them."""
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    writing, put_object = threading.Lock(), S3Response.put_object

    def put_alone(self: S3Response) -> object:
        with writing:
            return put_object(self)

    S3Response.put_object = put_alone  # type: ignore[method-assign, assignment]
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    # A client that hangs up is no news; its traceback would get among what a command prints meanwhile.
    server._server.handle_error = lambda *_: None  # type: ignore[union-attr, method-assign]
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    yield Server(url, None, {**AWS, "AWS_ENDPOINT_URL": url})  # type: ignore[arg-type]
    server.stop()
    S3Response.put_object = put_object  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start Azurite, Microsoft's emulator of Azure Blob Storage. Its one account is named in its source."""
    if (program := shutil.which("azurite-blob")) is None:
        if os.environ.get("ISTHMUS_REQUIRE_AZURITE"):
            pytest.fail("azurite-blob is not on PATH", pytrace=False)
        pytest.skip("no azurite-blob on PATH (npm install --global azurite): az:// is not tried on a server")
    try:
        with azure_server(program, tmp_path_factory.mktemp("azure")) as server:
            yield server
    except InputError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Server], None]:
    """Point the environment of the stores' clients at a server."""

    def point(server: Server) -> None:
        for name in [n for n in os.environ if n.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
            monkeypatch.delenv(name)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)

    return point


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a place for a run."""
    return tmp_path / "run"
