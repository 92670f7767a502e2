"""`isthmus members rotate RUN`: give a member another key or bucket, or the run another key."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from isthmus.errors import InputError
from isthmus.format.records.objects import MemberSpec
from isthmus.format.signing import read_signer
from isthmus.format.signing.keys import read_public
from isthmus.log.membership import Membership, changed
from isthmus_services.commands.members import bucket_of, change, require_own_key
from isthmus_services.settings import declared


def run(settings: declared.MembersRotate) -> int:
    """Write the change. Raises `InputError` if the flags do not say exactly what is to change."""
    if (settings.name is None) == (settings.successor is None):
        raise InputError("use either --member NAME (with --public-key or --bucket) or --successor FILE")
    if settings.successor is not None:
        return change(settings, lambda before: before.members, read_signer(settings.successor))
    if settings.public_key is None and settings.bucket is None:
        raise InputError("--member needs the member's new key (--public-key) or new bucket (--bucket)")
    given: dict[str, Any] = {"key": read_public(settings.public_key)} if settings.public_key else {}
    if settings.bucket is not None:
        given["bucket"] = bucket_of(settings.bucket)
    return change(settings, _Given(str(settings.name), given, settings.shared_key))


@dataclass(frozen=True)
class _Given:
    name: str
    changes: Mapping[str, Any]
    shared_key: bool

    def __call__(self, before: Membership) -> Sequence[MemberSpec]:
        there = next((m for m in before.members if m.name == self.name), None)
        if there is None:
            raise InputError(f"{self.name} is not a member")
        entry = msgspec.structs.replace(there, **self.changes)
        if "key" in self.changes:
            require_own_key(before, entry, self.shared_key)
        return changed(before.members, added=entry)
