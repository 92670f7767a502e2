"""`isthmus explain`: the story of one update or one commit."""

import argparse
import asyncio

from isthmus.explain import Told, explain
from isthmus_services.ports import open_log
from isthmus_services.report import write_json


def run(arguments: argparse.Namespace) -> int:
    """Tell it."""

    async def go() -> Told:
        async with open_log(arguments.run) as log:
            return await explain(log, arguments.what)

    told = asyncio.run(go())
    print("\n".join(told.lines))
    write_json(told.facts | {"lines": told.lines}, arguments.json)
    return 0
