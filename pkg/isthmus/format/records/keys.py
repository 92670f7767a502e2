"""The keys of a run's objects."""

import re

from isthmus.format.records.fields import KEY_MAX, KEY_PATTERN, is_name

RUN_KEY = "run"
UPDATES, LEARNERS, SCRATCH, EVALUATIONS, MEMBERS, BUS = (
    "updates/", "learners/", "scratch/", "evaluations/", "members/", "bus/"
)  # fmt: skip
PROPOSALS, MANIFESTS, PROMOTIONS = "proposals/", "manifests/", "promotions/"


def update_key(fragment: int, learner: str, base: int, digest: bytes) -> str:
    """Return the key of an update."""
    return f"{updates_prefix(fragment, learner)}{base:012d}-{digest[:8].hex()}"


def updates_prefix(fragment: int, learner: str) -> str:
    """Return the prefix of one learner's updates of a fragment."""
    return f"{UPDATES}{fragment:05d}/{learner}/"


def value_key(fragment: int, version: int, digest: bytes) -> str:
    """Return the key of a published difference."""
    return f"{values_prefix(fragment)}{version:012d}-{digest[:8].hex()}"


def values_prefix(fragment: int) -> str:
    """Return the prefix of the published differences of a fragment."""
    return f"values/{fragment:05d}/"


def snapshot_key(fragment: int, version: int, digest: bytes) -> str:
    """Return the key of a snapshot."""
    return f"{snapshots_prefix(fragment)}{version:012d}-{digest[:8].hex()}"


def snapshots_prefix(fragment: int) -> str:
    """Return the prefix of the snapshots of a fragment."""
    return f"snapshots/{fragment:05d}/"


def commit_key(fragment: int, version: int) -> str:
    """Return the key of a commit. It has no digest, so that only one syncer can create the commit of a version."""
    return f"{commits_prefix(fragment)}{version:012d}"


def commits_prefix(fragment: int) -> str:
    """Return the prefix of the commits of a fragment."""
    return f"commits/{fragment:05d}/"


def segment_key(fragment: int, first: int, digest: bytes) -> str:
    """Return the key of a segment of packed commits; `first` is the version of the first of them."""
    return f"segments/{fragment:05d}/{first:012d}-{digest[:8].hex()}"


def claims_prefix(learner: str) -> str:
    """Return the prefix of a learner's incarnations."""
    return f"{LEARNERS}{learner}/"


def claim_key(learner: str, incarnation: int) -> str:
    """Return the key of the claim of one incarnation."""
    return f"{claims_prefix(learner)}{incarnation:06d}/claim"


def checkpoint_key(learner: str, incarnation: int, step: int, digest: bytes) -> str:
    """Return the key of a learner's checkpoint."""
    return f"{claims_prefix(learner)}{incarnation:06d}/checkpoints/{step:012d}-{digest[:8].hex()}"


def part_key(learner: str, incarnation: int, step: int, rank: int, digest: bytes) -> str:
    """Return the key of a part of a learner's checkpoint.

    `digest` is that of the part's head, which holds the digests of the part's pieces.
    """
    return f"{claims_prefix(learner)}{incarnation:06d}/checkpoints/parts/{step:012d}-{rank:05d}-{digest[:8].hex()}"


def members_key(version: int) -> str:
    """Return the key of a version of the membership. Like a commit's key it has no digest and is never overwritten."""
    return f"{MEMBERS}{version:012d}"


def proposal_key(version: int, change: bytes, owner: bytes) -> str:
    """Return the key of one owner's copy of a proposed version of the membership, by the digest of the change."""
    return f"{proposals_prefix(version)}{change[:8].hex()}/{owner[:8].hex()}"


def proposals_prefix(version: int) -> str:
    """Return the prefix of what is proposed as one version of the membership."""
    return f"{PROPOSALS}{version:012d}/"


def manifest_key(learner: str, digest: bytes) -> str:
    """Return the key of a learner's manifest."""
    return f"{manifests_prefix(learner)}{digest[:8].hex()}"


def manifests_prefix(learner: str) -> str:
    """Return the prefix of a learner's manifests."""
    return f"{MANIFESTS}{learner}/"


def promotion_key(number: int) -> str:
    """Return the key of a promotion. Like a commit's key it has no digest and is never overwritten."""
    return f"{PROMOTIONS}{number:012d}"


def evaluations_prefix(series: str) -> str:
    """Return the prefix of a series of measurements of the global model."""
    return f"{EVALUATIONS}{series}/"


def evaluation_key(series: str, cut: int, digest: bytes) -> str:
    """Return the key of a measurement of one cut."""
    return f"{evaluations_prefix(series)}{cut:012d}-{digest[:8].hex()}"


_VERSIONED = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)+[0-9]{12}-[0-9a-f]{16}")


def can_be_named(word: str) -> bool:
    """Return whether a text can be the key of an object of a run."""
    return len(word) <= KEY_MAX and re.match(KEY_PATTERN, word) is not None


def is_versioned(key: str) -> bool:
    """Return whether a key ends in a version and a digest, as the run's own do. Other objects are left alone."""
    return _VERSIONED.fullmatch(key) is not None


def commit_in(key: str) -> int:
    """Return the version in a commit's key, or 0 for any other key below `commits_prefix`."""
    name = key.rsplit("/", 1)[1]
    return int(name) if len(name) == 12 and name.isascii() and name.isdigit() else 0


def version_in(key: str) -> int:
    """Return the version (or base) in the last segment of an update, value or snapshot key."""
    return int(key.rsplit("/", 1)[1].split("-", 1)[0])


def learner_in(key: str) -> str:
    """Return the learner in the key of an update, a claim or a checkpoint, or "" if there is no valid name.

    Listings may show objects that do not belong to the run.
    """
    parts = key.split("/")
    name = parts[2:3] if key.startswith(UPDATES) else parts[1:2] if key.startswith(LEARNERS) else []
    return name[0] if name and is_name(name[0]) else ""


def incarnation_in(key: str) -> int:
    """Return the incarnation in the key of a claim, or 0 for any other key."""
    parts = key.split("/")
    if len(parts) != 4 or not (parts[2].isascii() and parts[2].isdigit() and len(parts[2]) <= 16):
        return 0
    incarnation = int(parts[2])
    return incarnation if key == claim_key(parts[1], incarnation) else 0
