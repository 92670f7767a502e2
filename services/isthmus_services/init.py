"""`isthmus init`: make the model from its seed, write version 0, then the run object. Doing it twice is harmless."""

import argparse
import asyncio
from pathlib import Path

from isthmus import export as exports
from isthmus.errors import InputError
from isthmus.rules import Pace, overdrive
from isthmus.run import Run, Seed, create_run
from isthmus.runtime import threaded
from isthmus.store import AT_START, RUNNING, open_store, require_create_only
from isthmus_services import options


def run(arguments: argparse.Namespace) -> int:
    """Create the run the flags describe."""
    made = create(arguments, arguments.run)
    layout = made.layout
    print(
        f"{made.url}: run {made.digest[:8].hex()}, {layout.size:,} parameters in {len(layout.fragments)} fragments, "
        f"H {made.rules.sync_every}, {made.rules.merge}, {made.rules.codec_up} up, {made.rules.codec_down} down"
    )
    if warning := overdrive(made.rules):
        print(f"warning: {warning}")
    return 0


def create(arguments: argparse.Namespace, url: str) -> Run:
    """Create the run at this URL. Raises `InputError` and what the store raises."""
    options.need("torch", "torch")
    import torch

    from isthmus import torch_model

    rules, pace = options.rules_of(arguments), options.pace_of(arguments, Pace())
    source = getattr(arguments, "source", None)
    file = exports.read(Path(source)) if source else None
    model_path = getattr(arguments, "model", None) or (file.model if file else options.BUILT_IN_MODEL)
    if not model_path:
        raise InputError(f"{source} does not say how its model is made: give --model PACKAGE.MODULE:FUNCTION")
    factory = options.callable_of(model_path, "--model")
    if not 0 <= arguments.seed < 1 << 63:
        raise InputError(f"--seed {arguments.seed}: a seed is a number from 0 to 2**63 − 1")
    torch.manual_seed(arguments.seed)
    model = factory()
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"--model {model_path} returned a {type(model).__name__}, not a torch.nn.Module")
    if file is not None:
        torch_model.load_named(model, file.specs, file.values)
    seed = Seed(
        torch_model.specs_of(model),
        torch_model.values_of(model),
        torch_model.frozen_of(model),
        rules,
        pace,
        model_path,
        arguments.seed,
    )

    async def go() -> Run:
        runtime, pool = threaded(2)
        try:
            async with open_store(url, runtime, make=getattr(arguments, "create_bucket", False)) as store:
                store.patience = AT_START
                await require_create_only(store, runtime)
                store.patience = RUNNING
                return await create_run(store, runtime, seed)
        finally:
            pool.shutdown(wait=False)

    return asyncio.run(go())
