"""The key each object of a run lives under."""

import re

from isthmus.format.records.fields import KEY_MAX, KEY_PATTERN, is_name

RUN_KEY = "run"
UPDATES, LEARNERS, SCRATCH, EVALUATIONS, MEMBERS = "updates/", "learners/", "scratch/", "evaluations/", "members/"


def update_key(fragment: int, learner: str, base: int, digest: bytes) -> str:
    """Key of an update."""
    return f"{updates_prefix(fragment, learner)}{base:012d}-{digest[:8].hex()}"


def updates_prefix(fragment: int, learner: str) -> str:
    """Where one learner's updates of a fragment live."""
    return f"{UPDATES}{fragment:05d}/{learner}/"


def value_key(fragment: int, version: int, digest: bytes) -> str:
    """Key of a published difference."""
    return f"{values_prefix(fragment)}{version:012d}-{digest[:8].hex()}"


def values_prefix(fragment: int) -> str:
    """Where the published differences of a fragment live."""
    return f"values/{fragment:05d}/"


def snapshot_key(fragment: int, version: int, digest: bytes) -> str:
    """Key of a full state."""
    return f"{snapshots_prefix(fragment)}{version:012d}-{digest[:8].hex()}"


def snapshots_prefix(fragment: int) -> str:
    """Where the full states of a fragment live."""
    return f"snapshots/{fragment:05d}/"


def commit_key(fragment: int, version: int) -> str:
    """Key of a commit. The only key that is not named after its content: creating it decides."""
    return f"{commits_prefix(fragment)}{version:012d}"


def commits_prefix(fragment: int) -> str:
    """Where the log of a fragment lives."""
    return f"commits/{fragment:05d}/"


def segment_key(fragment: int, first: int, digest: bytes) -> str:
    """Key of packed commits, by the first one's version."""
    return f"segments/{fragment:05d}/{first:012d}-{digest[:8].hex()}"


def claims_prefix(learner: str) -> str:
    """Where a learner's incarnations live."""
    return f"{LEARNERS}{learner}/"


def claim_key(learner: str, incarnation: int) -> str:
    """Key of the claim of one incarnation."""
    return f"{claims_prefix(learner)}{incarnation:06d}/claim"


def checkpoint_key(learner: str, incarnation: int, step: int, digest: bytes) -> str:
    """Key of a learner's checkpoint."""
    return f"{claims_prefix(learner)}{incarnation:06d}/checkpoints/{step:012d}-{digest[:8].hex()}"


def part_key(learner: str, incarnation: int, step: int, rank: int, digest: bytes) -> str:
    """Key of a part of a learner's checkpoint; `digest` is that of its head, which names those of all that is in it."""
    return f"{claims_prefix(learner)}{incarnation:06d}/checkpoints/parts/{step:012d}-{rank:05d}-{digest[:8].hex()}"


def members_key(version: int) -> str:
    """Key of a version of the membership: like commits named by its number alone, and like them only ever created."""
    return f"{MEMBERS}{version:012d}"


def evaluations_prefix(series: str) -> str:
    """Where a series of measurements of the global model lives."""
    return f"{EVALUATIONS}{series}/"


def evaluation_key(series: str, cut: int, digest: bytes) -> str:
    """Key of a measurement of one cut."""
    return f"{evaluations_prefix(series)}{cut:012d}-{digest[:8].hex()}"


_VERSIONED = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)+[0-9]{12}-[0-9a-f]{16}")


def can_be_named(word: str) -> bool:
    """Return whether an object of a run can lie under this."""
    return len(word) <= KEY_MAX and re.match(KEY_PATTERN, word) is not None


def is_versioned(key: str) -> bool:
    """Return whether a key ends as ours do, in a version and a digest; whatever else lies there is left alone."""
    return _VERSIONED.fullmatch(key) is not None


def commit_in(key: str) -> int:
    """Return the version that a commit's key names; 0 for any other key below `commits_prefix`."""
    name = key.rsplit("/", 1)[1]
    return int(name) if len(name) == 12 and name.isascii() and name.isdigit() else 0


def version_in(key: str) -> int:
    """Return the version (or base) in the last segment of an update, value or snapshot key."""
    return int(key.rsplit("/", 1)[1].split("-", 1)[0])


def learner_in(key: str) -> str:
    """Return the learner below whose prefix a key of an update, a claim or a checkpoint lies; empty where that is no
    name: listings show whatever strangers put there."""
    parts = key.split("/")
    name = parts[2:3] if key.startswith(UPDATES) else parts[1:2] if key.startswith(LEARNERS) else []
    return name[0] if name and is_name(name[0]) else ""


def incarnation_in(key: str) -> int:
    """Return the incarnation whose claim lies under this key, 0 where it is no claim's."""
    parts = key.split("/")
    if len(parts) != 4 or not (parts[2].isascii() and parts[2].isdigit() and len(parts[2]) <= 16):
        return 0
    incarnation = int(parts[2])
    return incarnation if key == claim_key(parts[1], incarnation) else 0
