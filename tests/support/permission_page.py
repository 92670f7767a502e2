"""Print docs/permissions.md from the table: `PYTHONPATH=tests:pkg:services python -m support.permission_page`."""

from collections.abc import Iterator

from isthmus.format.permissions import (
    ALL_STREAMS,
    CREATE,
    DELETE,
    GRANTS,
    LIST,
    OPTIONAL,
    OWN,
    READ,
    REPLACE,
    STREAMS,
    Grant,
    Operation,
    Participant,
)

HEAD = """\
# Who may do what

<!-- printed from isthmus.format.permissions by tests/support/permission_page.py; tests/unit/test_permissions.py compares -->

The one table, of which `isthmus access` makes users of Redis and policies of stores, and which `isthmus doctor --role …`
tries. What is not granted is forbidden. Keys are below the run; `<p>` is the five digits of a fragment, `<run>` the
first 16 of the run's digest, `NAME` one's own name (a follower's series), `*` anything. Rows about `bus/` are for a bus in
the store (`--bus store:`).

| column | what was done to prove it, each grant and each refusal |
|---|---|
| **S** | asked of SeaweedFS 4.48 as each identity, with the identities and policies that `isthmus access` writes (`tests/integration/test_permissions.py`) |
| **A** | asked of moto 5.2 as each role, with infra/aws's policies, which are what `isthmus access` writes, judged by the tests' evaluator, since moto's ignores conditions (`tests/infra/test_aws.py`) |
| **R** | asked of a Redis 7 as each user, with the ACL that `isthmus access` writes (`tests/integration/test_permissions.py`) |

*Create* is to write a key that is free and never over what is there. That it cannot be written over is proved by **A**
only: no other store's policies can say it. *Replace* contains it. Not run on AWS, MinIO or Ceph themselves: MinIO's and
Ceph's policies are the same statements without that condition, read against their documentation, and nothing more.
"""

PROVED = {READ: "S A", LIST: "S A", CREATE: "S A", REPLACE: "S A", DELETE: "S A"}
WHO = {
    Participant.OWNER: "creates the run, and says who is in it; no bus",
    Participant.SYNCER: "merges; also `isthmus heal`",
    Participant.COLLECTOR: "`isthmus gc`; no bus",
    Participant.LEARNER: "one for each name",
    Participant.FOLLOWER: "`isthmus follow`, export; writes a series of evaluations, and promotions; no bus",
    Participant.READER: "status, replay, explain, export, dashboards; writes nothing",
}

FOOT = """
## Decisions

- **A learner deletes its own old checkpoints**, and may replace them, since who deletes and creates replaces anyway. It
  deletes no update and no claim: commits name updates, and a freed claim would let an incarnation be taken twice. What else is to go,
  the collector takes.
- **A learner reads other learners' checkpoints** (their moments, and with them their place in the data), for a newcomer to go
  on from: `isthmus access --strict` leaves that out, and a newcomer warms up with fresh moments. It never reads another's
  updates or claims.
- **A follower reads learners' checkpoints** for the buffers of the model, such as running statistics: with `--strict` it does not,
  and the model keeps the buffers that it began with.
- **A syncer deletes nothing** but what it tried, and cannot write over a commit. It may replace values and snapshots: it is
  trusted with the model.
- **The collector** may write over commits (it leaves pointers) and delete all but the run, its members, commits, segments,
  claims, evaluations and promotions. Run it where nothing else runs.
- **The owner** is not needed while a run trains.
- **A listing without any prefix** is refused by SeaweedFS and MinIO. AWS says 404 of a missing key only to who may list, and
  may ask that without a prefix; there a listing that names none shows the names in the bucket, and one below a prefix
  whose keys may be read is allowed.
"""


def _keys(patterns: tuple[str, ...]) -> str:
    return " ".join(f"`{p}`" for p in patterns)


def _rows(given: tuple[Grant, ...], note: str = "") -> Iterator[str]:
    for operation in Operation:
        for grant in given:
            if grant.operation == operation:
                yield f"| {operation} | {_keys(grant.patterns)} | {grant.why}{note} | {PROVED[operation]} |"


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    for participant in Participant:
        lines += [f"## {participant.capitalize()}\n", f"{WHO[participant].capitalize()}.\n"]
        lines += ["| may | what | why | proved |", "|---|---|---|---|", *_rows(GRANTS[participant])]
        lines += _rows(OPTIONAL.get(participant, ()), " (not with `--strict`)")
        read, written = STREAMS[participant]
        if read:
            named = "all streams" if ALL_STREAMS in read else _keys(read)
            lines.append(f"| hear | {named} | on the bus, of every run on the server | R |")
        if written:
            lines.append(f"| speak | {_keys(written)} | on the bus | R |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n" + FOOT.replace("NAME", OWN)


if __name__ == "__main__":
    print(page(), end="")
