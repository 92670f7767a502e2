"""`isthmus init`: make the model from its seed, write version 0, then the run object. Repeating it is harmless."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isthmus.agent.ports import TRUSTING, open_place
from isthmus.bus import default_pace
from isthmus.errors import InputError, RunMissing
from isthmus.format import isotropic
from isthmus.format.layout import Spec
from isthmus.format.rules import FrozenCheck, Pace, Rules, overdrive
from isthmus.format.signing import fingerprint
from isthmus.inspect import export as exports
from isthmus.log.creation import Seed, create_run
from isthmus.log.run import Run, read_run, run_below
from isthmus.log.trust import Trust
from isthmus.store import require_create_only
from isthmus_services.settings import declared, shared

logger = logging.getLogger("isthmus.services.init")


def run(settings: declared.Init) -> int:
    """Create the run that the settings describe."""
    made = create(
        settings,
        settings.run,
        shared.pace_of(settings, default_pace(shared.bus_of(settings, settings.run), settings.run)),
        shared.trust_in(settings),
        model=settings.model,
        source=settings.source,
        create_bucket=settings.create_bucket,
        vectors=settings.vectors or (),
    )
    require_pace(settings, made)
    layout = made.layout
    print(
        f"{made.url}: run {made.digest[:8].hex()}, {layout.size:,} parameters in {len(layout.fragments)} fragments, "
        f"H {made.rules.sync_every}, {made.rules.merge}, {made.rules.codec_up} up, {made.rules.codec_down} down"
    )
    if (owner := made.header.owner) is not None:
        print(f"signed by its owner {fingerprint(owner)}; add other members with `isthmus members add`")
        print(f"to make sure that a process uses this run, start it with --run-digest {made.digest.hex()}")
    if warning := overdrive(made.rules):
        print(f"warning: {warning}")
    return 0


def require_pace(settings: shared.PaceOfRun, run: Run) -> None:
    """Raise `InputError` if the settings ask for another pace than the run has."""
    if shared.pace_of(settings, run.pace) != run.pace:
        raise InputError(
            f"{run.url}: the run exists already and keeps its pace: set another pace "
            "on its syncers and learners, with flags or ISTHMUS_… variables"
        )


def create(
    settings: declared.Init | declared.Demo | declared.Create,
    url: str,
    pace: Pace,
    trust: Trust = TRUSTING,
    *,
    model: str | None = None,
    source: str | None = None,
    create_bucket: bool = False,
    vectors: Sequence[str] = (),
) -> Run:
    """Create the run at this URL, and return it. An equal run that exists already stays as it is, and is returned.

    Raises `InputError`, and what the store raises.
    """
    shared.need("torch", "torch")
    import torch

    from isthmus.torch import model as torch_model
    from isthmus.torch.frozen import digests_of

    shared.rules_of(settings, ())  # report invalid settings before the model is made
    file = _read(Path(source)) if source else None
    model_path = model or (file.model if file else shared.BUILT_IN_MODEL)
    torch.manual_seed(settings.seed)
    made = shared.module_of(model_path) if model or not file else _made_by(str(source), file.model)()
    if file is not None:
        torch_model.load_named(made, file.specs, file.values)
    specs = torch_model.specs_of(made, vectors)
    values, frozen = torch_model.values_of(made), digests_of(made, FrozenCheck.CHECKED)

    if trust.signer is None:
        trust.require_near(url)

    async def go() -> Run:
        async with open_place(url, make=create_bucket) as store:
            if below := await run_below(store.at_start):
                raise InputError(f"{url}: this location already contains a run, {below}: choose another location")
            await require_create_only(store.at_start, store.runtime)
            try:
                there = (await read_run(store.at_start, trust.require)).rules
            except RunMissing:
                there = None
            rules = shared.rules_of(settings, specs, there, _flop_s(settings, specs, there))
            seed = Seed(specs, values, frozen, rules, pace, model_path, settings.seed, signer=trust.signer)
            found = await create_run(store, store.runtime, seed)
            if there is not None:
                then = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.header.created_at))
                logger.warning("%s exists already, created %s: it was not changed", url, then)
            return found

    return asyncio.run(go())


def _flop_s(settings: shared.ArithmeticOfRun, specs: Sequence[Spec], there: Rules | None) -> float:
    """Return how many operations a second this machine makes if that decides the merge rule, else `SOUND_FLOP_S`."""
    if settings.merge or there or not isotropic.suits(specs, settings.iso_block):
        return isotropic.SOUND_FLOP_S
    from isthmus.agent.speed import SIDE, products  # imports the kernels

    measured = products(time.perf_counter, side=SIDE)
    if not isotropic.suits(specs, settings.iso_block, measured):
        logger.warning(
            "this machine computes %.2g GFLOP/s, too slow for isotropic "
            "merges: the run uses merge rule rda. If its syncers run on faster machines, use --merge "
            "iso",
            measured / 1e9,
        )
    return measured


def _read(path: Path) -> exports.ModelFile:
    """Read a model file or a folder: a Distributed Checkpoint, or a folder that `from_pretrained` reads."""
    if not path.is_dir():
        return exports.read(path)
    from isthmus.torch import dcp

    return dcp.read(path) if (path / dcp.METADATA).exists() else exports.read_folder(path)


def _made_by(source: str, named: str) -> Callable[[], Any]:
    """Return the function that a file names as the maker of its model, if it is one of Isthmus's own.

    For any other name, raise `InputError` that says which flag to add. The author of the file chose the name, and a
    model file is not expected to run code. Only the operator may ask for that.
    """
    if (ours := shared.built_in(named)) is not None:
        return ours
    if not named:
        raise InputError(f"{source} names no model function: use --model PACKAGE.MODULE:FUNCTION")
    if not shared.CALLABLE.fullmatch(named):
        raise InputError(
            f"{source} names {named[:80]!a} as its model function, which is not PACKAGE.MODULE:FUNCTION: use --model"
        )
    raise InputError(
        f"{source} names {named} as its model function; code that a "
        f"file names is not run by default: add --model {named} to run it"
    )
