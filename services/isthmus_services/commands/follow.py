"""`isthmus follow`: write new versions of the global model into a folder, or give them to a command."""

import asyncio
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from isthmus.agent.ports import open_log
from isthmus.codecs import kernels
from isthmus.codecs.kernels import F32
from isthmus.errors import InputError, Unavailable
from isthmus.format.records.fields import require_name
from isthmus.inspect import export, follow
from isthmus.inspect.influence import Evaluate
from isthmus.learner.global_local import Buffers
from isthmus.log import Log, evaluations, promotions
from isthmus_services.settings import declared, shared

LARGEST = int(5e9)
"""Most bytes of tensors in one file of a model that `evaluation` gives to a command."""

LAST_LINE = 4096
"""Bytes at the end of a command's output in which the number that it prints last is looked for."""


def run(settings: declared.Follow) -> int:
    """Follow the run, for ever or for `cuts` cuts. Return 1 if a cut's number was to be stored and does not count,
    else 0. Raises `InputError`."""
    if settings.into is None and settings.exec is None:
        raise InputError("choose an output for the cuts: --into DIR, --exec CMD, or both")
    command = shlex.split(settings.exec) if settings.exec is not None else None
    if command == []:
        raise InputError("--exec is empty: give a command")
    if settings.series is not None:
        require_name("--series", settings.series)
        if command is None:
            raise InputError("--series stores the last number that a command prints: add --exec CMD")
    if settings.promoted and (settings.mixed or settings.every > 1):
        raise InputError("--promoted follows every promoted cut, and no other: leave out --mixed and --every")
    if settings.version is not None and (settings.mixed or settings.every > 1 or settings.promoted):
        raise InputError("--version names one cut: leave out --mixed, --every and --promoted")
    kernels.warm()
    if settings.into is not None:
        return asyncio.run(_follow(settings, Path(settings.into).absolute(), command))
    with tempfile.TemporaryDirectory(prefix="isthmus-") as folder:
        return asyncio.run(_follow(settings, Path(folder), command))


async def _follow(settings: declared.Follow, folder: Path, command: list[str] | None) -> int:
    async with open_log(settings.run, shared.trust_in(settings)) as log:
        runtime, left, missed = log.runtime, settings.cuts if settings.version is None else 1, 0
        if settings.series is not None:
            promotions.require_named(log.members, log.signer, settings.name)
        after = follow.newest_in(folder)
        if settings.promoted and after >= 0:
            await _require_promoted(log, folder, after)
        cuts = follow.cuts(
            log, runtime, after=after, every=settings.every, apart_s=settings.at_most_every,
            fragments=settings.fragment, mixed=settings.mixed, promoted=settings.promoted,
            only=settings.version,
        )  # fmt: skip
        buffers = Buffers(log)
        async for merged in cuts:
            cut = merged if settings.fragment else replace(merged, local=await buffers.newest())
            began = time.monotonic()
            path = await runtime.offload(
                lambda cut=cut: follow.store(
                    cut, folder, dtype=settings.dtype, largest=int(settings.largest * 1e9), keep=settings.keep
                )
            )
            print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} cut {cut.number} of {settings.run}: {path} "
                  f"({time.monotonic() - began:.2f} s to write)", flush=True)  # fmt: skip
            if command is not None:
                said = await told(command, cut.number, str(path), settings.series is not None)
                if settings.series is not None:
                    counts = said is not None and await _noted(log, settings, cut, command[0], said)
                    missed = missed if counts else 1
            if left is not None:
                left -= 1
                if not left:
                    break
        return missed


async def told(command: list[str], version: int, path: str, heard: bool) -> str | None:
    """Run the command for a cut and wait for it. Return the last word that it printed, or None if it failed.

    The word is empty if the output is not read (`heard` is False) or has no words. A failure is printed, and the
    command runs again for the next cut. Raises `InputError` if it cannot be started.
    """
    environment = os.environ | {"ISTHMUS_CUT": str(version), "ISTHMUS_CUT_DIR": path}
    try:
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=asyncio.subprocess.PIPE if heard else None
        )
    except OSError as error:
        raise InputError(f"--exec {command[0]}: {error.strerror or error}") from None
    tail = b""
    while process.stdout is not None and (words := await process.stdout.read(1 << 16)):
        sys.stdout.buffer.write(words)
        sys.stdout.flush()
        tail = (tail + words)[-LAST_LINE:]
    if code := await process.wait():
        print(f"{command[0]} exited with status {code} for cut {version}", flush=True)
        return None
    return next(reversed(tail.decode(errors="replace").split()), "")


def evaluation(log: Log, command: list[str]) -> Evaluate:
    """Return the evaluation of a model by a command, which finds it as `isthmus follow --exec` gives it.

    The loss is the last word that the command prints; it is None if that is no finite number, or the command failed.
    """
    buffers = Buffers(log)

    async def evaluate(values: Sequence[F32], versions: Sequence[int]) -> float | None:
        local = await buffers.newest()
        with tempfile.TemporaryDirectory(prefix="isthmus-") as folder:
            await log.runtime.offload(
                lambda: export.write_parts(
                    Path(folder), log.run, dict(enumerate(values)), dict(enumerate(versions)), dtype=None,
                    largest=LARGEST, local=local,
                )
            )  # fmt: skip
            said = await told(command, min(versions), folder, True)
        try:
            value = float(said or "")
        except ValueError:
            return None
        return value if math.isfinite(value) else None

    return evaluate


async def _noted(log: Log, settings: declared.Follow, cut: follow.Cut, command: str, said: str) -> bool:
    """Store the last word of a command's output as the next number of a series. Return whether it counts; if not, the
    reason is printed or logged."""
    series = settings.series or ""
    try:
        return await evaluations.note(log, series, cut.number, float(said), by=settings.name, published=cut.published)
    except (ValueError, InputError, Unavailable) as error:
        print(f"no measurement of cut {cut.number} for --series {series}: the last word that "
              f"{command} printed is {said[:80]!r} ({error})",
              flush=True)  # fmt: skip
        return False


async def _require_promoted(log: Log, folder: Path, cut: int) -> None:
    """Raise `InputError` unless the newest cut in a folder is a promoted one."""
    try:
        await promotions.require(log, cut)
    except InputError as error:
        raise InputError(
            f"{folder / follow.NEWEST} is cut {cut}, which is not known to be promoted: choose another folder for "
            f"--promoted, or delete this one ({error})"
        ) from None
