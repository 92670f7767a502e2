"""The settings of each command. `isthmus_services.settings.listed` lists the commands."""

from typing import Annotated

from isthmus.format.rules import CHECKPOINT_S, KEPT_VERSIONS, MIN_AGE_S, Adoption, MemberRole
from isthmus_services.settings.resolve import Setting, settings_class
from isthmus_services.settings.shared import (
    AcceptingHoles,
    ArithmeticOfRun,
    InRun,
    ModelOfRun,
    OnBus,
    PaceOfRun,
    Participants,
    Reported,
    Seeded,
    Serving,
    Signed,
    TakingPart,
)

BUILT_IN_TRAINER = "isthmus.demo.trainer:train"

Gpu = Annotated[
    bool,
    Setting("compute the matrices of isotropic merges on a CUDA GPU, with bit-identical results (default: on the CPU)"),
]

CreateBucket = Annotated[bool, Setting("create the bucket if it does not exist")]

SharedKey = Annotated[
    bool, Setting("the key may be another member's, too; a syncer and a collector may always share one", flag_only=True)
]


@settings_class
class Demo(OnBus, ArithmeticOfRun, Seeded, Reported):
    """Settings of `isthmus demo`."""

    store: Annotated[
        str | None,
        Setting(
            "location of the run; if other machines can reach it or the bus, the run is signed, with keys in OUT/keys "
            "(OUT/run)",
            metavar="URL",
        ),
    ] = None
    create_bucket: CreateBucket = False
    steps: Annotated[int, Setting("optimizer steps per learner", ge=1)] = 1500
    learners: Annotated[int, Setting("learner processes", metavar="M", ge=1)] = 4
    data: Annotated[str | None, Setting("text file or folder (default: Python's standard library)", metavar="PATH")] = (
        None
    )
    kill_every: Annotated[float | None, Setting("SIGKILL a random learner every S seconds", metavar="S", gt=0)] = None
    kill_syncer_every: Annotated[float | None, Setting("SIGKILL the syncer every S seconds", metavar="S", gt=0)] = None
    out: Annotated[
        str,
        Setting("output folder; replaces files of an earlier demo, and no others", metavar="DIR"),
    ] = "out/demo"
    servers: Annotated[
        bool, Setting("start an S3 server and a Redis server on loopback, and use them", flag_only=True)
    ] = False
    bucket_only: Annotated[
        bool, Setting("with --servers: start no Redis; messages go through the S3 server, too", flag_only=True)
    ] = False
    board: Annotated[bool, Setting("open a live web page of the demo, and keep it open at the end", flag_only=True)] = (
        False
    )
    consortium: Annotated[
        bool,
        Setting(
            "three institutions with a charter, instead; of the other flags, --steps, --out and --json count",
            flag_only=True,
        ),
    ] = False


@settings_class
class Init(InRun, OnBus, TakingPart, ModelOfRun, ArithmeticOfRun, PaceOfRun, Seeded):
    """Settings of `isthmus init`."""

    create_bucket: CreateBucket = False


@settings_class
class Create(OnBus, Participants, ModelOfRun, ArithmeticOfRun, PaceOfRun, Seeded):
    """Settings of `isthmus create`."""

    run: Annotated[str, Setting("location of the run: s3://bucket/prefix", positional=True)]
    folder: Annotated[
        str, Setting("folder for the participants' folders, and for the servers' files", metavar="DIR", flag_only=True)
    ] = "participants"
    public_key: Annotated[
        list[str] | None,
        Setting(
            "the public key of a learner that has its own private key: a .pub file", metavar="NAME=FILE", flag_only=True
        ),
    ] = None
    remove: Annotated[
        list[str] | None,
        Setting(
            "a learner or a series that takes part no longer: remove the member, its users of store and bus, and its "
            "folder",
            metavar="NAME",
            flag_only=True,
        ),
    ] = None
    admin_profile: Annotated[
        str | None,
        Setting("profile of the store's administrator (default: the environment's credentials)", metavar="NAME"),
    ] = None
    admin_credentials: Annotated[
        str | None,
        Setting(
            "credentials file of the store's administrator, as AWS's clients read it (default: the environment's)",
            metavar="FILE",
        ),
    ] = None
    bus_users: Annotated[
        str | None,
        Setting(
            "file: write the bus's users to DIR/redis/users.acl, for its administrator to install; server: set them on "
            "the bus now, where --bus-user and its password are an administrator's; none: participants use the bus as "
            "--bus-user, all alike (default: as the folder was made, and file for a new one)",
            choices=("file", "server", "none"),
        ),
    ] = None


@settings_class
class Syncer(InRun, OnBus, TakingPart, PaceOfRun, AcceptingHoles, Serving):
    """Settings of `isthmus syncer`."""

    name: Annotated[str | None, Setting("name of this syncer; @hostname: the host's name (default: a random name)")] = (
        None
    )
    wait: Annotated[bool, Setting("wait until the run and the bus exist, instead of exiting with an error")] = False
    threads: Annotated[
        int | None, Setting("threads that compute a merge (default: one per core)", metavar="N", ge=1)
    ] = None
    gpu: Gpu = False
    collect: Annotated[
        float | None,
        Setting("collect garbage in this process every S seconds, as `isthmus gc --apply` does", metavar="S", gt=0),
    ] = None


@settings_class
class Learner(InRun, OnBus, TakingPart, Serving):
    """Settings of `isthmus learner`."""

    learner: Annotated[
        str,
        Setting(
            "unique name in the run; a restart under the same name resumes; @hostname: the host's name", metavar="NAME"
        ),
    ]
    train: Annotated[
        str, Setting("training function, called with an isthmus.demo.trainer.Task", metavar="PACKAGE.MODULE:FUNCTION")
    ] = BUILT_IN_TRAINER
    model: Annotated[
        str | None,
        Setting(
            "function that returns the run's model (default: the built-in model, if the run names it)",
            metavar="PACKAGE.MODULE:FUNCTION",
        ),
    ] = None
    model_of_run: Annotated[
        bool,
        Setting(
            "run the model function that the run names; use it only if you trust the creator of the run", flag_only=True
        ),
    ] = False
    steps: Annotated[int, Setting("total optimizer steps, over all restarts", ge=1)] = 1500
    data: Annotated[str | None, Setting("text file or folder (default: Python's standard library)", metavar="PATH")] = (
        None
    )
    shard: Annotated[
        str | None,
        Setting(
            "part I of M of the data, from 0 (default: all data, in an order drawn from the learner's name)",
            metavar="I/M",
        ),
    ] = None
    seed: Annotated[int | None, Setting("seed of the data order (default: the run's)", ge=0, le=(1 << 63) - 1)] = None
    adopt: Annotated[str, Setting("how a new version is combined with local work", choices=tuple(Adoption))] = (
        Adoption.OVERWRITE.value
    )
    checkpoint: Annotated[float, Setting("seconds between checkpoints", metavar="S", gt=0)] = CHECKPOINT_S
    wait_at_end: Annotated[
        float | None,
        Setting(
            "seconds to wait at the end for answers to the last updates, also for a syncer that is away (default: 20, "
            "while a syncer is heard)",
            metavar="S",
            ge=0,
        ),
    ] = None
    tensorboard: Annotated[
        str | None, Setting("write training metrics for TensorBoard to this folder", metavar="DIR")
    ] = None
    manifest: Annotated[
        str | None,
        Setting(
            "TOML file that states what this learner trains and on what: code, configuration, data sources",
            metavar="FILE",
        ),
    ] = None
    takeover: Annotated[
        bool, Setting("end another process that still trains under this name, and go on in its place", flag_only=True)
    ] = False


@settings_class
class Status(InRun, OnBus, AcceptingHoles, Reported):
    """Settings of `isthmus status`."""

    ledger: Annotated[
        bool, Setting("also show each learner's ledger by fragment, from its newest checkpoint", flag_only=True)
    ] = False
    watch: Annotated[bool, Setting("show a live view until interrupted", flag_only=True)] = False
    plot: Annotated[
        str | None,
        Setting("draw the measurements that followers stored for each version", metavar="FILE", flag_only=True),
    ] = None
    check: Annotated[
        bool,
        Setting(
            "exit with status 1 unless the updates of every live learner are merged, or all learners are done; "
            "docs/when-it-rings.md explains each sentence",
            flag_only=True,
        ),
    ] = False
    expect: Annotated[
        int | None, Setting("expected number of live learners; fewer count as a problem", metavar="N", ge=1)
    ] = None


@settings_class
class Board(InRun, OnBus, AcceptingHoles):
    """Settings of `isthmus board`."""

    http: Annotated[
        str,
        Setting(
            "address to serve the page on; it requires a token if other machines can reach it", metavar="HOST:PORT"
        ),
    ] = "127.0.0.1:8470"
    forwarded: Annotated[
        bool,
        Setting("require no token: users reach the page only through a forwarded port (Docker, kubectl, ssh)"),
    ] = False
    board_token: Annotated[str | None, Setting("token that a browser must send (random, and printed)", secret=True)] = (
        None
    )
    board_token_file: Annotated[str | None, Setting("file that holds the token", metavar="FILE")] = None
    export: Annotated[
        str | None,
        Setting("write the page to one file that opens offline, then exit", metavar="FILE", flag_only=True),
    ] = None
    force: Annotated[bool, Setting("replace existing output", flag_only=True)] = False
    cache: Annotated[
        str | None,
        Setting("cache folder for data read from the log (beside a run in a folder, else ~/.cache)", metavar="DIR"),
    ] = None
    prices: Annotated[
        str | None, Setting("TOML file of prices that replace the defaults (S3's, see docs/paper.md)", metavar="FILE")
    ] = None
    gpu_hour: Annotated[float | None, Setting("price of one GPU, in dollars per hour (2.5)", metavar="USD", ge=0)] = (
        None
    )
    learner_gpus: Annotated[
        int | None, Setting("GPUs per learner, to compute the cost (none)", metavar="N", ge=1, flag_only=True)
    ] = None


@settings_class
class Doctor(InRun, OnBus, AcceptingHoles, Signed, Reported):
    """Settings of `isthmus doctor`."""

    role: Annotated[
        str,
        Setting(
            "role whose permissions are checked: actions that must succeed, and actions that must be denied",
            choices=("operator", "owner", "syncer", "collector", "learner", "follower", "reader"),
        ),
    ] = "operator"
    learner: Annotated[str, Setting("with --role learner: the learner's name", metavar="NAME")] = "doctor"
    series: Annotated[
        str, Setting("with --role follower: the series that it writes", metavar="NAME", flag_only=True)
    ] = "doctor"
    size: Annotated[float, Setting("MiB to transfer when measuring the bandwidth", metavar="MIB", gt=0, le=1024)] = 8.0


@settings_class
class Replay(InRun, Reported):
    """Settings of `isthmus replay`."""

    fragment: Annotated[list[int] | None, Setting("only these fragments (all)", metavar="P", flag_only=True)] = None
    first: Annotated[int, Setting("first version to compare", name="from", metavar="V", flag_only=True)] = 1
    last: Annotated[
        int | None, Setting("last version to compare (the newest)", name="to", metavar="V", flag_only=True)
    ] = None
    threads: Annotated[int, Setting("number of threads, and of fragments processed at once", metavar="N", ge=1)] = 2
    gpu: Gpu = False
    set: Annotated[
        list[str] | None,
        Setting(
            "fold under another rule: merge, merge.embeddings, trim, outer.lr, outer.momentum, quorum, grace, "
            "overlap, staleness; or without=LEARNER",
            metavar="NAME=VALUE",
            flag_only=True,
        ),
    ] = None
    merge: Annotated[
        str | None,
        Setting(
            "fold with a function of your own in place of the recorded merge rules",
            metavar="MODULE:FUNCTION",
            flag_only=True,
            once=True,
        ),
    ] = None
    export: Annotated[
        str | None,
        Setting(
            "with --set or --merge: write the resulting model to a safetensors file", metavar="FILE", flag_only=True
        ),
    ] = None
    force: Annotated[bool, Setting("let --export replace an existing file", flag_only=True)] = False
    exec: Annotated[
        str | None,
        Setting(
            "with --set or --merge: command that prints a held-out loss of the model in the folder ISTHMUS_CUT_DIR; it "
            "runs for the recorded model and for the resulting one",
            metavar="CMD",
            flag_only=True,
        ),
    ] = None
    plot: Annotated[
        str | None,
        Setting(
            "with --set or --merge: draw how far the result departs from the recorded run",
            metavar="FILE",
            flag_only=True,
        ),
    ] = None
    trace: Annotated[
        str | None, Setting("write a timeline of the commits for Perfetto", metavar="FILE", flag_only=True)
    ] = None


@settings_class
class Audit(InRun, Reported):
    """Settings of `isthmus audit`."""

    html: Annotated[
        str | None,
        Setting("write the report as one page that opens offline", metavar="FILE", flag_only=True),
    ] = None
    sign: Annotated[
        str | None,
        Setting(
            "owner's private key that signs the report's files, for ssh-keygen -Y verify",
            metavar="KEY",
            flag_only=True,
        ),
    ] = None
    period: Annotated[
        float | None,
        Setting("length of a period (a 24th of the run's time)", metavar="HOURS", gt=0.0, flag_only=True),
    ] = None
    influence: Annotated[
        list[str] | None,
        Setting(
            "members and institutions; the newest rounds are folded again without the updates of each, to tell how far "
            "the model would be from the recorded one",
            metavar="MEMBER",
            flag_only=True,
        ),
    ] = None
    last: Annotated[
        int,
        Setting("with --influence: newest rounds of each fragment; 0: all", metavar="N", ge=0, flag_only=True),
    ] = 16
    exec: Annotated[
        str | None,
        Setting(
            "with --influence: command that prints a held-out loss of the model in the folder ISTHMUS_CUT_DIR, as "
            "for isthmus follow",
            metavar="CMD",
            flag_only=True,
        ),
    ] = None
    threads: Annotated[int, Setting("number of threads, and of fragments processed at once", metavar="N", ge=1)] = 2
    gpu: Gpu = False


@settings_class
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


@settings_class
class Export(InRun, Reported):
    """Settings of `isthmus export`."""

    out: Annotated[
        str | None,
        Setting("write a safetensors file, e.g. model.safetensors", short="-o", metavar="FILE", flag_only=True),
    ] = None
    hf: Annotated[str | None, Setting("write a folder that from_pretrained reads", metavar="DIR", flag_only=True)] = (
        None
    )
    dcp: Annotated[
        str | None, Setting("write a folder that torch.distributed.checkpoint reads", metavar="DIR", flag_only=True)
    ] = None
    model: Annotated[
        str | None,
        Setting(
            "with --hf: function that returns the run's module; its save_pretrained writes the folder",
            metavar="PACKAGE.MODULE:FUNCTION",
            flag_only=True,
        ),
    ] = None
    dtype: Annotated[
        str | None, Setting("data type of all tensors (their own)", choices=("float32", "bfloat16", "float16"))
    ] = None
    largest: Annotated[float, Setting("with --hf: maximum size of a file, in GB", metavar="GB", gt=0)] = 5.0
    version: Annotated[
        int | None, Setting("export this version of every fragment (the newest of each)", metavar="V", flag_only=True)
    ] = None
    at: Annotated[
        str | None,
        Setting(
            "export the model as of this time: 2026-11-21T14:30:00, or seconds since 1970",
            metavar="TIME",
            flag_only=True,
        ),
    ] = None
    promoted: Annotated[
        bool, Setting("only a promoted version: --version, or the newest (isthmus promote)", flag_only=True)
    ] = False
    force: Annotated[bool, Setting("replace existing output", flag_only=True)] = False


@settings_class
class Follow(InRun, Signed):
    """Settings of `isthmus follow`."""

    into: Annotated[str | None, Setting("write each cut into this folder", metavar="DIR", flag_only=True)] = None
    exec: Annotated[
        str | None,
        Setting(
            "command to run after each cut; ISTHMUS_CUT and ISTHMUS_CUT_DIR hold its version and folder",
            metavar="CMD",
            flag_only=True,
        ),
    ] = None
    every: Annotated[
        int, Setting("follow only cuts whose version is a multiple of N", metavar="N", ge=1, flag_only=True)
    ] = 1
    version: Annotated[
        int | None,
        Setting("follow only the cut of this version, and then exit", metavar="V", ge=0, flag_only=True),
    ] = None
    series: Annotated[
        str | None,
        Setting(
            "store the last number that --exec prints as a series of this name, for `isthmus status`",
            metavar="NAME",
            flag_only=True,
        ),
    ] = None
    name: Annotated[
        str | None,
        Setting(
            "with --series: the member that measures; needed if the run's charter has a gate",
            metavar="NAME",
            flag_only=True,
        ),
    ] = None
    promoted: Annotated[
        bool, Setting("follow only promoted cuts, and nothing else (isthmus promote)", flag_only=True)
    ] = False
    fragment: Annotated[list[int] | None, Setting("only these fragments (all)", metavar="P", flag_only=True)] = None
    mixed: Annotated[
        bool, Setting("follow each fragment at its newest version, even if versions differ", flag_only=True)
    ] = False
    at_most_every: Annotated[float, Setting("minimum seconds between two cuts", metavar="S", ge=0)] = 0.0
    dtype: Annotated[
        str | None, Setting("data type of all tensors (their own)", choices=("float32", "bfloat16", "float16"))
    ] = None
    largest: Annotated[float, Setting("maximum size of a file, in GB", metavar="GB", gt=0)] = 5.0
    keep: Annotated[int, Setting("number of newest cuts to keep in DIR", metavar="N", ge=1, flag_only=True)] = 2
    cuts: Annotated[int | None, Setting("exit after this many cuts (never)", metavar="N", ge=1, flag_only=True)] = None


@settings_class
class Promote(InRun, Signed, Reported):
    """Settings of `isthmus promote`."""

    version: Annotated[
        int | None,
        Setting(
            "promote this version of every fragment (the newest that enough evaluators have measured)",
            metavar="V",
            ge=0,
            flag_only=True,
        ),
    ] = None
    name: Annotated[
        str | None, Setting("the member that promotes: a promoter of the charter", metavar="NAME", flag_only=True)
    ] = None
    list: Annotated[
        bool, Setting("print all promotions, with their numbers and whether they hold; promote nothing", flag_only=True)
    ] = False


@settings_class
class Gc(InRun, Signed, AcceptingHoles, Reported):
    """Settings of `isthmus gc`."""

    keep: Annotated[int, Setting("newest versions of each fragment that must remain foldable", metavar="N", ge=1)] = (
        KEPT_VERSIONS
    )
    min_age: Annotated[float, Setting("keep objects that are younger than S seconds", metavar="S", ge=0)] = MIN_AGE_S
    apply: Annotated[bool, Setting("delete and pack; without this flag, only report", flag_only=True)] = False
    every: Annotated[
        float | None, Setting("with --apply: repeat every S seconds until interrupted", metavar="S", gt=0)
    ] = None


@settings_class
class Heal(InRun, Signed, Reported):
    """Settings of `isthmus heal`."""

    fragment: Annotated[list[int] | None, Setting("only these fragments (all)", metavar="P", flag_only=True)] = None
    apply: Annotated[bool, Setting("restart the fragments; without this flag, only report", flag_only=True)] = False


@settings_class
class Access(Participants):
    """Settings of `isthmus access`."""

    folder: Annotated[str, Setting("output folder, e.g. a volume that services mount read-only", positional=True)]
    run: Annotated[
        str | None,
        Setting("also write the store's policies for this run: s3://bucket/prefix", metavar="URL", flag_only=True),
    ] = None
    json: Annotated[
        str | None, Setting("also write the list of files to this path, as JSON", metavar="PATH", flag_only=True)
    ] = None


@settings_class
class KeysNew:
    """Settings of `isthmus keys new`."""

    name: Annotated[str, Setting("name of the key, and of its two files", positional=True, flag_only=True)]
    folder: Annotated[str, Setting("folder for the two files", metavar="DIR", flag_only=True)] = "~/.isthmus"


@settings_class
class KeysShow:
    """Settings of `isthmus keys show`."""

    file: Annotated[str, Setting("a private key, or a .pub file", positional=True, flag_only=True)]


@settings_class
class KeysVerify(InRun):
    """Settings of `isthmus keys verify`."""

    object: Annotated[str, Setting("path of the object in the run", positional=True, flag_only=True)]
    into: Annotated[
        str | None,
        Setting("write the files that ssh-keygen -Y verify reads to this folder", metavar="DIR", flag_only=True),
    ] = None


@settings_class
class CharterShow(InRun, Reported):
    """Settings of `isthmus charter show`."""


@settings_class
class CharterPropose(InRun, Reported, Signed):
    """Settings of `isthmus charter propose`."""

    file: Annotated[
        str,
        Setting(
            "TOML file with the charter, and the members' keys (docs/consortium.md)", positional=True, flag_only=True
        ),
    ]
    hours: Annotated[float, Setting("hours that owners have to approve it", metavar="H", gt=0, flag_only=True)] = 24.0


@settings_class
class CharterApprove(InRun, Signed):
    """Settings of `isthmus charter approve`."""

    proposal: Annotated[
        str, Setting("id of the proposal, as `isthmus charter show` prints it", positional=True, flag_only=True)
    ]
    expect: Annotated[
        str | None,
        Setting(
            "your copy of the charter: approve only if the proposal has exactly this charter and the members it states",
            metavar="FILE",
            flag_only=True,
        ),
    ] = None
    with_earlier: Annotated[
        bool,
        Setting("with --expect: approve a first charter although commits were made before it", flag_only=True),
    ] = False
    hours: Annotated[
        float,
        Setting(
            "refuse a change that leaves more to the membership before it than the run makes in twice so many hours",
            metavar="H",
            gt=0,
            flag_only=True,
        ),
    ] = 24.0


@settings_class
class MembersList(InRun, Reported):
    """Settings of `isthmus members list`."""

    allowed_signers: Annotated[
        bool, Setting("print the members as an allowed-signers file for ssh-keygen -Y verify -f", flag_only=True)
    ] = False


@settings_class
class MembersAdd(InRun, Reported, Signed):
    """Settings of `isthmus members add`."""

    shared_key: SharedKey = False
    name: Annotated[
        str,
        Setting(
            "name of the member; acme-* stands for every name that starts with acme-", positional=True, flag_only=True
        ),
    ]
    public_key: Annotated[
        str, Setting("the member's public key: a .pub file, or the line in it", metavar="KEY", flag_only=True)
    ]
    member_role: Annotated[
        str, Setting("role of the member", name="as", choices=tuple(MemberRole), metavar="ROLE", flag_only=True)
    ] = MemberRole.LEARNER.value
    bucket: Annotated[
        str | None,
        Setting(
            "bucket near the member, for its updates and copies of published values: s3://BUCKET/PREFIX?region=NAME",
            metavar="URL",
            flag_only=True,
        ),
    ] = None


@settings_class
class MembersRemove(InRun, Reported, Signed):
    """Settings of `isthmus members remove`."""

    name: Annotated[str, Setting("name of the member", positional=True, flag_only=True)]
    hours: Annotated[
        float,
        Setting(
            "in a run with a charter: hours that owners have to approve it; until then commits of the members before "
            "it count",
            metavar="H",
            gt=0,
            flag_only=True,
        ),
    ] = 24.0


@settings_class
class MembersRotate(InRun, Reported, Signed):
    """Settings of `isthmus members rotate`."""

    shared_key: SharedKey = False
    name: Annotated[
        str | None,
        Setting("name of the member whose key or bucket changes", name="member", metavar="NAME", flag_only=True),
    ] = None
    public_key: Annotated[
        str | None, Setting("with --member: the member's new public key", metavar="KEY", flag_only=True)
    ] = None
    bucket: Annotated[
        str | None,
        Setting(
            "with --member: the member's new bucket; '' for the run's own (updates are found in both)",
            metavar="URL",
            flag_only=True,
        ),
    ] = None
    no_checkpoints: Annotated[
        bool,
        Setting(
            "with --public-key: do not resume from checkpoints that the old key signed, e.g. if it was stolen",
            flag_only=True,
        ),
    ] = False
    successor: Annotated[str | None, Setting("private key of the run's new owner", metavar="FILE", flag_only=True)] = (
        None
    )
