"""The types of header fields: every number has a range, every text and list a limit. NaN is in no range."""

import re
from typing import Annotated

import msgspec

from isthmus.errors import InputError

Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""BLAKE3 of a whole object, or of a flat float32 vector."""

PublicKey = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""A public key of Ed25519."""
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
NAME_PATTERN = rf"\A{NAME}\Z"
Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
"""Name of a learner or a syncer, which is also a segment of keys."""

_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
KEY_MAX, KEY_PATTERN = 512, rf"\A{_SEGMENT}(/{_SEGMENT})*\Z"
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=KEY_MAX, pattern=KEY_PATTERN)]
"""Key of an object. No segment is empty or begins with a dot, so no key leads out of the run, or to a hidden file."""

_CONTROLS = r"\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff"
Text = Annotated[str, msgspec.Meta(max_length=256, pattern=rf"\A[^{_CONTROLS}]*\Z")]
"""Text for people to read, also on terminals: without control, zero-width and text direction characters."""

WAITING_MAX = 800
Waiting = Annotated[str, msgspec.Meta(max_length=WAITING_MAX, pattern=rf"\A[^{_CONTROLS}]*\Z")]
"""The same, with room for what a store or a system said, and its remedy with the path of a run in it."""

Word = Annotated[str, msgspec.Meta(pattern=r"\A[a-z][a-z0-9-]{0,39}\Z")]
"""Why an update was rejected or clipped: a name of `isthmus.reasons`, or of another release's reasons."""

Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
"""Number of a fragment."""

VERSION_MAX = 10**12 - 1  # Keys write versions with twelve decimal digits.
Version = Annotated[int, msgspec.Meta(ge=0, le=VERSION_MAX)]

STEPS_MAX = 1 << 40
Steps = Annotated[int, msgspec.Meta(ge=0, le=STEPS_MAX)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Counter = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]

SECONDS_MAX = 1e9
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=SECONDS_MAX)]
"""A duration or an age."""
Instant = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
"""Seconds since 1970, for people to read."""
Weight = Annotated[float, msgspec.Meta(gt=0.0, le=1e300)]
Scale = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
Finite = Annotated[float, msgspec.Meta(ge=-1.7e308, le=1.7e308)]

LOSS_MAX = 1e30
Loss = Annotated[float, msgspec.Meta(ge=-LOSS_MAX, le=LOSS_MAX)]
"""A training loss. Sums of many of them, multiplied by steps, are finite."""


def is_name(name: str) -> bool:
    """Return whether a text can be the name of a learner or syncer."""
    return re.match(NAME_PATTERN, name) is not None


def require_name(what: str, name: str) -> None:
    """Raise `InputError` unless a text can be the name of a learner or syncer."""
    if not is_name(name):
        raise InputError(
            f"{what} {name!r}: up to 63 letters, digits, dots, dashes and underscores, beginning with a letter or digit"
        )
