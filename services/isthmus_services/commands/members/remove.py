"""`isthmus members remove RUN NAME`: remove a member, from a stated commit on. The run goes on."""

from collections.abc import Sequence

from isthmus.errors import InputError
from isthmus.format.records.objects import MemberSpec
from isthmus.log.membership import Membership, changed
from isthmus_services.commands.members import change
from isthmus_services.settings import declared


def run(settings: declared.MembersRemove) -> int:
    """Remove the member. Raises `InputError` if there is no member of this name."""

    def made(before: Membership) -> Sequence[MemberSpec]:
        if settings.name not in (m.name for m in before.members):
            known = ", ".join(m.name for m in before.members) or "nobody"
            raise InputError(f"{settings.name} is not a member; members are {known}")
        return changed(before.members, without=settings.name)

    return change(settings, made)
