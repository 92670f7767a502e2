"""`isthmus members add RUN NAME`: add a member with its key."""

from collections.abc import Sequence

from isthmus.errors import InputError
from isthmus.format.records.fields import require_name
from isthmus.format.records.objects import MemberSpec
from isthmus.format.rules import MemberRole
from isthmus.format.signing.keys import read_public
from isthmus.log.membership import Membership, changed
from isthmus.wording import an
from isthmus_services.commands.members import bucket_of, change, require_own_key
from isthmus_services.settings import declared


def run(settings: declared.MembersAdd) -> int:
    """Add the member. Raises `InputError` if the name is taken, or the key is another member's."""
    require_name("name of a member", settings.name.removesuffix("*") or "*")
    key = read_public(settings.public_key)
    entry = MemberSpec(settings.name, MemberRole(settings.member_role), key, bucket_of(settings.bucket))

    def made(before: Membership) -> Sequence[MemberSpec]:
        there = next((m for m in before.members if m.name == entry.name), None)
        if there == entry:
            raise InputError(f"{entry.name} is already a member with this role ({entry.role}), key and bucket")
        if there is not None:
            raise InputError(
                f"{entry.name} is already a member, as {an(there.role)}: change "
                f"its key or bucket with `isthmus members rotate --member {entry.name}`; to change its "
                "role, use `members remove` first"
            )
        require_own_key(before, entry, settings.shared_key)
        return changed(before.members, added=entry)

    return change(settings, made)
