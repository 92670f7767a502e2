"""The commands: what each is for and its settings; what it does lives in a module of its own, imported when used."""

from dataclasses import dataclass
from typing import Annotated

from isthmus.lab.experiments import EXPERIMENTS
from isthmus.rules import ADOPTIONS
from isthmus_services.options import ArithmeticOfRun, InRun, OnBus, PaceOfRun, Reported, Seeded, Serving
from isthmus_services.settings import fields, setting

BUILT_IN_TRAINER = "isthmus.demo.trainer:train"


@dataclass(frozen=True, kw_only=True)
class Demo(OnBus, ArithmeticOfRun, PaceOfRun, Seeded, Reported):
    """Settings of `isthmus demo`."""

    store: Annotated[str | None, setting("where the run lives (OUT/run)", metavar="URL")] = None
    steps: Annotated[int, setting("optimizer steps per learner (1500)", ge=1)] = 1500
    learners: Annotated[int, setting("learner processes (4)", metavar="M", ge=1)] = 4
    data: Annotated[str | None, setting("text file or folder (default: Python's standard library)", metavar="PATH")] = (
        None
    )
    adopt: Annotated[str, setting("what a new version does to local work (overwrite)", choices=ADOPTIONS)] = "overwrite"
    kill_every: Annotated[float | None, setting("SIGKILL a random learner every S seconds", metavar="S", gt=0)] = None
    kill_syncer_every: Annotated[float | None, setting("SIGKILL the syncer every S seconds", metavar="S", gt=0)] = None
    out: Annotated[str, setting("where everything is written (out/demo)", metavar="DIR")] = "out/demo"
    servers: Annotated[bool, setting("start an S3 server and a Redis on loopback and use them", flag_only=True)] = False


@dataclass(frozen=True, kw_only=True)
class Init(InRun, ArithmeticOfRun, PaceOfRun, Seeded):
    """Settings of `isthmus init`."""

    model: Annotated[
        str | None, setting("returns a module (the built-in byte GPT)", metavar="PACKAGE.MODULE:FUNCTION")
    ] = None
    source: Annotated[
        str | None, setting("take the initial parameters from a safetensors file", name="from", metavar="FILE")
    ] = None
    create_bucket: Annotated[bool, setting("create the bucket where it is missing")] = False


@dataclass(frozen=True, kw_only=True)
class Syncer(InRun, OnBus, PaceOfRun, Serving):
    """Settings of `isthmus syncer`."""

    name: Annotated[str | None, setting("name of this syncer; @hostname takes the host's (default: made up)")] = None


@dataclass(frozen=True, kw_only=True)
class Learner(InRun, OnBus, Serving):
    """Settings of `isthmus learner`."""

    learner: Annotated[
        str,
        setting("unique in the run, goes on where it stopped; @hostname takes the host's", metavar="NAME"),
    ]
    train: Annotated[str, setting("called with an isthmus.demo.trainer.Task", metavar="PACKAGE.MODULE:FUNCTION")] = (
        BUILT_IN_TRAINER
    )
    steps: Annotated[int, setting("optimizer steps, over all restarts (1500)", ge=1)] = 1500
    data: Annotated[str | None, setting("text file or folder (default: Python's standard library)", metavar="PATH")] = (
        None
    )
    shard: Annotated[
        str | None,
        setting("this learner's part of the data (default: all of it, in an order of its own)", metavar="I/M"),
    ] = None
    seed: Annotated[int | None, setting("seed of the data order (default: the run's)", ge=0, le=(1 << 63) - 1)] = None
    adopt: Annotated[str, setting("what a new version does to local work (overwrite)", choices=ADOPTIONS)] = "overwrite"
    checkpoint: Annotated[float, setting("seconds between checkpoints (60)", metavar="S", gt=0)] = 60.0
    tensorboard: Annotated[str | None, setting("write training metrics there for TensorBoard", metavar="DIR")] = None


@dataclass(frozen=True, kw_only=True)
class Status(InRun, OnBus, Reported):
    """Settings of `isthmus status`."""

    ledger: Annotated[
        bool, setting("every learner's ledger by fragment, as of its newest checkpoint", flag_only=True)
    ] = False
    watch: Annotated[bool, setting("a live view, until interrupted", flag_only=True)] = False


@dataclass(frozen=True, kw_only=True)
class Doctor(InRun, OnBus, Reported):
    """Settings of `isthmus doctor`."""

    role: Annotated[
        str,
        setting(
            "whose permissions to check: what it must be able to do, and what it must not (operator)",
            choices=("operator", "syncer", "learner"),
        ),
    ] = "operator"
    learner: Annotated[str, setting("with --role learner: its name (doctor)", metavar="NAME")] = "doctor"
    size: Annotated[float, setting("MiB to measure the bandwidth with (8)", metavar="MIB", gt=0, le=1024)] = 8.0


@dataclass(frozen=True, kw_only=True)
class Replay(InRun, Reported):
    """Settings of `isthmus replay`."""

    fragment: Annotated[list[int] | None, setting("only this one (may be repeated)", metavar="P", flag_only=True)] = (
        None
    )
    first: Annotated[int, setting("first version to compare (1)", name="from", metavar="V", flag_only=True)] = 1
    last: Annotated[int | None, setting("last version (the newest)", name="to", metavar="V", flag_only=True)] = None
    threads: Annotated[int, setting("threads, and fragments at once (2)", metavar="N", ge=1)] = 2
    set: Annotated[
        list[str] | None,
        setting(
            "what if: merge, merge.embeddings, outer.lr, outer.momentum, quorum, grace, overlap, staleness",
            metavar="NAME=VALUE",
            flag_only=True,
        ),
    ] = None
    export: Annotated[
        str | None, setting("with --set: write the other model as safetensors", metavar="FILE", flag_only=True)
    ] = None
    plot: Annotated[
        str | None, setting("with --set: draw how far the trajectory departs", metavar="FILE", flag_only=True)
    ] = None
    trace: Annotated[str | None, setting("write a timeline that opens in Perfetto", metavar="FILE", flag_only=True)] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class Explain(InRun, Reported):
    """Settings of `isthmus explain`."""

    what: Annotated[
        str,
        setting(
            "a commit (FRAGMENT/VERSION or its key), an update (FRAGMENT/LEARNER/BASE or its key)",
            positional=True,
            flag_only=True,
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Export(InRun, Reported):
    """Settings of `isthmus export`."""

    out: Annotated[str, setting("where to, e.g. model.safetensors", short="-o", metavar="FILE", flag_only=True)]
    version: Annotated[
        int | None, setting("this version of every fragment (the newest of each)", metavar="V", flag_only=True)
    ] = None
    at: Annotated[
        str | None,
        setting("as it was then: 2026-11-21T14:30:00, or seconds since 1970", metavar="TIME", flag_only=True),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Gc(InRun, Reported):
    """Settings of `isthmus gc`."""

    keep: Annotated[int, setting("versions of each fragment that stay foldable (64)", metavar="N", ge=1)] = 64
    min_age: Annotated[float, setting("leave what was written less than S seconds ago (3600)", metavar="S", ge=0)] = (
        3600.0
    )
    apply: Annotated[bool, setting("do it", flag_only=True)] = False


@dataclass(frozen=True, kw_only=True)
class Simulate(Reported):
    """Settings of `isthmus simulate`."""

    kind: Annotated[
        str, setting("training: real gradients in virtual time", positional=True, flag_only=True, choices=("training",))
    ]
    experiment: Annotated[
        str,
        setting(", ".join(EXPERIMENTS), positional=True, flag_only=True),
    ]
    scale: Annotated[
        str, setting("quick: one seed and a few settings; paper: all of it (paper)", choices=("quick", "paper"))
    ] = "paper"
    seeds: Annotated[int | None, setting("seeds per setting (1 quick, 3 paper)", metavar="N", ge=1, flag_only=True)] = (
        None
    )
    steps: Annotated[int | None, setting("optimizer steps per learner", metavar="N", ge=1, flag_only=True)] = None
    workers: Annotated[int | None, setting("runs at once (one per core)", metavar="N", ge=1)] = None
    cache: Annotated[str, setting("where finished runs are kept (out/lab)", metavar="DIR")] = "out/lab"
    plot: Annotated[str | None, setting("draw loss and goodput of every setting", metavar="FILE", flag_only=True)] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class Access:
    """Settings of `isthmus access`."""

    folder: Annotated[str, setting("where the files go, e.g. a volume that services mount read-only", positional=True)]
    learner: Annotated[
        list[str] | None,
        setting(
            "a Redis user of its own for this learner (may be repeated; default: one for all)",
            metavar="NAME",
            flag_only=True,
        ),
    ] = None
    json: Annotated[str | None, setting("write which files there are as JSON too", metavar="PATH", flag_only=True)] = (
        None
    )


@dataclass(frozen=True)
class Command:
    """One command: `module` has a function `run` that takes its settings and returns the exit code."""

    name: str
    settings: type
    module: str
    help: str


ALL = tuple(
    Command(settings.__name__.lower(), settings, settings.__name__.lower(), text)
    for settings, text in (
        (Demo, "train a small model with four learner processes, watch and report"),
        (Init, "create a run: its object and version 0"),
        (Syncer, "merge what learners announce; any number may run"),
        (Learner, "train with the built-in trainer or your own"),
        (Status, "versions, learners, who is behind and why, rejections, ledger; --watch: live"),
        (Doctor, "check everything a run rests on, and say what to do"),
        (Replay, "fold the log again and compare every digest; under other rules; as a timeline"),
        (Explain, "the story of one update or one commit"),
        (Export, "write the global model as a safetensors file"),
        (Gc, "delete what the log has passed by, pack old commits; a dry run by default"),
        (Simulate, "the whole system in virtual time: what it learns under delays, failures and mixed speeds"),
        (Access, "make the passwords and the Redis ACL file of a new installation"),
    )
)


def names() -> dict[str, set[str]]:
    """Return the names of every command's settings: what a file may say."""
    return {c.name: {s.name for s in fields(c.settings) if not s.flag_only} for c in ALL}
