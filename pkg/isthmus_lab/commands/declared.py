"""The laboratory's commands and their settings, declared as `isthmus_services.settings.declared` declares its own."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from isthmus.format.rules import MergeRule, require_codec
from isthmus_lab.forecast.goodput import REJOINS, Cluster
from isthmus_lab.forecast.island import Island
from isthmus_lab.training.names import NAMES
from isthmus_services.settings.command import commands_of
from isthmus_services.settings.resolve import Setting
from isthmus_services.settings.shared import CODECS, Reported, Seeded

BENCHES = ("kernels", "learner", "round", "scale", "recovery", "store", "bytes", "start", "signing")
"""Benchmarks that `all` runs."""

APART = ("peers", "links", "overload")
"""Benchmarks that `all` leaves out: `peers` needs other libraries, `links` needs network namespaces, and the figures of
`overload` do not depend on this machine."""


@dataclass(frozen=True, kw_only=True)
class Training(Reported):
    """Settings of `isthmus simulate training`."""

    experiment: Annotated[str, Setting(", ".join(NAMES), positional=True, flag_only=True)]
    scale: Annotated[
        str, Setting("quick: one seed and a few settings; paper: all of it", choices=("quick", "paper"))
    ] = "paper"
    seeds: Annotated[int | None, Setting("seeds per setting (1 quick, 3 paper)", metavar="N", ge=1, flag_only=True)] = (
        None
    )
    steps: Annotated[int | None, Setting("optimizer steps per learner", metavar="N", ge=1, flag_only=True)] = None
    only: Annotated[
        list[str] | None, Setting("patterns of settings' names, ? for a comma", metavar="NAME", flag_only=True)
    ] = None
    workers: Annotated[int | None, Setting("runs at once (one per core)", metavar="N", ge=1)] = None
    cache: Annotated[str, Setting("where finished runs are kept", metavar="DIR")] = "out/lab"
    plot: Annotated[str | None, Setting("draw what every setting came to", metavar="FILE", flag_only=True)] = None


_CLUSTER = Cluster()


@dataclass(frozen=True, kw_only=True)
class ClusterOfChips:
    """The cluster (each parameter's reason is in docs/paper.md)."""

    mtbi_years: Annotated[float, Setting("years between two interruptions of one chip", metavar="YEARS", gt=0)] = (
        _CLUSTER.mtbi_years
    )
    slice_chips: Annotated[
        int | None,
        Setting(
            "chips that are lost and come back together (64; below 16,384 chips 8, below 16 one)", metavar="N", ge=1
        ),
    ] = None
    repair_hours: Annotated[float, Setting("mean hours until a slice is back", metavar="H", ge=0)] = (
        _CLUSTER.repair_hours
    )
    repair_shape: Annotated[float, Setting("k of the exponentiated Weibull of repair times", metavar="K", ge=0.2)] = (
        _CLUSTER.repair_shape
    )
    repair_power: Annotated[float, Setting("its α", metavar="ALPHA", gt=0)] = _CLUSTER.repair_power
    reconfigure_s: Annotated[
        float | None,
        Setting("stall of a learner that shrinks or grows (fitted to the published 58 %)", metavar="S", ge=0),
    ] = None
    restart_s: Annotated[
        float | None, Setting("stall of a job that starts again (fitted to the published 27 %)", metavar="S", ge=0)
    ] = None
    rejoin: Annotated[
        str,
        Setting(
            "a slice that is back waits for the restarting job's next restart, gets one at once, or what costs less",
            choices=REJOINS,
        ),
    ] = _CLUSTER.rejoin
    interrupted: Annotated[
        str,
        Setting(
            "what an interruption does to a reconfiguration under way: it is absorbed, or all begins again",
            choices=("absorb", "again"),
        ),
    ] = _CLUSTER.interrupted
    step_s: Annotated[float, Setting("seconds of a step; a failure takes the one under way", metavar="S", gt=0)] = (
        _CLUSTER.step_s
    )
    checkpoint_s: Annotated[float, Setting("seconds a checkpoint costs the job that restarts", metavar="S", ge=0)] = (
        _CLUSTER.checkpoint_s
    )
    speed_deviation: Annotated[
        float, Setting("standard deviation of slices' step times, as a share", metavar="SHARE", ge=0, le=1)
    ] = _CLUSTER.speed_deviation
    behind: Annotated[
        float, Setting("how much slower the slowest learner is than the fastest", metavar="SHARE", ge=0, le=0.99)
    ] = _CLUSTER.behind
    quorum: Annotated[int, Setting("learners without which the global model stands still", metavar="K", ge=1)] = (
        _CLUSTER.quorum
    )
    grace: Annotated[
        float, Setting("share of the overlap that a round waits for more learners", metavar="GAMMA", ge=0, le=1)
    ] = _CLUSTER.grace
    overlap: Annotated[float, Setting("steps a fragment may be under way", metavar="TAU", ge=0)] = _CLUSTER.overlap
    lead: Annotated[
        float | None, Setting("steps after which a learner waits for the quorum (it never does)", metavar="STEPS", ge=0)
    ] = None
    rack_chips: Annotated[int, Setting("chips of a rack", metavar="N", ge=1)] = _CLUSTER.rack_chips
    rack_mtbi_years: Annotated[
        float | None, Setting("years between two failures of a whole rack (never)", metavar="YEARS", gt=0)
    ] = None
    region_mtbi_years: Annotated[
        float | None, Setting("years between two failures of a learner's whole region (never)", metavar="YEARS", gt=0)
    ] = None
    region_hours: Annotated[float, Setting("hours that a region is away", metavar="H", ge=0)] = _CLUSTER.region_hours
    maintenance_days: Annotated[
        float | None, Setting("days between two maintenances of a slice (never)", metavar="DAYS", gt=0)
    ] = None
    maintenance_hours: Annotated[float, Setting("hours of one", metavar="H", ge=0)] = _CLUSTER.maintenance_hours

    def cluster(self) -> Cluster:
        """Return the model's parameters. Raises `InputError`."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(Cluster)}
        return Cluster(**{name: value for name, value in given.items() if value is not None}).check()


@dataclass(frozen=True, kw_only=True)
class Goodput(ClusterOfChips, Seeded, Reported):
    """Settings of `isthmus simulate goodput`."""

    chips: Annotated[list[int] | None, Setting("chips (150000 to 2400000, doubling)", metavar="N", flag_only=True)] = (
        None
    )
    learners: Annotated[
        list[int] | None,
        Setting(
            "learners of the decoupled mode (1, 2, 4, 8, 16: those that have a slice)", metavar="M", flag_only=True
        ),
    ] = None
    failures: Annotated[int, Setting("failures in each of 20 repetitions of a cell", metavar="N", ge=1)] = 4000
    check: Annotated[
        str | None,
        Setting("instead: what a recorded run achieved, beside what the model says", metavar="RUN", flag_only=True),
    ] = None
    sensitivity: Annotated[
        bool, Setting("show how the answer moves with each parameter that was not published", flag_only=True)
    ] = False
    plot: Annotated[str | None, Setting("draw goodput against chips", metavar="FILE", flag_only=True)] = None


@dataclass(frozen=True, kw_only=True)
class Bandwidth(Reported):
    """Settings of `isthmus simulate bandwidth`."""

    params: Annotated[float, Setting("parameters of the model, e.g. 2.9e9", metavar="N", gt=0, flag_only=True)]
    step_seconds: Annotated[
        float, Setting("seconds a learner computes per step", metavar="S", gt=0, flag_only=True)
    ] = 1.0
    learners: Annotated[int, Setting("learners", metavar="M", ge=1, flag_only=True)] = 8
    utilization: Annotated[
        list[float] | None, Setting("shares of the time spent computing (0.9)", metavar="SHARE", flag_only=True)
    ] = None
    gbit_s: Annotated[
        list[float] | None, Setting("also the utilisation at these bandwidths", metavar="GBIT", flag_only=True)
    ] = None
    latency: Annotated[float, Setting("seconds one way", metavar="S", ge=0)] = 0.0
    sync_every: Annotated[int, Setting("steps between two syncs of one fragment", metavar="H", ge=1)] = 24
    fragments: Annotated[int, Setting("fragments of the model", metavar="P", ge=1)] = 24
    overlap: Annotated[float, Setting("steps a fragment may be under way", metavar="TAU", ge=0)] = 2.0
    plot: Annotated[str | None, Setting("draw bandwidth against utilisation", metavar="FILE", flag_only=True)] = None


_ISLAND = Island(name="")


@dataclass(frozen=True, kw_only=True)
class Plan(Reported):
    """Settings of `isthmus plan`."""

    params: Annotated[
        float | None, Setting("parameters of the model, e.g. 2.9e9", metavar="N", gt=0, flag_only=True)
    ] = None
    model: Annotated[
        str | None, Setting("or returns a module whose parameters are counted", metavar="PACKAGE.MODULE:FUNCTION")
    ] = None
    islands: Annotated[
        str | None,
        Setting("TOML: a [[learner]] table for each kind, params, store_region", metavar="FILE", flag_only=True),
    ] = None
    learners: Annotated[int, Setting("without a file: learners, all alike", metavar="M", ge=1, flag_only=True)] = 8
    step_seconds: Annotated[
        float | None, Setting("seconds of an optimizer step (1, and it is said)", metavar="S", gt=0, flag_only=True)
    ] = None
    gpus: Annotated[
        int | None, Setting("GPUs of all learners together (8 each, and it is said)", metavar="N", ge=1, flag_only=True)
    ] = None
    up: Annotated[float | None, Setting(f"Gbit/s to the store ({_ISLAND.up_gbit_s:g})", metavar="GBIT", gt=0)] = None
    down: Annotated[float | None, Setting(f"Gbit/s from the store ({_ISLAND.down_gbit_s:g})", metavar="GBIT", gt=0)] = (
        None
    )
    latency: Annotated[
        float | None, Setting(f"seconds to the store, one way ({_ISLAND.latency_s:g})", metavar="S", ge=0)
    ] = None
    mtbf_hours: Annotated[
        float | None, Setting("hours between two failures of a learner (none)", metavar="H", gt=0)
    ] = None
    restart: Annotated[float, Setting("seconds from a failure to the next step", metavar="S", ge=0)] = _ISLAND.restart_s
    compare: Annotated[
        bool,
        Setting(
            "beside data parallel in one place and across the links: tokens learnt per day and dollar", flag_only=True
        ),
    ] = False
    step_tokens: Annotated[
        float | None,
        Setting("tokens in a learner's step, for --compare (1e6, and it is said)", metavar="N", gt=0, flag_only=True),
    ] = None
    prices: Annotated[
        str | None, Setting("TOML of prices that differ from ours (S3's, see docs/paper.md)", metavar="FILE")
    ] = None
    gpu_hour: Annotated[float | None, Setting("dollars for an hour of one GPU (2.5)", metavar="USD", ge=0)] = None
    cpu: Annotated[
        str | None, Setting("the syncer's class of CPU in the table of speeds (xeon-2023)", metavar="CLASS")
    ] = None
    speeds: Annotated[
        str | None, Setting("TOML of measured speeds instead, as --measure writes it", metavar="FILE")
    ] = None
    measure: Annotated[
        str | None,
        Setting("time the syncer's arithmetic here, write it there, plan nothing", metavar="FILE", flag_only=True),
    ] = None
    fragments: Annotated[int | None, Setting("do not choose P", metavar="P", ge=1, flag_only=True)] = None
    sync_every: Annotated[int | None, Setting("do not choose H", metavar="H", ge=1, flag_only=True)] = None
    merge: Annotated[
        str | None, Setting("merge rule (as init would choose)", choices=tuple(MergeRule), flag_only=True)
    ] = None
    iso_block: Annotated[
        int | None, Setting("longest side of a matrix that iso does not cut", metavar="N", ge=0, flag_only=True)
    ] = None
    codec: Annotated[
        str | None, Setting("do not choose the codec of updates", metavar=CODECS, check=require_codec, flag_only=True)
    ] = None
    codec_down: Annotated[
        str | None, Setting("do not choose the codec of versions", metavar=CODECS, check=require_codec, flag_only=True)
    ] = None


@dataclass(frozen=True, kw_only=True)
class Bench(Reported):
    """Settings of `isthmus bench`."""

    what: Annotated[str, Setting("what to measure", choices=("all", *BENCHES, *APART), positional=True)]
    repeats: Annotated[int, Setting("times that everything is measured", metavar="N", ge=1, flag_only=True)] = 7
    plot: Annotated[str | None, Setting("write a picture too", metavar="PATH", flag_only=True)] = None
    tables: Annotated[
        list[str] | None,
        Setting("measure nothing: write the tables of these JSON files into --into", metavar="FILE", flag_only=True),
    ] = None
    into: Annotated[str, Setting("file whose tables are replaced, for --tables", metavar="FILE", flag_only=True)] = (
        "docs/benchmarks.md"
    )


FAMILIES = {"simulate": "what runs would come to: learning, goodput and bandwidth in virtual time"}

COMMANDS = commands_of(
    "isthmus_lab",
    (
        ("simulate", Training, "learners with real gradients: loss under delays, failures and mixed speeds"),
        ("simulate", Goodput, "chips that fail: data parallel, elastic, and M decoupled learners"),
        ("simulate", Bandwidth, "Gbit/s for a utilisation: data parallel, DiLoCo, Streaming and Decoupled DiLoCo"),
        ("", Plan, "what a model and a set of learners would come to, the settings to choose, and the cost"),
        ("", Bench, "measure speed and bytes on this machine, each beside its limit"),
    ),
)
