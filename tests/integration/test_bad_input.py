"""A wrong flag, a missing run or an unreachable server ends a command with one line of error and exit code 2.

unit/test_patience.py shows in virtual time that this error comes soon.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.test_processes import isthmus
from isthmus_services.main import main
from isthmus_services.servers import Server, redis_server

CLOSED = "127.0.0.1:9"


@dataclass
class Refusals:
    """Runs `main` in this process and returns its one line of error."""

    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def __call__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
        self.capsys.readouterr()
        with self.monkeypatch.context() as patch:
            patch.setattr("isthmus_services.process.logs.configure", lambda *_, **__: None)
            for name, value in (environment or {}).items():
                patch.setenv(name, value)
            try:
                code: object = main(list(arguments))
            except SystemExit as ended:
                code = ended.code
        error = self.capsys.readouterr().err
        assert code == 2, error
        (line,) = error.splitlines()
        return line


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refusals:
    return Refusals(capsys, monkeypatch)


def refused_by_process(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the one line of text with which a process rejects its input; its log has one JSON object per event."""
    done = isthmus(*arguments, environment=environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert not [e for e in events if e["level"] in ("CRITICAL", "ERROR")]
    (error,) = (line for line in lines if not line.startswith("{"))
    assert error.startswith(f"isthmus {arguments[0]}: ")
    return error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--steps", "0"], "--steps 0: must be at least 1"),
        (["demo", "--learners", "x"], "--learners x: must be a whole number"),
        (["status", "run", "--json"], "argument --json: expected one argument, a path, or - for stdout"),
        (["demo", "--codec", "int3"], "--codec int3: choose one of f32, bf16, int8, int4"),
        (["demo", "--kill-every", "-1"], "--kill-every -1: must be more than 0"),
        (["demo", "--data", "/nonexistent/text"], "--data /nonexistent/text: there is no such file"),
        (["demo", "--learners", "100000"], "too little text for 100000 shards"),
        (["demo", "--bus", "mailto:x"], "a bus is redis://host:port, sqlite:///path or store: (the run's own store)"),
        (["learner", "nowhere", "--bus", "store:x"], "isthmus learner: --bus store:x: nothing may follow store:"),
        (["syncer", "nowhere", "--bus", "store://"], "isthmus syncer: --bus store://: nothing may follow store:"),
        (["demo", "--outer-momentum", "1.0"], "--outer-momentum 1.0: must be less than 1"),
        (["demo", "--outer-lr", "nan"], "--outer-lr nan: must be "),
        (["init", "x", "--quorum", "0"], "isthmus init: --quorum 0: must be at least 1"),
        (["init", "x", "--staleness", "65"], "--staleness 65: must be at most 64"),
        (["init", "x", "--sync-every", "0"], "--sync-every 0: must be at least 1"),
        (["syncer", "nowhere", "--quorum", "0"], "isthmus syncer: --quorum 0: must be at least 1"),
        (["syncer", "nowhere", "--grace", "1.5"], "--grace 1.5: must be at most 1"),
        (["syncer", "nowhere", "--heartbeat", "0"], "--heartbeat 0: must be more than 0"),
        (["init", "x", "--heartbeat", "5", "--silence", "2"], "not longer than the heartbeat"),
        (["demo", "--servers", "--store", "x"], "remove --store and --bus"),
        (["frobnicate"], "isthmus: there is no command frobnicate (see isthmus --help)"),
        (["statsu"], "isthmus: there is no command statsu: did you mean status?"),
        (["goodput"], "there is no command goodput: did you mean simulate goodput?"),
        (["simulate", "trainig"], "isthmus simulate: there is no command trainig: did you mean training?"),
        (["plan", "--parms", "2.9e9"], "isthmus plan: there is no flag --parms: did you mean --params?"),
        (["simulate", "bandwidth", "--parms=1e9"], "there is no flag --parms: did you mean --params?"),
        (["board", "nowhere", "--port", "80"], "there is no flag --port: did you mean --http HOST:PORT?"),
        (["syncer", "nowhere", "--host=x"], "there is no flag --host: did you mean --http HOST:PORT?"),
        (["status", "nowhere", "--zzz"], "isthmus status: there is no flag --zzz (see isthmus status --help)"),
        (["status", "nowhere", "and", "more"], "unrecognized arguments: and more"),
        ([], "required"),
        (["init", "x", "--model", "no.such.module:f"], "--model no.such.module:f"),
        (["init", "x", "--model", "json"], "write it as PACKAGE.MODULE:FUNCTION"),
        (["init", "x", "--model", "json:nothing"], "has no nothing"),
        (["init", "x", "--model", "platform:node"], "not a torch.nn.Module"),
        (["init", "ftp://host/run"], "not in ftp://"),
        (["init", "x", "--fragments", "0"], "fragments"),
        (["learner", "nowhere", "--learner", "a"], "no run at"),
        (["learner", "nowhere"], "--learner"),
        (["learner", "nowhere", "--learner", "a", "--shard", "3/2"], "--shard 3/2"),
        (["learner", "nowhere", "--learner", "a", "--train", "x:y"], "--train x:y"),
        (["syncer", "nowhere"], "no run at"),
        (["syncer", "nowhere", "--name", "a b"], "--name 'a b'"),
        (["status", "nowhere"], "no run at"),
        (["learner", "nowhere", "--learner", "a", "--checkpoint", "0"], "--checkpoint 0"),
        (["replay", "nowhere"], "no run at"),
        (["explain", "nowhere", "0/1"], "no run at"),
        (["export", "nowhere", "-o", "m.safetensors"], "no run at"),
        (["export", "nowhere"], "-o"),
        (
            ["init", "x", "--merge", "rda", "--iso-block", "512"],
            "--iso-block 512 is for --merge iso, and --merge rda cuts",
        ),
        (["plan", "--params", "1e9", "--merge", "avg", "--iso-block", "8"], "--iso-block 8 is for --merge iso"),
        (["gc", "nowhere"], "no run at"),
        (["gc", "nowhere", "--keep", "0"], "--keep 0: must be at least 1"),
        (["gc", "nowhere", "--min-age", "-1"], "--min-age -1"),
        (["init", "x", "--from", "nothing.safetensors"], "nothing.safetensors cannot be read"),
    ],
)
def test_a_wrong_flag_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refusals
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    ("environment", "file", "message"),
    [
        ({"ISTHMUS_QUORUM": "0"}, "", "isthmus syncer: ISTHMUS_QUORUM 0: must be at least 1"),
        ({}, "[syncer]\nquorum = 0", "i.toml [syncer], quorum 0: must be at least 1"),
        ({}, "overlap = -1.0", "i.toml, overlap -1.0: must be at least 0"),
        ({}, 'quorum = "two"', "i.toml, quorum two: must be a whole number"),
        ({}, "quorum = 1.5", "i.toml, quorum 1.5: must be a whole number"),
        ({}, "run = 3", "i.toml, run 3: must be text"),
        ({}, "[syncr]\nquorum = 2", "there is no command [syncr]: did you mean [syncer]?"),
        ({}, "[simulate.godput]\nseed = 2", "there is no command [simulate.godput]: did you mean [simulate.goodput]?"),
        ({}, "qourum = 2", "unknown setting qourum: did you mean quorum?"),
    ],
)
def test_a_value_out_of_range_is_one_line_whatever_its_source(
    environment: dict[str, str],
    file: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "i.toml").write_text(file)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["syncer", *([] if "run = " in file else ["nowhere"]), "--config", "i.toml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("command", [["syncer"], ["learner", "--learner", "a"], ["status"]])
def test_why_a_process_does_not_start_is_text_in_a_pipe(command: list[str], tmp_path: Path) -> None:
    name, *rest = command
    logged = [] if name == "status" else ["--log-format", "json"]
    line = refused_by_process(name, str(tmp_path / "nowhere"), *rest, *logged)
    assert line.startswith(f"isthmus {name}: no run at {tmp_path}/nowhere: check the URL")


@pytest.mark.parametrize(
    "command",
    [
        ["status", "OUT"],
        ["syncer", "OUT"],
        ["learner", "OUT", "--learner", "a"],
        ["replay", "OUT"],
        ["explain", "OUT", "0/1"],
        ["export", "OUT", "-o", "m.safetensors"],
        ["gc", "OUT"],
        ["heal", "OUT"],
        ["simulate", "goodput", "--check", "OUT"],
        ["status", "file:OUT"],
    ],
)
def test_a_folder_that_holds_a_run_names_it(
    command: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refusals
) -> None:
    monkeypatch.chdir(tmp_path)
    out = folder.parent
    assert main(["init", str(folder)]) == 0
    assert folder.name == "run", "this test needs the folder name that `isthmus demo` uses"
    line = refused(*(word.replace("file:OUT", f"file://{out}").replace("OUT", str(out)) for word in command))
    assert line.endswith(f"{out}: no run here; did you mean {folder}?")


def test_no_run_is_created_around_another(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(folder)]) == 0
    before = sorted(folder.parent.iterdir())
    assert main(["init", str(folder.parent)]) == 2
    assert f"this location already contains a run, {folder}" in capsys.readouterr().err
    assert sorted(folder.parent.iterdir()) == before


def test_the_version_is_a_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"isthmus \d+\.\d+\.\d+(\.dev\d+)?, Python 3\.\d+\.\d+, torch \S+", line)


def test_a_run_keeps_what_was_chosen_when_it_was_created(folder: Path) -> None:
    assert main(["init", str(folder), "--merge", "rda", "--outer-lr", "0.3"]) == 0
    assert main(["init", str(folder)]) == 0, "without other rules, `init` must accept the existing run"


def test_a_second_init_says_that_it_changed_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["init", str(folder)]) == 0
    assert not caplog.messages
    assert main(["init", str(folder)]) == 0
    (said,) = caplog.messages
    assert re.fullmatch(rf"{folder} exists already, created 20\d\d-.*: it was not changed", said)


@pytest.mark.parametrize("command", ["heal", "status"])
def test_json_alone_goes_to_stdout_and_text_to_stderr(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(folder)]) == 0
    capsys.readouterr()
    assert main([command, str(folder), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["fragments"]) > 1
    assert "fragment" in err
    assert not Path("-").exists()
    print("later")
    assert capsys.readouterr().out == "later\n"


def test_a_learners_name_is_checked(folder: Path, refused: Refusals) -> None:
    assert main(["init", str(folder)]) == 0
    assert "--learner 'a/b'" in refused("learner", str(folder), "--learner", "a/b")


def test_another_run_in_the_same_place_is_refused(folder: Path, refused: Refusals) -> None:
    assert main(["init", str(folder)]) == 0
    assert "merge is iso there, not avg" in refused("init", str(folder), "--merge", "avg")
    assert "outer_lr is 1.1 there, not 0.5" in refused("init", str(folder), "--outer-lr", "0.5")
    assert "already holds a run" in refused("demo", "--store", str(folder), "--steps", "1")


@pytest.mark.parametrize("command", [["init"], ["syncer"], ["status"], ["learner", "--learner", "a"]])
def test_a_missing_bucket_is_named(
    command: list[str], seaweedfs: Server, redis: Server, use: Callable[[Server], None], refused: Refusals
) -> None:
    use(seaweedfs)
    name, *rest = command
    bus = [] if name == "init" else ["--bus", redis.url]
    line = refused(name, "s3://no-such-bucket/run", *rest, *bus)
    assert "s3://no-such-bucket/run at http://127.0.0.1" in line
    assert "there is no such bucket (NoSuchBucket): check its name and the endpoint (AWS_ENDPOINT_URL); `" in line
    assert "`isthmus init s3://no-such-bucket/run --create-bucket` creates it, with a run of the built-in model" in line
    assert "add --model PACKAGE.MODULE:FUNCTION" in line


def test_a_missing_bucket_that_no_bucket_of_aws_can_be_called_is_named(
    seaweedfs: Server, use: Callable[[Server], None], refused: Refusals
) -> None:
    use(seaweedfs)
    assert "check its name (in AWS it has 3 to 63 of a-z, 0-9, dots and hyphens) and the" in refused(
        "status", "s3://No_Such/run", "--bus", "redis://127.0.0.1:1"
    )


@pytest.mark.parametrize("command", [["init"], ["syncer"], ["learner", "--learner", "a"]])
def test_an_endpoint_that_does_not_answer_is_named(
    command: list[str], seaweedfs: Server, redis: Server, use: Callable[[Server], None], refused: Refusals
) -> None:
    use(seaweedfs)
    name, *rest = command
    bus = [] if name == "init" else ["--bus", redis.url]
    line = refused(name, "s3://b/r", *rest, *bus, environment={"AWS_ENDPOINT_URL": f"http://{CLOSED}"})
    assert f"at http://{CLOSED}: connection refused: start the store there, or correct the endpoint" in line


def test_an_endpoint_with_another_name_or_scheme_is_named(
    seaweedfs: Server, use: Callable[[Server], None], refused: Refusals
) -> None:
    use(seaweedfs)
    line = refused("init", "s3://b/r", "--insecure", environment={"AWS_ENDPOINT_URL": "http://store.invalid:9000"})
    assert re.search(r"its name cannot be resolved \(.+\): correct the endpoint", line)
    line = refused("init", "s3://b/r", environment={"AWS_ENDPOINT_URL": seaweedfs.url.replace("http:", "https:")})
    assert "it does not speak TLS: write http:// in the endpoint" in line


@pytest.mark.parametrize("place", ["/proc/nowhere", f"{__file__}/run"])
def test_a_folder_that_cannot_be_made_is_named(place: str, refused: Refusals) -> None:
    assert f"{place} is not writable" in refused("init", place)


@pytest.mark.parametrize("command", [["init"], ["syncer"], ["learner", "--learner", "a"]])
def test_an_endpoint_that_accepts_and_never_answers_is_named(
    command: list[str], seaweedfs: Server, redis: Server, use: Callable[[Server], None], refused: Refusals
) -> None:
    import socket

    use(seaweedfs)
    name, *rest = command
    bus = [] if name == "init" else ["--bus", redis.url]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        line = refused(name, "s3://bucket/run", *rest, *bus, environment={"AWS_ENDPOINT_URL": endpoint})
    assert "no answer within 2.5 s" in line


def test_another_pace_for_a_run_that_is_there_is_no_silent_wish(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(folder)]) == 0
    assert main(["init", str(folder), "--overlap", "2"]) == 0, "the run already has this pace"
    assert main(["init", str(folder), "--overlap", "10"]) == 2
    assert "the run exists already and keeps its pace" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["syncer"], ["learner", "--learner", "a"]])
def test_a_redis_that_is_not_there_is_named(command: list[str], folder: Path, refused: Refusals) -> None:
    assert main(["init", str(folder)]) == 0
    name, *rest = command
    line = refused(name, str(folder), *rest, "--bus", f"redis://{CLOSED}")
    assert f"redis://{CLOSED}" in line
    assert "): check that a server of the bus is started there, and that it is reachable" in line


@pytest.mark.parametrize("command", [["syncer"], ["learner", "--learner", "a"], ["status"]])
def test_a_redis_that_asks_for_a_password_is_named(
    command: list[str], folder: Path, tmp_path: Path, refused: Refusals
) -> None:
    assert main(["init", str(folder)]) == 0
    with redis_server(tmp_path / "redis", arguments=("--save", "", "--requirepass", "sesame")) as server:
        name, *rest = command
        assert "asks for a password" in refused(name, str(folder), *rest, "--bus", server.url)


def test_a_store_without_conditional_put_is_refused(refused: Refusals) -> None:
    """Some servers ignore If-None-Match."""
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    objects: dict[str, bytes] = {}

    class Careless(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"any"')
            self.send_header("Last-Modified", "Mon, 23 Nov 2026 12:00:00 GMT")
            if status == 206:
                self.send_header("Content-Range", f"bytes 0-{len(body) - 1}/{len(body)}")
            self.end_headers()
            self.wfile.write(body)

        def do_PUT(self) -> None:
            if "chunked" in self.headers.get("Content-Encoding", ""):
                raise AssertionError("not expected")
            objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(200)

        def do_GET(self) -> None:
            found = objects.get(self.path)
            missing = b"<Error><Code>NoSuchKey</Code></Error>"
            self.answer(206 if found is not None else 404, missing if found is None else found)

        def do_DELETE(self) -> None:
            objects.pop(self.path, None)
            self.answer(204)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Careless)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
        }
        assert "does not honour create-only PUT" in refused("init", "s3://bucket/run", environment=environment)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_mistyped_folder_names_the_run_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "mine")]) == 0
    for name, meant in (("mien", "mine"), ("mine2", "mine"), ("yours", "")):
        capsys.readouterr()
        assert main(["status", str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert (f"no run at {tmp_path / name} (did you mean {tmp_path / meant}?): check" in said) == bool(meant), said
        assert not (tmp_path / name).exists()
        assert main(["init", str(tmp_path / name)]) == 0, "a like name is a name"
        shutil.rmtree(tmp_path / name)
