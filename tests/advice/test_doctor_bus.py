"""What `isthmus doctor` says of a bus, on real servers that are wrong in one way each."""

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from advice.doctors import Doctor, settings, small_run
from advice.rows import A_GAP, row
from advice.wire import wire
from infra import graph
from integration.test_full_store import IN_A_DISK_OF_ITS_OWN, own_mounts  # noqa: F401  (a fixture)
from isthmus.runtime.clock import Runtime
from isthmus.runtime.clock import threaded as right
from isthmus_services.commands import access
from isthmus_services.commands import doctor as command
from isthmus_services.main import main
from isthmus_services.processes import isthmus_command
from isthmus_services.servers import Server, free_ports, redis_server
from support.authority import Authority

GOOD = {"appendonly": "yes", "maxmemory": "64mb", "proto-max-bulk-len": "1mb"}


@contextmanager
def started(folder: Path, binary: str = "", **changed: str) -> Iterator[str]:
    """Run a Redis with good settings, some of them changed; yield its URL. An empty value leaves a setting out."""
    given = GOOD | {name.replace("_", "-"): value for name, value in changed.items()}
    words = tuple(word for name, value in given.items() if value for word in (f"--{name}", *value.split()))
    with redis_server(folder, arguments=words, binary=binary) as server:
        yield server.url


def ask(url: str, *words: Any) -> Any:
    """Send a Redis one command, as its operator does."""
    again = Retry(ConstantBackoff(0.1), 50)  # a server at its limit of clients has not yet noticed who left
    with closing(redis_client.Redis.from_url(url, retry=again)) as client:
        return client.execute_command(*words)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the place of a small run in a folder."""
    return small_run(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a Redis with good settings. The doctor waits for two seconds at one that takes values of any size."""
    words = [word for name, value in GOOD.items() for word in (f"--{name}", value)]
    with redis_server(tmp_path_factory.mktemp("redis"), arguments=tuple(words)) as server:
        yield server


@pytest.fixture(scope="module")
def redis_7() -> str:
    """Return a redis-server whose ACL tells reading from writing."""
    return graph.redis_7()


@pytest.fixture(scope="module")
def guarded(redis_7: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """A Redis with the ACL of `isthmus access`: a function that returns the URL of a user, or of the administrator."""
    folder = tmp_path_factory.mktemp("guarded")
    made = folder / "access"
    assert main(["access", str(made), "--run", "s3://bucket/run", "--learner", "eu-1"]) == 0
    acl = (made / access.ACL_FILE).read_text() + "user operator on >sesame ~* &* +@all\n"
    (made / access.ACL_FILE).write_text(acl)
    arguments = ("--aclfile", str(made / access.ACL_FILE), "--maxmemory", "64mb")
    settings_file = made / access.SETTINGS_FILE
    with redis_server(folder, binary=redis_7, settings=settings_file, arguments=arguments) as server:

        def of(user: str) -> str:
            password = "sesame" if user == "operator" else (made / user / access.BUS_PASSWORD).read_text().strip()
            return server.url.replace("redis://", f"redis://{user}:{password}@")

        yield of


# --- whether there is a bus -------------------------------------------------------------------------------------------


@row(
    "doctor", "bus: access: not tried: …, the folder of its file, does not exist yet",
    means="The run has not been created, so its embedded bus has no folder; or --bus names another folder.",
    do="correct --bus; or, if there is no run yet, run the doctor again once it is created", then="`ok bus: access`",
)  # fmt: skip
@row(
    "doctor", "store: run: no run at …",
    means="The place of the run can be reached, and there is no run: none was created, or a mount or disk is lost.",
    do="correct its address; or, if it is right and there never was a run, create it: isthmus init …; if there was one, bring it "
    "back (is a mount or a disk lost? its processes' logs say)",
    then="`ok store: run`, with the run's digest",
)  # fmt: skip
def test_a_bus_in_a_folder_to_come(doctor: Doctor, folder: Path) -> None:
    text = doctor.finds(str(folder))
    assert not folder.exists(), "the doctor does not create the folder"
    assert main(["doctor", str(folder)]) == 0, "before a run is created, the place can be checked"
    assert main(["doctor", str(folder), "--role", "reader"]) == 1, "whoever only reads needs a run"
    assert main(["init", *re.findall(r"create it: isthmus init ([^\s;]+)", text)]) == 0
    assert "ok      bus: access" in doctor.finds_no_more(str(folder))
    elsewhere = folder.parent / "elsewhere"
    for role in ("learner", "syncer", "reader"):
        assert main(["doctor", str(folder), "--role", role, "--bus", f"sqlite://{elsewhere}/bus"]) in (0, 1)
        assert not elsewhere.exists(), "the doctor makes no bus"


@row(
    "doctor", "bus: address: redis://…: Redis's client cannot read this URL: …",
    means="The URL of the bus has an option that Redis's client does not know, or a value that it cannot read.",
    do="correct --bus or ISTHMUS_BUS: redis://host:port", then="`ok bus: access`",
)  # fmt: skip
def test_an_address_of_no_bus(doctor: Doctor, run: str, redis: Server) -> None:
    doctor.finds(run, "--bus", f"{redis.url}?odd=1")
    doctor.finds_no_more(run, "--bus", redis.url)


@row(
    "doctor", "bus: access: redis://…: … connecting to …",
    means="No server answers at this address.",
    like="A firewall: then `bus: way` says `no answer` instead of `connection refused`.",
    do="correct --bus (rediss:// for TLS), or start the server that should answer there", then="`ok bus: access`",
)  # fmt: skip
@row(
    "doctor", "bus: way: …:… cannot be reached: …: connection refused",
    means="The name has an address, and nothing listens there.",
    do="start the server there, or let this machine through (routes, firewalls, security groups)",
    then="`ok bus: way`, with the route and its packet size",
)  # fmt: skip
def test_no_server(doctor: Doctor, run: str, tmp_path: Path) -> None:
    with started(tmp_path) as url:
        pass
    assert f"{url}: " in doctor.finds(run, "--bus", url)
    with redis_server(tmp_path, port=int(url.rpartition(":")[2])):
        doctor.finds_no_more(run, "--bus", url)


@row(
    "doctor", "bus: way: the name … cannot be resolved: …",
    means="No name server knows the host.",
    do="correct --bus, or give this name an address (DNS, or /etc/hosts)", then="`ok bus: way`, with the address",
)  # fmt: skip
def test_a_name_that_nobody_knows(doctor: Doctor, run: str, redis: Server) -> None:
    doctor.finds(run, "--bus", "redis://bus.invalid")
    doctor.finds_no_more(run, "--bus", redis.url)


@row(
    "doctor", "bus: access: sqlite://…: unable to open database file",
    means="The file of the embedded bus cannot be opened or written.",
    do="let this user write … and in … (SQLite keeps two more files beside it), on a local disk",
    then="`ok bus: access`",
)  # fmt: skip
def test_a_file_that_cannot_be_written(doctor: Doctor, run: str, tmp_path: Path) -> None:
    (tmp_path / "bus").mkdir()
    text = doctor.finds(run, "--bus", f"sqlite://{tmp_path}/bus")
    assert not re.search(r"bus: access.*\n.*(ACL|password|TLS|host)", text)
    (tmp_path / "bus").rmdir()
    doctor.finds_no_more(run, "--bus", f"sqlite://{tmp_path}/bus")


@row(
    "doctor", "bus: streams: sqlite://…: …: free space on its disk",
    means="The disk has no room for the file of the embedded bus, which the first message makes.",
    do="make room on the disk of … (df -h …): processes then go on by themselves. If …-wal is large, end all processes of the "
    "run and delete …, …-wal and …-shm: nothing is lost",
    then="`ok bus: streams`", lost=A_GAP,
)  # fmt: skip
@row(
    "doctor", "bus: access: sqlite://…: …: free space on its disk",
    means="The disk of the embedded bus is full. Learners train on, and rounds wait.",
    do="make room on the disk of … (df -h …): processes then go on by themselves. If …-wal is large, end all processes of the "
    "run and delete …, …-wal and …-shm: nothing is lost",
    then="`ok bus: access`", lost=A_GAP,
)  # fmt: skip
@pytest.mark.usefixtures("own_mounts")
@pytest.mark.tier("all")
def test_a_bus_on_a_disk_without_room(doctor: Doctor, run: str, tmp_path: Path) -> None:
    """SQLite finds no room for its tables at first, and then, as the file is there, for its index."""
    disk, isthmus = tmp_path / "disk", " ".join(isthmus_command())
    disk.mkdir()
    doctor_ = f"{isthmus} doctor {run} --bus sqlite://{disk}/bus --size 0.02"
    script = f"""
        mount -t tmpfs -o size=2m tmpfs {disk} || exit 99
        head -c 10M /dev/zero > {disk}/ballast 2> /dev/null
        {doctor_} > {tmp_path}/new
        rm {disk}/ballast; {doctor_} > {tmp_path}/roomy; head -c 10M /dev/zero > {disk}/ballast 2> /dev/null
        {doctor_} > {tmp_path}/old
        exit 0
    """
    done = subprocess.run([*IN_A_DISK_OF_ITS_OWN, "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = doctor.of({name: (tmp_path / name).read_text() for name in ("new", "old", "roomy")})
    assert "database or disk is full" in told.only("bus: streams").finds("new")
    assert "disk I/O error" in told.only("bus: access").finds("old")
    assert "ok      bus: access" in told.finds_no_more("roomy")


@row(
    "doctor", "bus: access: sqlite://…: file is not a database: delete …, …-wal and …-shm: processes make the bus anew, and nothing "
    "that was merged is lost",
    means="The file of the embedded bus is damaged. Nothing that it holds is needed.",
    do="do what this says: processes then go on by themselves", then="`ok bus: access`",
)  # fmt: skip
@row(
    "doctor", "bus: access: sqlite://…: it is a link to another file, and is not followed: remove it, or name that file",
    means="Whoever put the link there would choose the file that is written.",
    do="remove the link, or name the file that it leads to", then="`ok bus: access`",
)  # fmt: skip
def test_a_file_that_is_damaged_or_a_link(doctor: Doctor, run: str, tmp_path: Path) -> None:
    bus = tmp_path / "bus"
    words = (run, "--bus", f"sqlite://{bus}")
    bus.write_bytes(b"nonsense" * 1000)
    text = doctor.only("bus: access: sqlite://…: file").finds(*words)
    for path in re.findall(r"delete (\S+), (\S+) and (\S+):", text)[0]:
        Path(path).unlink(missing_ok=True)
    doctor.finds_no_more(*words)
    bus.rename(tmp_path / "other")
    bus.symlink_to(tmp_path / "other")
    doctor.only("bus: access: sqlite://…: it").finds(*words)
    doctor.finds_no_more(run, "--bus", f"sqlite://{bus.resolve()}")
    bus.unlink()
    doctor.finds_no_more(*words)


@row(
    "doctor", "bus: access: redis://…: the server does not know this user, or refuses its password: …",
    means="The server has no such user, or its password is another one than this process has.",
    do="use the …'s own user and password, with the ACL of `isthmus access`", then="`ok bus: access`",
)  # fmt: skip
def test_another_password(
    doctor: Doctor, run: str, guarded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (run, "--role", "learner", "--learner", "eu-1", "--bus")
    monkeypatch.setenv("ISTHMUS_BUS_PASSWORD", "sesame-secret")
    url = guarded("learner-eu-1")
    assert "sesame-secret" not in doctor.finds(*words, f"redis://{url.rpartition('@')[2]}"), "secrets are not printed"
    monkeypatch.delenv("ISTHMUS_BUS_PASSWORD")
    doctor.finds_no_more(*words, url)


# --- what the server is -----------------------------------------------------------------------------------------------


@row(
    "doctor", "bus: version: Redis …",
    means="The server is older than users (ACL) and the protocol that the client speaks.",
    do="use Redis 7.2 or newer", then="`ok bus: version`",
)  # fmt: skip
@row(
    "doctor", "bus: version: Redis …: ACLs of this version cannot allow reading a stream without writing",
    means="The server cannot keep learners from writing for each other. This matters if they do not trust each other.",
    do="use 7.2.16, 7.4.11, 8.6.6, 8.8.2 or newer", then="`ok bus: version`",
)  # fmt: skip
@row(
    "doctor", "bus: version: Redis …: XREAD bypasses key ACLs (fixed in later versions); this matters if learners do "
    "not trust each other",
    means="A learner can read streams that the ACL denies it.",
    do="use 7.2.16, 7.4.11, 8.6.6, 8.8.2 or newer", then="`ok bus: version`",
)  # fmt: skip
def test_an_old_server(doctor: Doctor, run: str, redis: Server) -> None:
    """The server's answer to INFO is changed on its way, as no machine has all these servers."""
    shown = [""]

    def aged(piece: bytes) -> bytes:
        return re.sub(
            rb"redis_version:([\d.]+)\r\nredis_git_sha1:\w+",
            lambda m: f"redis_version:{shown[0]}\r\nredis_git_sha1:".encode().ljust(len(m[0]), b"0"),
            piece,
        )

    with wire(lambda _: int(redis.url.rpartition(":")[2]), aged) as port:
        bus = ("--bus", f"redis://127.0.0.1:{port}")
        for row_of, shown[0] in zip(doctor.rows, ("5.0.14", "6.2.14", "7.2.15"), strict=True):
            text = replace(doctor, rows=[row_of]).finds(run, *bus)
        for shown[0] in re.findall(r"\d+\.\d+\.\d+", text[text.index("→ use 7.2.16") :].partition("\n")[0]):
            assert f"ok      bus: version: Redis {shown[0]}\n" in doctor.prints(run, *bus)


@row(
    "doctor", "bus: mode: the server is part of a Redis Cluster",
    means="A cluster spreads keys over servers, and a run reads all its streams in one request.",
    do="use one primary (with replicas): streams of a run are read together, across slots", then="no `bus: mode`",
)  # fmt: skip
def test_a_cluster(doctor: Doctor, run: str, redis: Server, redis_7: str, tmp_path: Path) -> None:
    [own] = free_ports(1)  # for the cluster's own messages: it would else be the server's port and 10,000
    with started(tmp_path, redis_7, cluster_enabled="yes", cluster_port=str(own)) as url:
        ask(url, "CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        until = time.monotonic() + 30.0
        while "cluster_state:ok" not in str(ask(url, "CLUSTER", "INFO")):
            assert time.monotonic() < until
            time.sleep(0.05)
        doctor.finds(run, "--bus", url)
    doctor.finds_no_more(run, "--bus", redis.url)


@row(
    "doctor", "bus: streams: …: fewer replicas are connected than the server wants (min-replicas-to-write): …",
    means="The server takes no messages as long as too few replicas follow it. Learners train on, and rounds wait.",
    do="do what the server asks for; its log and INFO say more", then="`ok bus: streams`",
    lost=A_GAP,
)  # fmt: skip
def test_a_server_without_its_replicas(doctor: Doctor, run: str, tmp_path: Path) -> None:
    with started(tmp_path, min_replicas_to_write="1") as url:
        doctor.finds(run, "--bus", url)
        ask(url, "CONFIG", "SET", "min-replicas-to-write", "0")
        doctor.finds_no_more(run, "--bus", url)


@row(
    "doctor", "bus: streams: …: this server is a replica now: its name is looked up again: …",
    means="A replica takes no messages. Learners train on, and rounds wait.",
    do="make it the primary again, or let the bus's name lead to the primary", then="`ok bus: streams`",
    lost=A_GAP,
)  # fmt: skip
@row(
    "doctor", "bus: mode: the server is a replica",
    means="A replica takes no messages.",
    do="use the primary's address", then="no `bus: mode`",
)  # fmt: skip
def test_a_replica(doctor: Doctor, run: str, redis: Server, tmp_path: Path) -> None:
    with started(tmp_path, replicaof=f"127.0.0.1 {redis.url.rpartition(':')[2]}") as url:
        text = doctor.finds(run, "--bus", url)
        assert "run: bus: " not in text, "a bus that failed says nothing about syncers"
    doctor.finds_no_more(run, "--bus", redis.url)


@row(
    "doctor", "bus: persistence: no append-only file: after a restart, agents repeat their messages within a heartbeat "
    "or two",
    means="A restart of the server empties the bus. Nothing is lost, and rounds come a little later.",
    do="start the server with appendonly yes and appendfsync everysec", then="`ok bus: persistence`",
)  # fmt: skip
@row(
    "doctor", "bus: memory: no maxmemory: messages can fill the machine's memory",
    means="Nothing limits what the server keeps.",
    do="start the server with maxmemory 128mb (a managed server has its own limit)", then="no `bus: memory`",
)  # fmt: skip
@row(
    "doctor", "bus: eviction: …, without a limit for now",
    means="Once the server has a limit of memory, it will drop streams to stay below it.",
    do="start the server with maxmemory-policy noeviction: if a stream is evicted, learners miss a round",
    then="`ok bus: eviction`",
)  # fmt: skip
@row(
    "doctor", "bus: value size: values over 1 MiB are accepted: one message can fill the server's memory",
    means="Whoever may write one message can stop the run's bus.",
    do="start the server with proto-max-bulk-len 1mb, if it allows this", then="`ok bus: value size`",
)  # fmt: skip
def test_settings_that_are_left_out(doctor: Doctor, run: str, tmp_path: Path) -> None:
    bare = {"appendonly": "no", "maxmemory": "", "proto_max_bulk_len": ""}
    with started(tmp_path, maxmemory_policy="allkeys-lru", **bare) as url:
        text = doctor.finds(run, "--bus", url)
    told = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory": "128mb"}
    told |= {"maxmemory-policy": "noeviction", "proto-max-bulk-len": "1mb"}
    with redis_server(tmp_path, arguments=settings(text, told)) as server:
        text = doctor.finds_no_more(run, "--bus", server.url)
    assert not re.search(r"(failure|warning) bus: (?!version)", text), text


@row(
    "doctor", "bus: eviction: … at … MB",
    means="The server drops streams once its memory is full. A learner whose message was dropped misses a round.",
    do="start the server with maxmemory-policy noeviction: if a stream is evicted, learners miss a round",
    then="`ok bus: eviction`",
)  # fmt: skip
def test_a_server_that_evicts(doctor: Doctor, run: str, tmp_path: Path) -> None:
    with started(tmp_path, maxmemory_policy="allkeys-lru") as url:
        text = doctor.finds(run, "--bus", url)
    with started(tmp_path, **dict([re.findall(r"start the server with (maxmemory-policy) (\w+)", text)[0]])) as url:
        doctor.finds_no_more(run, "--bus", url)


@row(
    "doctor", "bus: memory: …% of … MB in use",
    means="The server is nearly full. When it is, it takes no more messages, and no round goes on.",
    do="raise maxmemory, or delete what else is stored on this server", then="no `bus: memory`",
)  # fmt: skip
def test_a_server_that_is_nearly_full(doctor: Doctor, run: str, tmp_path: Path) -> None:
    with started(tmp_path) as url:
        others = [f"other-{number}" for number in range(18)]
        for name in others:
            ask(url, "SET", name, bytes(1 << 20))
        ask(url, "CONFIG", "SET", "maxmemory", str(ask(url, "INFO", "memory")["used_memory"] * 10 // 9))
        assert "warning bus: memory" in doctor.finds(run, "--bus", url)
        ask(url, "DEL", *others)
        doctor.finds_no_more(run, "--bus", url)


@row(
    "doctor", "bus: memory: the server is full, and refuses messages: …% of … MB in use",
    means="The server takes no messages. Learners train on, and no round goes on.",
    do="raise maxmemory, or delete what else is stored on this server: then processes go on by themselves",
    then="no `bus: memory`",
    lost=A_GAP,
)  # fmt: skip
@row(
    "doctor", "bus: streams: …: the server's memory is full: raise maxmemory, or delete other data stored there: …",
    means="The server takes no messages. Learners train on, and rounds wait.",
    do="raise its maxmemory, or delete what else this server stores", then="`ok bus: streams`",
    lost=A_GAP,
)  # fmt: skip
def test_a_server_that_is_full(doctor: Doctor, run: str, tmp_path: Path) -> None:
    with started(tmp_path) as url:
        others = [f"other-{number}" for number in range(20)]
        for name in others:
            ask(url, "SET", name, bytes(1 << 20))
        ask(url, "CONFIG", "SET", "maxmemory", str(len(others) << 20))
        assert "failure bus: memory" in doctor.finds(run, "--bus", url)
        ask(url, "DEL", *others)
        doctor.finds_no_more(run, "--bus", url)


# --- clocks -----------------------------------------------------------------------------------------------------------


@row(
    "doctor", "bus: clock: this machine's clock is 60 s ahead of the bus's",
    means="The clocks of two machines differ by more than two seconds.",
    do="run an NTP client (chrony) on both machines: dates in the log and `export --at` are off",
    then="`ok bus: clock`",
)  # fmt: skip
@row(
    "doctor", "store: clock: this machine's clock is 3600 s behind the store's",
    means="The clocks differ so much that a store may refuse signed requests.",
    do="run an NTP client (chrony) on both machines: S3 refuses requests signed 15 minutes off",
    then="`ok store: clock`",
)  # fmt: skip
def test_clocks_that_differ(doctor: Doctor, run: str, redis: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for off_s, check in ((60.0, "bus"), (-3600.0, "store")):

        @contextmanager
        def off(threads: int, off_s: float = off_s) -> Iterator[Runtime]:
            with right(threads) as r:
                yield Runtime(r.now, lambda: r.wall() + off_s, r.random, r.offload, r.new_id)

        monkeypatch.setattr(command, "threaded", off)
        doctor.only(check).finds(run, "--bus", redis.url)
    monkeypatch.setattr(command, "threaded", right)  # a clock that NTP has set
    text = doctor.finds_no_more(run, "--bus", redis.url)
    assert "ok      bus: clock" in text
    assert "ok      store: clock" in text


# --- encryption -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(redis_7: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URL of a Redis over TLS, and the file of the authority that signed its certificate."""
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder)
    with redis_server(folder, binary=redis_7, certificate=authority.certificate("bus")) as server:
        yield server.url, str(authority.file)


@row(
    "doctor", "bus: TLS: …: passwords and data can be read and changed in transit",
    means="The connection to another machine is not encrypted.",
    do="let the server listen with TLS, and use rediss://; --bus-ca FILE names your own authorities",
    then="`ok bus: TLS: the server's certificate is verified`",
)  # fmt: skip
def test_a_bus_without_tls(doctor: Doctor, run: str, redis: Server, tls: tuple[str, str]) -> None:
    doctor.finds(run, "--bus", redis.url.replace("127.0.0.1", "0.0.0.0"))  # not known to be this machine
    text = doctor.finds_no_more(run, "--bus", tls[0], "--bus-ca", tls[1])
    assert "the server's certificate is verified" in text


@row(
    "doctor", "bus: TLS: certificates are not verified (ssl_cert_reqs), so any server that answers is believed",
    means="The URL of the bus turns the verification of certificates off.",
    do="leave ssl_cert_reqs out of the URL of the bus; --bus-ca FILE names your own authorities",
    then="`ok bus: TLS: the server's certificate is verified`",
)  # fmt: skip
@pytest.mark.tier("all")  # integration/test_tls.py covers the main case
def test_a_certificate_that_is_not_verified(doctor: Doctor, run: str, tls: tuple[str, str]) -> None:
    doctor.finds(run, "--bus", f"{tls[0]}?ssl_cert_reqs=none&ssl_check_hostname=false")
    text = doctor.finds_no_more(run, "--bus", tls[0], "--bus-ca", tls[1])
    assert "the server's certificate is verified" in text


# --- rights -----------------------------------------------------------------------------------------------------------


@row(
    "doctor", "bus: server: cannot query the server: …",
    means="This user may not ask the server about itself, so version, memory and clock are not checked.",
    do="grant the user +info and +time (ACL SETUSER)", then="`ok bus: version`, and what else the server reports",
)  # fmt: skip
def test_a_server_that_may_not_be_asked(doctor: Doctor, run: str, guarded: Callable[[str], str]) -> None:
    url = guarded("operator")
    ask(url, "ACL", "SETUSER", "mute", "on", ">sesame", "~*", "&*", "+@all", "-info")
    mute = url.replace("operator:", "mute:")
    given = re.findall(r"[+]\w+", doctor.finds(run, "--bus", mute).partition("grant the user")[2].partition("\n")[0])
    ask(url, "ACL", "SETUSER", "mute", *given)
    assert "bus: version: Redis" in doctor.finds_no_more(run, "--bus", mute)


@row(
    "doctor", "bus: must not administer: this user may use …",
    means="The user of this role may change the server, and everybody's messages.",
    do="use the …'s own user, with the ACL that `isthmus access` writes", then="`ok bus: must not administer`",
)  # fmt: skip
@row(
    "doctor", "bus: must not hear others: this user may listen to …",
    means="A learner may read what other learners say.",
    do="use the …'s own user, with the ACL that `isthmus access` writes", then="`ok bus: must not hear others`",
)  # fmt: skip
@row(
    "doctor", "bus: must not write for others: this user may speak as …",
    means="The user may send messages in another's name. In a signed run nobody believes them.",
    do="use the …'s own user, with the ACL that `isthmus access` writes", then="`ok bus: must not write for others`",
)  # fmt: skip
@pytest.mark.parametrize("name", [("--learner", "eu-1"), ()], ids=["named", "unnamed"])
def test_a_user_that_may_do_too_much(
    name: tuple[str, ...], doctor: Doctor, run: str, guarded: Callable[[str], str]
) -> None:
    doctor.finds(run, "--role", "learner", *name, "--bus", guarded("operator"))
    text = doctor.finds_no_more(run, "--role", "learner", "--learner", "eu-1", "--bus", guarded("learner-eu-1"))
    for what in ("administer", "hear others", "write for others"):
        assert f"ok      bus: must not {what}" in text


@row(
    "doctor",
    "bus: users: no user of the bus is named, so all participants have the same rights there: this user may use …; this user "
    "may speak as …; this user may listen to …",
    means="The bus has no users for participants, as with `isthmus create --bus-users none`.",
    do="nothing, if all participants trust each other; else give each its user of `isthmus access` (Redis 7)",
    then="`ok bus: must not administer`, `must not hear others` and `must not write for others`; or this warning, if you leave "
    "it",
)  # fmt: skip
def test_a_bus_without_users(doctor: Doctor, run: str, redis: Server, guarded: Callable[[str], str]) -> None:
    words = (run, "--role", "learner", "--learner", "eu-1")
    text = doctor.finds(*words, "--bus", redis.url)
    assert "bus: must not" not in text
    text = doctor.finds_no_more(*words, "--bus", guarded("learner-eu-1"))
    for what in ("administer", "hear others", "write for others"):
        assert f"ok      bus: must not {what}" in text


@row(
    "doctor", "bus: must not write for others: anyone who can write this file can act as any participant",
    means="The embedded bus is a file, and a file keeps nobody apart.",
    do="if participants do not trust each other, use Redis with an ACL (`isthmus access`)",
    then="`ok bus: must not write for others`",
)  # fmt: skip
def test_a_bus_in_a_file(doctor: Doctor, run: str, guarded: Callable[[str], str]) -> None:
    words = (run, "--role", "learner", "--learner", "eu-1")
    doctor.finds(*words)
    assert "ok      bus: must not write for others" in doctor.finds_no_more(*words, "--bus", guarded("learner-eu-1"))


@row(
    "doctor", "bus: streams: …: the user of the bus lacks a right: `isthmus access` writes users that have it: …",
    means="The user may not write the stream of this role.",
    do="use the …'s own user, with the ACL that `isthmus access` writes", then="`ok bus: streams`",
)  # fmt: skip
def test_another_roles_user(doctor: Doctor, run: str, guarded: Callable[[str], str]) -> None:
    doctor.finds(run, "--role", "syncer", "--bus", guarded("reader"))
    assert "ok      bus: streams" in doctor.finds_no_more(run, "--role", "syncer", "--bus", guarded("syncer"))


@row(
    "doctor", "bus: streams: the appended message could not be read back",
    means="Writes and reads go to different servers, so messages come late or never.",
    do="use the address of the one primary, without a proxy or load balancer that spreads requests",
    then="`ok bus: streams`",
)  # fmt: skip
def test_a_load_balancer(doctor: Doctor, run: str, redis: Server, tmp_path: Path) -> None:
    with started(tmp_path) as other:
        ports = [int(url.rpartition(":")[2]) for url in (redis.url, other)]
        with wire(lambda number: ports[number > 0]) as port:
            doctor.finds(run, "--bus", f"redis://127.0.0.1:{port}")
    assert "ok      bus: streams" in doctor.finds_no_more(run, "--bus", redis.url)


@row(
    "doctor", "bus: value size: not tried: …",
    means="The server answered other requests, and failed this one. What it said is printed.",
    do="do what the server asks for, and run the doctor again", then="the check's result",
)  # fmt: skip
def test_a_server_that_fails_one_request(doctor: Doctor, run: str, tmp_path: Path) -> None:
    with started(tmp_path, maxclients="1") as url:
        assert "raise maxclients" in doctor.finds(run, "--bus", url)
        ask(url, "CONFIG", "SET", "maxclients", "100")
        assert "ok      bus: value size" in doctor.finds_no_more(run, "--bus", url)
