"""Values of settings that were not given: the run's, those that suit the other settings, or the bus beside the run."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from isthmus.agent.ports import open_log
from isthmus.bus import default_bus
from isthmus.errors import IsthmusError, RunMissing
from isthmus.format.rules import Pace
from isthmus.log.run import Run
from isthmus_services.settings import declared
from isthmus_services.settings.resolve import fields
from isthmus_services.settings.shared import ArithmeticOfRun, OnBus, PaceOfRun, rules_of

DEFAULT, OF_RUN = "default", "run"
NEVER, BY_MODEL = "never", "by the model"
READ_S = 5.0
"""If reading the run takes longer than this [s], settings are shown without the run's values."""

Effective = Mapping[str, tuple[object, str]]
"""By field: the value and its source."""


def effective(values: object) -> Effective:
    """Return the values of settings that were not given, as far as they can be known now."""
    found: dict[str, tuple[object, str]] = {}
    run = getattr(values, "run", None)
    if isinstance(values, declared.Demo):
        run = values.store or str(Path(values.out) / "run")
        found["store"] = run, DEFAULT
    if isinstance(values, OnBus) and run is not None and (bus := _bus(run)) is not None:
        found["bus"] = bus, DEFAULT
    if isinstance(values, ArithmeticOfRun):
        found |= _arithmetic(values)
    if isinstance(values, declared.Syncer | declared.Learner):
        made, source = _run(run)
        if isinstance(values, declared.Learner):
            found["seed"] = (made.header.seed if made else "", source)
        else:
            found |= _pace(made.pace if made else None, source)
    elif isinstance(values, PaceOfRun):
        found |= _pace(Pace(), DEFAULT)
    return {name: value for name, value in found.items() if getattr(values, name) is None}


def _arithmetic(values: ArithmeticOfRun) -> dict[str, tuple[object, str]]:
    """Return defaults that suit the other settings; `BY_MODEL` for those that depend on the model."""
    rules = rules_of(values, ())
    suited = {s.field: getattr(rules, s.of) for s in fields(ArithmeticOfRun)}
    if values.merge is None:
        suited |= dict.fromkeys(("merge", "outer_lr", "outer_momentum"), BY_MODEL)
    return {name: (value, DEFAULT) for name, value in suited.items()}


def _pace(pace: Pace | None, source: str) -> dict[str, tuple[object, str]]:
    if pace is None:
        return dict.fromkeys(Pace.__struct_fields__, ("", source))
    given = {name: getattr(pace, name) for name in Pace.__struct_fields__}
    return {name: (NEVER if value is None else value, source) for name, value in given.items()}


def _bus(run: str) -> str | None:
    try:
        return default_bus(run)
    except IsthmusError:
        return None  # an invalid URL is reported when it is used


def _run(url: str | None) -> tuple[Run | None, str]:
    """Return the run, or None if it cannot be read, and its name as a source."""
    if url is None:
        return None, "run (not named)"

    async def read() -> Run:
        async with asyncio.timeout(READ_S), open_log(url, threads=1) as log:
            return log.run

    try:
        return asyncio.run(read()), OF_RUN
    except RunMissing:
        return None, "run (there is none yet)"
    except (IsthmusError, TimeoutError, BaseExceptionGroup):
        return None, "run (cannot be read)"
