"""The settings of the laboratory's commands, declared as `isthmus_services.settings.declared` declares its own."""

import dataclasses
from typing import Annotated

from isthmus.format.rules import MergeRule, require_codec
from isthmus_lab.commands.rates import gbit_s
from isthmus_lab.forecast.goodput import REJOINS, Cluster
from isthmus_lab.forecast.island import START_S, Island
from isthmus_lab.training.names import NAMES
from isthmus_services.settings.resolve import Setting, settings_class
from isthmus_services.settings.shared import CODECS, Reported, Seeded

BENCHES = ("kernels", "learner", "round", "scale", "recovery", "store", "bytes", "start", "signing")
"""Benchmarks that `all` runs."""

APART = ("peers", "links", "overload")
"""Benchmarks that `all` leaves out: `peers` needs other libraries, `links` needs network namespaces, and the figures of
`overload` do not depend on this machine."""


@settings_class
class Training(Reported):
    """Settings of `isthmus simulate training`."""

    experiment: Annotated[
        str,
        Setting(
            f"{', '.join(NAMES)}; or a file NAME.toml with a case of your own (`example` prints one with all fields)",
            positional=True,
            flag_only=True,
        ),
    ]
    scale: Annotated[
        str, Setting("quick: one seed and a few settings; paper: all seeds and settings", choices=("quick", "paper"))
    ] = "paper"
    seeds: Annotated[
        int | None,
        Setting("seeds per setting (1 quick, 3 paper, or the file's)", metavar="N", ge=1, flag_only=True),
    ] = None
    merge: Annotated[
        str | None,
        Setting(
            "function that merges updates, tried beside the built-in rules",
            metavar="MODULE:FUNCTION",
            flag_only=True,
            once=True,
        ),
    ] = None
    steps: Annotated[
        int | None, Setting("optimizer steps of a learner, on average", metavar="N", ge=1, flag_only=True)
    ] = None
    only: Annotated[
        list[str] | None,
        Setting(
            "run only settings whose names match a pattern; one that matches none lists them",
            metavar="NAME",
            flag_only=True,
            with_commas=True,
        ),
    ] = None
    baseline: Annotated[
        str | None,
        Setting(
            "setting that all others are compared with, seed by seed (the first one of each group)",
            metavar="NAME",
            flag_only=True,
        ),
    ] = None
    workers: Annotated[int | None, Setting("number of parallel runs (one per core)", metavar="N", ge=1)] = None
    cache: Annotated[str, Setting("cache folder for finished runs", metavar="DIR")] = "out/lab"
    plot: Annotated[str | None, Setting("draw the result of every setting", metavar="FILE", flag_only=True)] = None


_CLUSTER = Cluster()


@settings_class
class ClusterOfChips:
    """The cluster (each parameter's reason is in docs/paper.md)."""

    mtbi_years: Annotated[float, Setting("years between two interruptions of one chip", metavar="YEARS", gt=0)] = (
        _CLUSTER.mtbi_years
    )
    slice_chips: Annotated[
        int | None,
        Setting("chips that fail and return together (64; below 16,384 chips 8, below 16 one)", metavar="N", ge=1),
    ] = None
    repair_hours: Annotated[float, Setting("mean hours until a failed slice returns", metavar="H", ge=0)] = (
        _CLUSTER.repair_hours
    )
    repair_shape: Annotated[
        float, Setting("shape k of the exponentiated Weibull distribution of repair times", metavar="K", ge=0.2)
    ] = _CLUSTER.repair_shape
    repair_power: Annotated[float, Setting("power α of the same distribution", metavar="ALPHA", gt=0)] = (
        _CLUSTER.repair_power
    )
    reconfigure_s: Annotated[
        float | None,
        Setting("seconds that a learner stalls to shrink or grow (fitted to the published 58 %)", metavar="S", ge=0),
    ] = None
    restart_s: Annotated[
        float | None, Setting("seconds that a job stalls to restart (fitted to the published 27 %)", metavar="S", ge=0)
    ] = None
    rejoin: Annotated[
        str,
        Setting(
            "a returning slice waits for the job's next restart, triggers one at once, or whichever is cheaper",
            choices=REJOINS,
        ),
    ] = _CLUSTER.rejoin
    interrupted: Annotated[
        str,
        Setting(
            "an interruption during a reconfiguration is absorbed, or starts the reconfiguration again",
            choices=("absorb", "again"),
        ),
    ] = _CLUSTER.interrupted
    step_s: Annotated[float, Setting("seconds per step; a failure loses the current step", metavar="S", gt=0)] = (
        _CLUSTER.step_s
    )
    checkpoint_s: Annotated[
        float, Setting("seconds that each checkpoint costs the restarting job", metavar="S", ge=0)
    ] = _CLUSTER.checkpoint_s
    speed_deviation: Annotated[
        float, Setting("standard deviation of slices' step times, as a share", metavar="SHARE", ge=0, le=1)
    ] = _CLUSTER.speed_deviation
    behind: Annotated[
        float,
        Setting("how much slower the slowest learner is than the fastest, as a share", metavar="SHARE", ge=0, le=0.99),
    ] = _CLUSTER.behind
    quorum: Annotated[int, Setting("minimum number of learners for the global model to advance", metavar="K", ge=1)] = (
        _CLUSTER.quorum
    )
    grace: Annotated[
        float, Setting("share of the overlap that a round waits for more learners", metavar="GAMMA", ge=0, le=1)
    ] = _CLUSTER.grace
    overlap: Annotated[
        float, Setting("steps allowed from a fragment's upload to its new version", metavar="TAU", ge=0)
    ] = _CLUSTER.overlap
    lead: Annotated[
        float | None, Setting("steps after which a learner waits for the quorum (never)", metavar="STEPS", ge=0)
    ] = None
    rack_chips: Annotated[int, Setting("chips per rack", metavar="N", ge=1)] = _CLUSTER.rack_chips
    rack_mtbi_years: Annotated[
        float | None, Setting("years between two failures of a whole rack (never)", metavar="YEARS", gt=0)
    ] = None
    region_mtbi_years: Annotated[
        float | None, Setting("years between two failures of a learner's whole region (never)", metavar="YEARS", gt=0)
    ] = None
    region_hours: Annotated[float, Setting("hours that a failed region is unavailable", metavar="H", ge=0)] = (
        _CLUSTER.region_hours
    )
    maintenance_days: Annotated[
        float | None, Setting("days between two maintenance windows of a slice (never)", metavar="DAYS", gt=0)
    ] = None
    maintenance_hours: Annotated[float, Setting("hours of a maintenance window", metavar="H", ge=0)] = (
        _CLUSTER.maintenance_hours
    )

    def cluster(self) -> Cluster:
        """Return the model's parameters. Raises `InputError`."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(Cluster)}
        return Cluster(**{name: value for name, value in given.items() if value is not None}).check()


@settings_class
class Goodput(ClusterOfChips, Seeded, Reported):
    """Settings of `isthmus simulate goodput`."""

    chips: Annotated[
        list[int] | None, Setting("numbers of chips (150000 to 2400000, doubling)", metavar="N", flag_only=True)
    ] = None
    learners: Annotated[
        list[int] | None,
        Setting(
            "numbers of learners in decoupled mode (1, 2, 4, 8 and 16, if each learner has a slice)",
            metavar="M",
            flag_only=True,
        ),
    ] = None
    failures: Annotated[int, Setting("failures in each of 20 repetitions of a configuration", metavar="N", ge=1)] = 4000
    check: Annotated[
        str | None,
        Setting(
            "compare the goodput of a recorded run with the model's prediction instead", metavar="RUN", flag_only=True
        ),
    ] = None
    sensitivity: Annotated[
        bool, Setting("show how the results change with each parameter that was not published", flag_only=True)
    ] = False
    plot: Annotated[str | None, Setting("draw goodput against chips", metavar="FILE", flag_only=True)] = None


@settings_class
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
        list[float] | None, Setting("also compute the utilisation at these bandwidths", metavar="GBIT", flag_only=True)
    ] = None
    latency: Annotated[float, Setting("one-way latency, in seconds", metavar="S", ge=0)] = 0.0
    sync_every: Annotated[int, Setting("steps between two syncs of one fragment", metavar="H", ge=1)] = 24
    fragments: Annotated[int, Setting("fragments of the model", metavar="P", ge=1)] = 24
    overlap: Annotated[
        float, Setting("steps allowed from a fragment's upload to its new version", metavar="TAU", ge=0)
    ] = 2.0
    plot: Annotated[str | None, Setting("draw bandwidth against utilisation", metavar="FILE", flag_only=True)] = None


_ISLAND = Island(name="")


@settings_class
class Plan(Reported):
    """Settings of `isthmus plan`."""

    params: Annotated[
        float | None, Setting("parameters of the model, e.g. 2.9e9", metavar="N", gt=0, flag_only=True)
    ] = None
    model: Annotated[
        str | None,
        Setting(
            "instead of --params: function that returns the model, whose parameters are counted",
            metavar="PACKAGE.MODULE:FUNCTION",
        ),
    ] = None
    islands: Annotated[
        str | None,
        Setting(
            "TOML file: params, store_region and a [[learner]] table for each kind of learner",
            metavar="FILE",
            flag_only=True,
        ),
    ] = None
    learners: Annotated[
        int | None, Setting("without --islands: number of equal learners (8)", metavar="M", ge=1, flag_only=True)
    ] = None
    step_seconds: Annotated[
        float | None,
        Setting("seconds per optimizer step (1, listed as an assumption)", metavar="S", gt=0, flag_only=True),
    ] = None
    gpus: Annotated[
        int | None,
        Setting("GPUs of all learners together (8 each, listed as an assumption)", metavar="N", ge=1, flag_only=True),
    ] = None
    up: Annotated[
        str | None,
        Setting(f"rate to the store, such as 200Mbit/s ({_ISLAND.up_gbit_s:g}Gbit/s)", metavar="RATE", check=gbit_s),
    ] = None
    down: Annotated[
        str | None,
        Setting(f"rate from the store, such as 25MB/s ({_ISLAND.down_gbit_s:g}Gbit/s)", metavar="RATE", check=gbit_s),
    ] = None
    latency: Annotated[
        float | None, Setting(f"one-way latency to the store, in seconds ({_ISLAND.latency_s:g})", metavar="S", ge=0)
    ] = None
    mtbf_hours: Annotated[
        float | None, Setting("mean hours between two failures of a learner (no failures)", metavar="H", gt=0)
    ] = None
    restart: Annotated[
        float | None,
        Setting(
            f"seconds to start after a failure, to which the plan adds those of reading the checkpoint ({START_S:g})",
            metavar="S",
            ge=0,
        ),
    ] = None
    compare: Annotated[
        bool,
        Setting(
            "compare with data parallel in one place and across the links: tokens learnt per day and per dollar",
            flag_only=True,
        ),
    ] = False
    details: Annotated[
        bool,
        Setting(
            "print the full reasons of merge and codec, and what --compare assumes",
            flag_only=True,
        ),
    ] = False
    step_tokens: Annotated[
        float | None,
        Setting(
            "tokens per step of a learner, for --compare (1e6, listed as an assumption)",
            metavar="N",
            gt=0,
            flag_only=True,
        ),
    ] = None
    prices: Annotated[
        str | None, Setting("TOML file of prices that replace the defaults (S3's, see docs/paper.md)", metavar="FILE")
    ] = None
    gpu_hour: Annotated[float | None, Setting("price of one GPU, in dollars per hour (2.5)", metavar="USD", ge=0)] = (
        None
    )
    cpu: Annotated[
        str | None, Setting("CPU class of the syncer in the built-in table of speeds (xeon-2023)", metavar="CLASS")
    ] = None
    speeds: Annotated[
        str | None, Setting("TOML file of measured speeds that replaces --cpu, as --measure writes it", metavar="FILE")
    ] = None
    measure: Annotated[
        str | None,
        Setting(
            "only measure the syncer's speed on this machine, and write it to a file for --speeds",
            metavar="FILE",
            flag_only=True,
        ),
    ] = None
    requests_per_hour: Annotated[
        float | None,
        Setting(
            "most requests of a learner to the store in an hour, if the bus is in the store: it sets the heartbeat",
            metavar="N",
            gt=0,
            flag_only=True,
        ),
    ] = None
    fragments: Annotated[
        int | None, Setting("fix the number of fragments (default: chosen)", metavar="P", ge=1, flag_only=True)
    ] = None
    sync_every: Annotated[
        int | None,
        Setting("fix the steps between two uploads of a fragment (default: chosen)", metavar="H", ge=1, flag_only=True),
    ] = None
    merge: Annotated[
        str | None, Setting("fix the merge rule (default: chosen)", choices=tuple(MergeRule), flag_only=True)
    ] = None
    iso_block: Annotated[
        int | None,
        Setting(
            "fix the longest side of a matrix that iso does not cut into blocks (default: chosen)",
            metavar="N",
            ge=0,
            flag_only=True,
        ),
    ] = None
    codec: Annotated[
        str | None,
        Setting("fix the codec of updates (default: chosen)", metavar=CODECS, check=require_codec, flag_only=True),
    ] = None
    codec_down: Annotated[
        str | None,
        Setting("fix the codec of versions (default: chosen)", metavar=CODECS, check=require_codec, flag_only=True),
    ] = None


@settings_class
class Bench(Reported):
    """Settings of `isthmus bench`."""

    what: Annotated[str, Setting("what to measure", choices=("all", *BENCHES, *APART), positional=True)]
    repeats: Annotated[
        int, Setting("number of times that everything is measured", metavar="N", ge=1, flag_only=True)
    ] = 7
    plot: Annotated[str | None, Setting("also draw a picture", metavar="PATH", flag_only=True)] = None
    tables: Annotated[
        list[str] | None,
        Setting(
            "measure nothing: write tables from these JSON files into the file of --into",
            metavar="FILE",
            flag_only=True,
        ),
    ] = None
    into: Annotated[str, Setting("with --tables: file whose tables are replaced", metavar="FILE", flag_only=True)] = (
        "docs/benchmarks.md"
    )
