"""`isthmus export`: the global model as a safetensors file."""

import asyncio
from datetime import datetime
from pathlib import Path

from isthmus import kernels
from isthmus.errors import InputError
from isthmus.ports import open_log
from isthmus.readers import export as exports
from isthmus_services.output.progress import progress
from isthmus_services.output.report import require_free, write_json
from isthmus_services.settings import declared


def run(settings: declared.Export) -> int:
    """Fold and write."""
    at = _time(settings.at) if settings.at is not None else None
    require_free(settings.out, "-o", force=settings.force)
    kernels.warm()

    async def go() -> list[int]:
        async with open_log(settings.run) as log:
            versions = await exports.versions_at(log, version=settings.version, time=at)
            with progress("folding") as say:
                values = await exports.published(log, versions, say)
            exports.write(Path(settings.out), log.run, values, versions)
            return versions

    versions = asyncio.run(go())
    low, high = min(versions), max(versions)
    which = f"version {low}" if low == high else f"versions {low} to {high}, by fragment"
    which += ", as the run began" if high == 0 else ""
    print(f"{settings.out}: the global model of {settings.run} at {which}")
    write_json({"out": settings.out, "versions": versions}, settings.json)
    return 0


def _time(text: str) -> float:
    """Return seconds since 1970. Without a zone, the time is this machine's."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise InputError(
            f"--at {text}: write it as 2026-11-21T14:30:00, with +00:00 or Z for UTC, or as seconds since 1970"
        ) from None
