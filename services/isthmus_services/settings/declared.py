"""The commands: the help and the settings of each. Its code is in a module of its own, imported when it is used."""

from dataclasses import dataclass
from typing import Annotated

from isthmus.format.rules import CHECKPOINT_S, KEPT_VERSIONS, MIN_AGE_S, Adoption, MemberRole
from isthmus_services.settings.command import commands_of
from isthmus_services.settings.resolve import Setting
from isthmus_services.settings.shared import (
    ArithmeticOfRun,
    InRun,
    OnBus,
    PaceOfRun,
    Reported,
    Seeded,
    Serving,
    Signed,
    TakingPart,
)

BUILT_IN_TRAINER = "isthmus.demo.trainer:train"

Gpu = Annotated[
    bool, Setting("compute the matrices of isotropic merges on a CUDA GPU, with the same bits (default: on the cores)")
]


@dataclass(frozen=True, kw_only=True)
class Demo(OnBus, ArithmeticOfRun, Seeded, Reported):
    """Settings of `isthmus demo`."""

    store: Annotated[str | None, Setting("where the run lives (OUT/run)", metavar="URL")] = None
    steps: Annotated[int, Setting("optimizer steps per learner", ge=1)] = 1500
    learners: Annotated[int, Setting("learner processes", metavar="M", ge=1)] = 4
    data: Annotated[str | None, Setting("text file or folder (default: Python's standard library)", metavar="PATH")] = (
        None
    )
    kill_every: Annotated[float | None, Setting("SIGKILL a random learner every S seconds", metavar="S", gt=0)] = None
    kill_syncer_every: Annotated[float | None, Setting("SIGKILL the syncer every S seconds", metavar="S", gt=0)] = None
    out: Annotated[
        str,
        Setting(
            "where everything is written; what an earlier demo left there is replaced, nothing else", metavar="DIR"
        ),
    ] = "out/demo"
    servers: Annotated[bool, Setting("start an S3 server and a Redis on loopback and use them", flag_only=True)] = False
    board: Annotated[bool, Setting("open a page that shows it live, and go on showing it", flag_only=True)] = False


@dataclass(frozen=True, kw_only=True)
class Init(InRun, TakingPart, ArithmeticOfRun, PaceOfRun, Seeded):
    """Settings of `isthmus init`."""

    model: Annotated[
        str | None, Setting("returns a module (the built-in byte GPT)", metavar="PACKAGE.MODULE:FUNCTION")
    ] = None
    source: Annotated[
        str | None,
        Setting("initial parameters: a safetensors file, or a folder", name="from", metavar="PATH"),
    ] = None
    vectors: Annotated[
        list[str] | None, Setting("patterns of names of tensors that merge iso leaves to rda", metavar="NAME")
    ] = None
    create_bucket: Annotated[bool, Setting("create the bucket where it is missing")] = False


@dataclass(frozen=True, kw_only=True)
class Syncer(InRun, OnBus, TakingPart, PaceOfRun, Serving):
    """Settings of `isthmus syncer`."""

    name: Annotated[str | None, Setting("name of this syncer; @hostname takes the host's (default: made up)")] = None
    wait: Annotated[bool, Setting("wait for the run, or the bus, where there is none yet, instead of ending")] = False
    threads: Annotated[
        int | None, Setting("threads that share a merge (default: as many as there are cores)", metavar="N", ge=1)
    ] = None
    gpu: Gpu = False
    collect: Annotated[
        float | None,
        Setting("collect garbage here, every S seconds, as `isthmus gc --apply` does", metavar="S", gt=0),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Learner(InRun, OnBus, TakingPart, Serving):
    """Settings of `isthmus learner`."""

    learner: Annotated[
        str, Setting("unique in the run, goes on where it stopped; @hostname takes the host's", metavar="NAME")
    ]
    train: Annotated[str, Setting("called with an isthmus.demo.trainer.Task", metavar="PACKAGE.MODULE:FUNCTION")] = (
        BUILT_IN_TRAINER
    )
    model: Annotated[
        str | None,
        Setting(
            "makes the run's model (default: the built-in one, if the run says so)", metavar="PACKAGE.MODULE:FUNCTION"
        ),
    ] = None
    model_of_run: Annotated[
        bool,
        Setting("run whatever code the run names as what makes its model: trust whoever created it", flag_only=True),
    ] = False
    steps: Annotated[int, Setting("optimizer steps, over all restarts", ge=1)] = 1500
    data: Annotated[str | None, Setting("text file or folder (default: Python's standard library)", metavar="PATH")] = (
        None
    )
    shard: Annotated[
        str | None,
        Setting("this learner's part of the data (default: all of it, in an order of its own)", metavar="I/M"),
    ] = None
    seed: Annotated[int | None, Setting("seed of the data order (default: the run's)", ge=0, le=(1 << 63) - 1)] = None
    adopt: Annotated[str, Setting("what a new version does to local work", choices=tuple(Adoption))] = (
        Adoption.OVERWRITE.value
    )
    checkpoint: Annotated[float, Setting("seconds between checkpoints", metavar="S", gt=0)] = CHECKPOINT_S
    tensorboard: Annotated[str | None, Setting("write training metrics there for TensorBoard", metavar="DIR")] = None


@dataclass(frozen=True, kw_only=True)
class Status(InRun, OnBus, Reported):
    """Settings of `isthmus status`."""

    ledger: Annotated[
        bool, Setting("every learner's ledger by fragment, as of its newest checkpoint", flag_only=True)
    ] = False
    watch: Annotated[bool, Setting("a live view, until interrupted", flag_only=True)] = False
    plot: Annotated[
        str | None, Setting("draw what followers have measured of each version", metavar="FILE", flag_only=True)
    ] = None
    check: Annotated[
        bool, Setting("exit with 1 unless every learner that is heard is merged, or all are done", flag_only=True)
    ] = False
    expect: Annotated[
        int | None, Setting("learners that should be heard: with fewer there is something to see to", metavar="N", ge=1)
    ] = None


@dataclass(frozen=True, kw_only=True)
class Board(InRun, OnBus):
    """Settings of `isthmus board`."""

    http: Annotated[
        str,
        Setting("serve it there; where others reach it, it asks for a token", metavar="HOST:PORT"),
    ] = "127.0.0.1:8470"
    forwarded: Annotated[
        bool,
        Setting("no token: others reach it only through a port forwarded to their own machine (Docker, kubectl, ssh)"),
    ] = False
    board_token: Annotated[str | None, Setting("what a browser must know (made up, and printed)", secret=True)] = None
    board_token_file: Annotated[str | None, Setting("file that holds it", metavar="FILE")] = None
    export: Annotated[
        str | None,
        Setting("write the page to one file, which opens offline, and end", metavar="FILE", flag_only=True),
    ] = None
    force: Annotated[bool, Setting("replace what is there", flag_only=True)] = False
    cache: Annotated[
        str | None,
        Setting("what was read of the log is kept there (beside a run in a folder, else ~/.cache)", metavar="DIR"),
    ] = None
    prices: Annotated[
        str | None, Setting("TOML of prices that differ from ours (S3's, see docs/paper.md)", metavar="FILE")
    ] = None
    gpu_hour: Annotated[float | None, Setting("dollars for an hour of one GPU (2.5)", metavar="USD", ge=0)] = None
    learner_gpus: Annotated[
        int | None, Setting("GPUs of one learner, for the cost (none)", metavar="N", ge=1, flag_only=True)
    ] = None


@dataclass(frozen=True, kw_only=True)
class Doctor(InRun, OnBus, Reported):
    """Settings of `isthmus doctor`."""

    role: Annotated[
        str,
        Setting(
            "whose permissions to check: what it must be able to do, and what it must not",
            choices=("operator", "owner", "syncer", "collector", "learner", "follower", "reader"),
        ),
    ] = "operator"
    learner: Annotated[str, Setting("with --role learner: its name", metavar="NAME")] = "doctor"
    series: Annotated[str, Setting("with --role follower: the series it writes", metavar="NAME", flag_only=True)] = (
        "doctor"
    )
    size: Annotated[float, Setting("MiB to measure the bandwidth with", metavar="MIB", gt=0, le=1024)] = 8.0


@dataclass(frozen=True, kw_only=True)
class Replay(InRun, Reported):
    """Settings of `isthmus replay`."""

    fragment: Annotated[list[int] | None, Setting("only these (all)", metavar="P", flag_only=True)] = None
    first: Annotated[int, Setting("first version to compare", name="from", metavar="V", flag_only=True)] = 1
    last: Annotated[int | None, Setting("last version (the newest)", name="to", metavar="V", flag_only=True)] = None
    threads: Annotated[int, Setting("threads, and fragments at once", metavar="N", ge=1)] = 2
    gpu: Gpu = False
    set: Annotated[
        list[str] | None,
        Setting(
            "what if: merge, merge.embeddings, trim, outer.lr, outer.momentum, quorum, grace, overlap, staleness",
            metavar="NAME=VALUE",
            flag_only=True,
        ),
    ] = None
    export: Annotated[
        str | None, Setting("with --set: write the other model as safetensors", metavar="FILE", flag_only=True)
    ] = None
    force: Annotated[bool, Setting("let --export replace a file", flag_only=True)] = False
    plot: Annotated[
        str | None, Setting("with --set: draw how far the trajectory departs", metavar="FILE", flag_only=True)
    ] = None
    trace: Annotated[str | None, Setting("write a timeline that opens in Perfetto", metavar="FILE", flag_only=True)] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class Explain(InRun, Reported):
    """Settings of `isthmus explain`."""

    what: Annotated[
        str,
        Setting(
            "a commit (FRAGMENT/VERSION or its key), an update (FRAGMENT/LEARNER/BASE or its key), or a FRAGMENT",
            positional=True,
            flag_only=True,
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Export(InRun, Reported):
    """Settings of `isthmus export`."""

    out: Annotated[
        str | None, Setting("a safetensors file, e.g. model.safetensors", short="-o", metavar="FILE", flag_only=True)
    ] = None
    hf: Annotated[str | None, Setting("a folder that from_pretrained reads", metavar="DIR", flag_only=True)] = None
    dcp: Annotated[
        str | None, Setting("a folder that torch.distributed.checkpoint reads", metavar="DIR", flag_only=True)
    ] = None
    model: Annotated[
        str | None,
        Setting(
            "with --hf: returns the run's module, whose save_pretrained writes it",
            metavar="PACKAGE.MODULE:FUNCTION",
            flag_only=True,
        ),
    ] = None
    dtype: Annotated[str | None, Setting("of all tensors (their own)", choices=("float32", "bfloat16", "float16"))] = (
        None
    )
    largest: Annotated[float, Setting("with --hf: GB a file has at most", metavar="GB", gt=0)] = 5.0
    version: Annotated[
        int | None, Setting("this version of every fragment (the newest of each)", metavar="V", flag_only=True)
    ] = None
    at: Annotated[
        str | None,
        Setting("as it was then: 2026-11-21T14:30:00, or seconds since 1970", metavar="TIME", flag_only=True),
    ] = None
    force: Annotated[bool, Setting("replace what is there", flag_only=True)] = False


@dataclass(frozen=True, kw_only=True)
class Follow(InRun, Signed):
    """Settings of `isthmus follow`."""

    into: Annotated[str | None, Setting("write each cut into this folder", metavar="DIR", flag_only=True)] = None
    exec: Annotated[
        str | None,
        Setting("run this after each; ISTHMUS_CUT and ISTHMUS_CUT_DIR say which", metavar="CMD", flag_only=True),
    ] = None
    every: Annotated[int, Setting("cuts whose version is a multiple of N", metavar="N", ge=1, flag_only=True)] = 1
    series: Annotated[
        str | None,
        Setting("keep the number that --exec prints last: `isthmus status` shows it", metavar="NAME", flag_only=True),
    ] = None
    fragment: Annotated[list[int] | None, Setting("only these (all)", metavar="P", flag_only=True)] = None
    mixed: Annotated[bool, Setting("each fragment at its newest version", flag_only=True)] = False
    at_most_every: Annotated[float, Setting("seconds between two cuts, at least", metavar="S", ge=0)] = 0.0
    dtype: Annotated[str | None, Setting("of all tensors (their own)", choices=("float32", "bfloat16", "float16"))] = (
        None
    )
    largest: Annotated[float, Setting("GB a file has at most", metavar="GB", gt=0)] = 5.0
    keep: Annotated[int, Setting("cuts that stay in DIR", metavar="N", ge=1, flag_only=True)] = 2
    cuts: Annotated[int | None, Setting("end after so many (never)", metavar="N", ge=1, flag_only=True)] = None


@dataclass(frozen=True, kw_only=True)
class Gc(InRun, Signed, Reported):
    """Settings of `isthmus gc`."""

    keep: Annotated[int, Setting("versions of each fragment that stay foldable", metavar="N", ge=1)] = KEPT_VERSIONS
    min_age: Annotated[float, Setting("leave what was written less than S seconds ago", metavar="S", ge=0)] = MIN_AGE_S
    apply: Annotated[bool, Setting("do it", flag_only=True)] = False
    every: Annotated[
        float | None, Setting("with --apply: do it again every S seconds, for ever", metavar="S", gt=0)
    ] = None


@dataclass(frozen=True, kw_only=True)
class Heal(InRun, Signed, Reported):
    """Settings of `isthmus heal`."""

    fragment: Annotated[list[int] | None, Setting("only these (all)", metavar="P", flag_only=True)] = None
    apply: Annotated[bool, Setting("do it", flag_only=True)] = False


@dataclass(frozen=True, kw_only=True)
class Access:
    """Settings of `isthmus access`."""

    folder: Annotated[str, Setting("where the files go, e.g. a volume that services mount read-only", positional=True)]
    run: Annotated[
        str | None,
        Setting("write the policies of its store too, for this run: s3://bucket/prefix", metavar="URL", flag_only=True),
    ] = None
    learner: Annotated[
        list[str] | None, Setting("a learner; several times for several", metavar="NAME", flag_only=True)
    ] = None
    series: Annotated[
        list[str] | None,
        Setting("a follower that writes this series (isthmus follow --series)", metavar="NAME", flag_only=True),
    ] = None
    strict: Annotated[
        bool,
        Setting(
            "no learner reads another's checkpoints and no follower any: a newcomer warms up with fresh moments, a "
            "followed model has no running statistics",
            flag_only=True,
        ),
    ] = False
    json: Annotated[str | None, Setting("write which files there are as JSON too", metavar="PATH", flag_only=True)] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class KeysNew:
    """Settings of `isthmus keys new`."""

    name: Annotated[str, Setting("what it is called, and what its files are", positional=True, flag_only=True)]
    folder: Annotated[str, Setting("where its two files go", metavar="DIR", flag_only=True)] = "~/.isthmus"


@dataclass(frozen=True, kw_only=True)
class KeysShow:
    """Settings of `isthmus keys show`."""

    file: Annotated[str, Setting("a private key, or a .pub file", positional=True, flag_only=True)]


@dataclass(frozen=True, kw_only=True)
class KeysVerify(InRun):
    """Settings of `isthmus keys verify`."""

    object: Annotated[str, Setting("an object's key in the run", positional=True, flag_only=True)]
    into: Annotated[
        str | None, Setting("write there what ssh-keygen -Y verify checks", metavar="DIR", flag_only=True)
    ] = None


@dataclass(frozen=True, kw_only=True)
class MembersList(InRun, Reported):
    """Settings of `isthmus members list`."""

    allowed_signers: Annotated[
        bool, Setting("print it as the file that ssh-keygen -Y verify -f reads", flag_only=True)
    ] = False


@dataclass(frozen=True, kw_only=True)
class MembersAdd(InRun, Signed):
    """Settings of `isthmus members add`."""

    name: Annotated[
        str,
        Setting("of the member; acme-* stands for every name that begins so", positional=True, flag_only=True),
    ]
    public_key: Annotated[str, Setting("its public key: a .pub file, or the line in it", metavar="KEY", flag_only=True)]
    member_role: Annotated[
        str, Setting("what it may do", name="as", choices=tuple(MemberRole), metavar="ROLE", flag_only=True)
    ] = MemberRole.LEARNER.value
    bucket: Annotated[
        str | None,
        Setting(
            "near it, for its updates and a copy of what is published: s3://BUCKET/PREFIX?region=NAME",
            metavar="URL",
            flag_only=True,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class MembersRemove(InRun, Signed):
    """Settings of `isthmus members remove`."""

    name: Annotated[str, Setting("of the member", positional=True, flag_only=True)]


@dataclass(frozen=True, kw_only=True)
class MembersRotate(InRun, Signed):
    """Settings of `isthmus members rotate`."""

    name: Annotated[
        str | None, Setting("of the member that has a new key or bucket", name="member", metavar="NAME", flag_only=True)
    ] = None
    public_key: Annotated[str | None, Setting("with --member: its new public key", metavar="KEY", flag_only=True)] = (
        None
    )
    bucket: Annotated[
        str | None,
        Setting(
            "with --member: its bucket from now on; '' for the run's own (its updates are found in both)",
            metavar="URL",
            flag_only=True,
        ),
    ] = None
    no_checkpoints: Annotated[
        bool,
        Setting(
            "with --public-key: nothing that the old key signed is gone on from, as where somebody has stolen it",
            flag_only=True,
        ),
    ] = False
    successor: Annotated[
        str | None, Setting("private key that owns the run from now on", metavar="FILE", flag_only=True)
    ] = None


FAMILIES = {
    "keys": "keys that sign: make one, look at one, see who signed an object",
    "members": "who may take part in a run: its owner says it, and all check it",
}

COMMANDS = commands_of(
    "isthmus_services",
    (
        ("", Demo, "train a small model with four learner processes, watch and report"),
        ("", Init, "create a run: its object and version 0"),
        ("", Syncer, "merge what learners announce; any number may run"),
        ("", Learner, "train with the built-in trainer or your own"),
        ("", Status, "versions, learners, who is behind and why, rejections, ledger; --watch: live"),
        ("", Board, "a page of the run, live and at any moment of its past; or as one file"),
        ("", Doctor, "check everything a run rests on, and say what to do"),
        ("", Replay, "fold the log again and compare every digest; under other rules; as a timeline"),
        ("", Explain, "the story of one update or one commit"),
        ("", Export, "write the global model as a safetensors file"),
        ("", Heal, "start a fragment again whose log cannot be folded any more (a dry run by default)"),
        ("", Follow, "bring every new version of the global model into a folder, or to a command"),
        ("", Gc, "delete objects that the run no longer needs, pack old commits; a dry run by default"),
        ("keys", KeysNew, "make an Ed25519 key as OpenSSH keeps it"),
        ("keys", KeysShow, "the public key and the fingerprint of a file"),
        ("keys", KeysVerify, "who signed an object of a run, and whether it may; for ssh-keygen, too"),
        ("members", MembersList, "who may take part, as what, and since when"),
        ("members", MembersAdd, "let a key take part"),
        ("members", MembersRemove, "let a member take part no longer, from a stated commit on"),
        ("members", MembersRotate, "give a member, or the run, another key"),
        ("", Access, "make the passwords, the ACL and the settings of Redis for a new installation"),
    ),
)
