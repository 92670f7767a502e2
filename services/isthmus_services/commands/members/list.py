"""`isthmus members list RUN`: print the members and roles, or the file that `ssh-keygen -Y verify -f` reads."""

import asyncio

from rich.table import Table
from rich.text import Text

from isthmus.agent.ports import open_log
from isthmus.format.signing import fingerprint
from isthmus.inspect.charter_words import gone, in_force
from isthmus.log.membership import Members
from isthmus_services.commands.keys.verify import allowed_signers
from isthmus_services.commands.members import require_signed
from isthmus_services.output.report import stdout, write_json
from isthmus_services.settings import declared, shared


def run(settings: declared.MembersList) -> int:
    """Print the members."""
    members = asyncio.run(_read(settings))
    now = members.current
    if settings.allowed_signers:
        print("\n".join(allowed_signers([now])))
        return 0
    console = stdout()
    since = in_force(now) if now.version else "in force since its creation"
    owners = {name: fingerprint(key) for key, name in now.owners.items()}
    whose = ", ".join(f"{name} {key}" for name, key in owners.items()) if now.charter else fingerprint(now.owner)
    said = f"{members.run.url}: membership {now.version}, {since}; owner{'s' * bool(now.charter)} {whose}"
    console.print(Text(said), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for heading in ("member", "as", "key", "bucket"):
        table.add_column(heading)
    for m in now.members:
        table.add_row(Text(m.name), m.role, fingerprint(m.key), Text(m.bucket))
    console.print(table if now.members else f"no members besides the owner{'s' * bool(now.charter)}")
    absent = gone(members)
    for line in absent.values():
        console.print(Text(line), soft_wrap=True)
    write_json(
        {
            "version": now.version,
            "owner": None if now.charter else fingerprint(now.owner),
            "owners": owners,
            "until": list(now.until),
            "members": [
                {"name": m.name, "role": m.role.value, "key": fingerprint(m.key), "bucket": m.bucket}
                for m in now.members
            ],
            "absent": absent,
        },
        settings.json,
    )
    return 0


async def _read(settings: declared.MembersList) -> Members:
    async with open_log(settings.run, shared.owner_in(settings)) as log:
        require_signed(log)
        return log.members
