"""`isthmus follow`: every new version of the global model, into a folder, or to a command."""

import asyncio
import os
import shlex
import tempfile
import time
from pathlib import Path

from isthmus import kernels
from isthmus.errors import InputError
from isthmus.ports import open_log
from isthmus.readers import follow
from isthmus_services.settings import declared


def run(settings: declared.Follow) -> int:
    """Follow, for ever or for so many cuts."""
    if settings.into is None and settings.exec is None:
        raise InputError("say what is to be done with each cut: --into DIR, --exec CMD, or both")
    command = shlex.split(settings.exec) if settings.exec is not None else None
    if command == []:
        raise InputError("--exec names no command")
    kernels.warm()
    if settings.into is not None:
        asyncio.run(_follow(settings, Path(settings.into).absolute(), command))
        return 0
    with tempfile.TemporaryDirectory(prefix="isthmus-") as folder:
        asyncio.run(_follow(settings, Path(folder), command))
    return 0


async def _follow(settings: declared.Follow, folder: Path, command: list[str] | None) -> None:
    async with open_log(settings.run) as log:
        runtime, left = log.runtime, settings.cuts
        after = follow.newest_in(folder)
        cuts = follow.cuts(log, runtime, after=after, every=settings.every, apart_s=settings.at_most_every)
        async for cut in cuts:
            began = time.monotonic()
            path = await runtime.offload(
                lambda cut=cut: follow.store(
                    cut, folder, dtype=settings.dtype, largest=int(settings.largest * 1e9), keep=settings.keep
                )
            )
            print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} cut {cut.version} of {settings.run}: {path} "
                  f"({time.monotonic() - began:.2f} s to write)", flush=True)  # fmt: skip
            if command is not None:
                await _told(command, cut.version, str(path))
            if left is not None:
                left -= 1
                if not left:
                    return


async def _told(command: list[str], version: int, path: str) -> None:
    """Run the command for a cut, and wait for it; a failure is said, and the next cut tries again."""
    environment = os.environ | {"ISTHMUS_CUT": str(version), "ISTHMUS_CUT_DIR": path}
    try:
        process = await asyncio.create_subprocess_exec(*command, env=environment)
    except OSError as error:
        raise InputError(f"--exec {command[0]}: {error.strerror or error}") from None
    if code := await process.wait():
        print(f"{command[0]} ended with {code} for cut {version}", flush=True)
