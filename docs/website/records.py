"""The record formats: the frame as its module draws it, and every header from the structs that check it."""

import inspect
import textwrap
from collections.abc import Iterator
from typing import get_args

import griffe
import msgspec

from isthmus.format.records import charter, frame, keys, messages, objects
from isthmus.format.records.frame import HEADER_MAX, PIECED, Kind

Member = griffe.Object | griffe.Alias

HEADERS = {
    Kind.RUN: (objects.RunHeader, objects.RunLayout, objects.TensorSpec),
    Kind.UPDATE: (objects.UpdateHeader,),
    Kind.VALUE: (objects.ValueHeader,),
    Kind.SNAPSHOT: (objects.SnapshotHeader,),
    Kind.COMMIT: (objects.CommitHeader,),
    Kind.MESSAGE: (messages.Message,),
    Kind.CLAIM: (objects.ClaimHeader,),
    Kind.SEGMENT: (objects.SegmentHeader,),
    Kind.PACKED: (objects.PackedHeader,),
    Kind.CHECKPOINT: (objects.CheckpointHeader,),
    Kind.PART: (objects.PartHeader,),
    Kind.EVALUATION: (objects.EvaluationHeader,),
    Kind.MEMBERS: (objects.MembersHeader, objects.MemberSpec),
    Kind.MANIFEST: (objects.ManifestHeader,),
    Kind.PROMOTION: (objects.PromotionHeader,),
}
"""What each kind's header is, and its payload where that is a struct too."""


def page() -> str:
    """Return the page of record formats."""
    said = inspect.cleandoc(frame.__doc__ or "")
    first, _, rest = said.partition("\n\n")
    drawn, _, after = rest.partition("\n\n")
    top = {struct for structs in HEADERS.values() for struct in structs}
    package = griffe.load("isthmus.format.records")
    known = {
        name: found for room in ("charter", "objects", "messages") for name, found in package[room].members.items()
    }
    out = [
        "# Record formats",
        first,
        f"```text\n{textwrap.dedent(drawn)}\n```",
        after,
        f"This release writes version {frame.FRAME_VERSION}.",
        "## Kinds",
        "\n".join(_kinds()),
        "## Keys",
        "\n".join(_keys()),
        "## Types of fields",
        "A header is a msgpack map of exactly the fields below, each of its type and within its range.",
        "\n".join(_types()),
        "## Headers",
    ]
    for kind, structs in HEADERS.items():
        for struct in structs:
            out += _struct(
                struct, known, f"{struct.__name__}" + (f" (kind {int(kind)})" if struct is structs[0] else "")
            )
    out.append("## Messages on the bus")
    for member in get_args(messages.AnyMessage):
        out += _struct(member, known, f"{member.__name__} (type `{member.__struct_config__.tag}`)")
    out.append("## What headers are made of")
    for module in (charter, objects, messages):
        for value in vars(module).values():
            mine = inspect.isclass(value) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__
            mine = mine and not value.__name__.startswith("_")
            if mine and value not in top and value not in get_args(messages.AnyMessage) and value.__struct_fields__:
                out += _struct(value, known, value.__name__)
    return "\n\n".join(out) + "\n"


def _kinds() -> Iterator[str]:
    yield "| kind | name | header | header at most | payload in digested pieces |"
    yield "|---|---|---|---|---|"
    for kind in Kind:
        pieces = "yes" if kind in PIECED else ""
        header = HEADERS[kind][0].__name__
        yield f"| {int(kind)} | {kind.name.lower()} | `{header}` | {HEADER_MAX[kind] >> 10} KiB | {pieces} |"


def _keys() -> Iterator[str]:
    digest = bytes.fromhex("ab12cd34ef567890")
    made = {
        "run": keys.RUN_KEY,
        "update": keys.update_key(3, "eu-1", 16, digest),
        "value": keys.value_key(3, 17, digest),
        "snapshot": keys.snapshot_key(3, 16, digest),
        "commit": keys.commit_key(3, 17),
        "segment": keys.segment_key(3, 1, digest),
        "claim": keys.claim_key("eu-1", 0),
        "checkpoint": keys.checkpoint_key("eu-1", 0, 240, digest),
        "part": keys.part_key("eu-1", 0, 240, 1, digest),
        "evaluation": keys.evaluation_key("held-out", 17, digest),
        "manifest": keys.manifest_key("eu-1", digest),
        "promotion": keys.promotion_key(1),
    }
    yield "| object | for example |"
    yield "|---|---|"
    for name, key in made.items():
        yield f"| {name} | `{key}` |"


def _types() -> Iterator[str]:
    yield "| type | is | what it is for |"
    yield "|---|---|---|"
    for member in griffe.load("isthmus.format.records")["fields"].members.values():
        if not member.is_alias and member.is_attribute and str(member.value).startswith("Annotated"):
            yield f"| `{member.name}` | {_code(str(member.value))} | {_said(member)} |"


def _struct(
    struct: type[msgspec.Struct], known: "dict[str, griffe.Object | griffe.Alias]", title: str
) -> Iterator[str]:
    yield f"### {title}"
    found = known[struct.__name__]
    yield inspect.cleandoc(struct.__doc__ or "")
    lines = ["| field | type | what it is |", "|---|---|---|"]
    every = {**found.inherited_members, **found.members}
    for name in struct.__struct_fields__:
        field = every[name]
        lines.append(f"| `{name}` | {_code(str(field.annotation))} | {_said(field)} |")  # type: ignore[union-attr]
    yield "\n".join(lines)


def _said(member: Member) -> str:
    return " ".join(member.docstring.value.split()).replace("|", "\\|") if member.docstring else ""


def _code(text: str) -> str:
    return f"`{' '.join(text.split())}`".replace("|", "\\|")
