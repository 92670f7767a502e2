"""The bytes of every codec, merge, record, key and signature, for inputs that no library draws.

Bits are a promise: replay compares them with those in logs that were written before. `tests/unit/test_golden.py`
compares them with `golden.json`. After a change that is meant to alter them:

    PYTHONPATH=tests python -m support.golden > tests/support/golden.json
"""

import inspect as python
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isthmus.codecs import CODECS, codec, pack
from isthmus.codecs.kernels import F32, U8
from isthmus.codecs.packed import keep_dropped, packed
from isthmus.format.digests import digest
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.records import charter, frame, keys, messages, objects, tree
from isthmus.format.records.objects import SCHEMA
from isthmus.format.rules import ROBUST, MergeRule, Rules
from isthmus.format.signing.keys import _signer
from isthmus.log import merge
from support.filled import filled, least

STORED = Path(__file__).with_name("golden.json")

FRAGMENT = partition(
    [
        Spec("embed", (30, 8), "float32", TensorClass.EMBEDDING),
        Spec("weight", (24, 40), "float32", TensorClass.DENSE),
        Spec("gain", (17,), "float32", TensorClass.DENSE),
        Spec("long", (1 << 16 | 5,), "float32", TensorClass.DENSE),
    ],
    1,
).fragments[0]
"""A table, a matrix, a tensor shorter than a block, and one longer than a piece."""

RATES = ("q0.5", "q1", "q1.5", "q2.5", "q4")

CASES = {
    "extremes": (0.0, -0.0, 1.0, -1.0, 2.0**-126, 2.0**-149, -(2.0**-140), 3.3895e38, -3.3895e38, 1e-30),
    # Half way between two neighbours of bfloat16, with an even number below or above, and just beside.
    "ties of bf16": (
        *(1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), -(1 + 3 * 2.0**-8)),
        *(1 + 2.0**-8 + 2.0**-23, 1 + 2.0**-8 - 2.0**-23, 2.0**-127, 3 * 2.0**-128),
    ),
    # A block's longest value is 1, so that these are half steps of its scale.
    "ties of int8": (1.0, *(k / 254 for k in range(-254, 254, 3))),
    "ties of int4": (-1.0, *(k / 14 for k in range(-14, 14))),
}


def numbers(n: int, seed: int) -> F32:
    """Return values [n] float32 of both signs, most of them small, by a congruential generator."""
    out, x = np.empty(n, np.float32), seed
    for i in range(n):
        x = (x * 6364136223846793005 + 1442695040888963407) % 2**64
        drawn = (x >> 40) / 2**23 - 1.0
        out[i] = drawn * drawn * drawn
    return out


def shown(data: frame.Blob | U8) -> str:
    """Return the size of some bytes, the first of them, and the digest of all."""
    raw = bytes(data)
    return f"{len(raw)} bytes, {raw[:12].hex()}…, {digest(raw).hex()[:16]}"


def codecs() -> Iterator[tuple[str, str]]:
    """Yield what each codec makes of values, what it drops of them, and their lengths."""
    small = {case: np.array(values, np.float32) for case, values in CASES.items()} | {"3000 values": numbers(3000, 1)}
    for name in (*CODECS, *RATES):
        code = codec(name)
        for case, x in () if name in RATES else small.items():  # small tensors have no rate
            out = np.zeros(code.bounds(x.size)[1], np.uint8)
            out = out[: code.encode(x, out)]
            back = np.empty_like(x)
            code.decode(out, back)
            yield f"{name} of {case}", shown(out)
            yield f"{name} of {case}, decoded", shown(back.view(np.uint8))
        sizes = (f"{n}: {code.size(n)} of {code.bounds(n)}" for n in (1, 127, 129, 4095, 4096, 1 << 16, (1 << 20) + 1))
        yield f"{name}, sizes", "; ".join(sizes)
        x = numbers(FRAGMENT.size, 2)
        data = pack(code, FRAGMENT, x)
        yield f"{name} of a fragment", shown(data)
        yield f"{name} of a fragment, lengths", " ".join(norm.hex() for norm in packed(FRAGMENT, code, data).norms)
        keep_dropped(FRAGMENT, code, data, x)
        yield f"{name} of a fragment, dropped", shown(x.view(np.uint8))


def merges() -> Iterator[tuple[str, str]]:
    """Yield the value and the digests of two rounds by each merge rule and through each codec."""
    start = merge.initial(numbers(FRAGMENT.size, 3))
    updates = [
        packed(FRAGMENT, codec("int4"), pack(codec("int4"), FRAGMENT, numbers(FRAGMENT.size, s))) for s in (4, 5, 6)
    ]
    cases = [(rule, "int4", True) for rule in MergeRule]
    cases += [(MergeRule.RDA, name, feedback) for name in (*CODECS, *RATES) for feedback in (True, False)]
    cases = list(dict.fromkeys(cases))
    for rule, down, feedback in cases:
        rules = Rules(
            trim=0.4, merge=rule.value, merge_embeddings=rule.value if rule in ROBUST else MergeRule.AVG.value
        )
        state = start
        for number in (1, 2):
            round_ = merge.Accumulator(FRAGMENT, merge.outers(rules))
            for at, update in enumerate(updates):
                tokens, scale = 1000 * (1 + at) * number, 0.5 if at == 1 else 1.0
                round_.add(update, merge.weight(tokens, 12 + at), scale, learner=f"l{at}")
            found = merge.advance(state, round_, codec(down), bytes(32), feedback)
            state = found.state
            yield (
                f"{rule.value} through {down}{'' if feedback else ' without feedback'}, round {number}",
                f"{shown(found.value)}, published {found.published_digest.hex()[:16]}, "
                f"state {found.state_digest.hex()[:16]}, cancelled {found.cancelled}",
            )
        if rule == MergeRule.RDA and down == "int4":
            yield (
                f"snapshot{'' if feedback else ' without feedback'}",
                shown(bytes(merge.snapshot(state, 0, bytes(32)))),
            )


def outer_steps() -> Iterator[tuple[str, str]]:
    """Yield the outer step of each class of tensors by each merge rule."""
    for rule in MergeRule:
        for embeddings in dict.fromkeys((rule, MergeRule.AVG)):
            rules = Rules(merge=rule, merge_embeddings=embeddings, trim=0.2, iso_block=64)
            for role, outer in merge.outers(rules).items():
                yield (
                    f"{rule}, embeddings {embeddings}: step of {role}",
                    " ".join(map(str, msgspec.structs.astuple(outer))),
                )


def of_module(module: ModuleType) -> list[type[msgspec.Struct]]:
    """Return the records that a module defines."""
    classes = [c for _, c in python.getmembers(module, python.isclass) if c.__module__ == module.__name__]
    return [c for c in classes if issubclass(c, msgspec.Struct) and c.__struct_fields__]


RECORDS = [record for module in (charter, messages, objects, tree) for record in of_module(module)]


def plain(record: Any) -> bytes:
    """Return a record as msgpack, as a frame's header holds it."""
    return bytes(msgspec.msgpack.encode(msgspec.to_builtins(record, builtin_types=(bytes,))))


def without_words(schema: Any) -> Any:
    """Return a schema without titles and descriptions."""
    if isinstance(schema, list):
        return [without_words(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: without_words(each) for name, each in schema.items() if name not in ("title", "description")}


def records() -> Iterator[tuple[str, str]]:
    """Yield each record with all fields filled, and with those that have defaults left out."""
    for record in RECORDS:
        full = filled(record)
        yield record.__name__, shown(plain(full))
        yield f"{record.__name__}, least", shown(plain(least(full)))
        yield (
            f"{record.__name__}, schema",
            digest(json.dumps(without_words(msgspec.json.schema(record))).encode()).hex()[:16],
        )
    signer = _signer(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
    for kind in frame.Kind:
        header = objects.ValueHeader(schema=SCHEMA, run=bytes(32), fragment=1, version=2, codec="int4")
        whole = frame.draft(kind, header, 5)
        whole.payload[:] = b"bytes"
        yield f"frame of {kind.name.lower()}", f"{shown(whole.blob)}, header at most {frame.HEADER_MAX[kind]} bytes"
        if kind in frame.PIECED:
            payload = np.arange(frame.PIECE_BYTES + 7, dtype=np.uint32).astype(np.uint8)
            yield f"frame of {kind.name.lower()} in pieces", shown(frame.written(kind, header, payload))
        frame.seal(whole.blob, signer)
        yield f"signed frame of {kind.name.lower()}", frame.signature_of(whole.blob).hex()
    leaves = {"a": np.arange(3.0), "b": [np.arange(5, dtype=np.int64), {"c": (1, None, "x", 2.5, True)}]}
    yield "tree", shown(tree.packed(leaves, "state", tree._take_numpy))


def key_names() -> Iterator[tuple[str, str]]:
    """Yield what every function that makes a key returns."""
    given: dict[str, Any] = {
        "fragment": 3, "learner": "eu-1", "base": 41, "digest": bytes(range(32)), "version": 42, "first": 7,
        "incarnation": 5, "step": 600, "rank": 2, "change": bytes(range(32, 64)), "owner": bytes(range(64, 96)),
        "number": 9, "series": "held-out", "cut": 11, "word": "word", "key": "",
    }  # fmt: skip
    for name, function in python.getmembers(keys, python.isfunction):
        if name.endswith(("_key", "_prefix")):
            wanted = python.signature(function).parameters
            yield name, function(*(given[parameter] for parameter in wanted))


PARTS = codecs, merges, outer_steps, records, key_names


def golden() -> dict[str, str]:
    """Return everything by name."""
    return {name: found for part in PARTS for name, found in part()}


if __name__ == "__main__":
    print(json.dumps(golden(), indent=1, ensure_ascii=False))
