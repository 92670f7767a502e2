"""`isthmus explain`: the story of one update or one commit."""

import asyncio

from isthmus.explain import Told, explain
from isthmus_services import commands
from isthmus_services.ports import open_log
from isthmus_services.report import write_json


def run(settings: commands.Explain) -> int:
    """Tell it."""

    async def go() -> Told:
        async with open_log(settings.run) as log:
            return await explain(log, settings.what)

    told = asyncio.run(go())
    print("\n".join(told.lines))
    write_json(told.facts | {"lines": told.lines}, settings.json)
    return 0
