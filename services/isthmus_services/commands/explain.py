"""`isthmus explain`: print the story of one update, one commit or one fragment."""

import asyncio

from isthmus.agent.ports import open_log
from isthmus.inspect.explain import Explanation, explain
from isthmus_services.output.report import write_json
from isthmus_services.settings import declared, shared


def run(settings: declared.Explain) -> int:
    """Print the story."""

    async def go() -> Explanation:
        async with open_log(settings.run, shared.owner_in(settings)) as log:
            return await explain(log, settings.what)

    told = asyncio.run(go())
    print("\n".join(told.lines))
    write_json(told.facts | {"lines": told.lines}, settings.json)
    return 0
