"""`isthmus export`: write the global model as a safetensors file, a transformers folder or a Distributed Checkpoint."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from isthmus.agent.ports import open_log
from isthmus.codecs import kernels
from isthmus.codecs.kernels import F32
from isthmus.errors import Denied, InputError
from isthmus.inspect import export as exports
from isthmus.learner.global_local import global_local
from isthmus.log import merge, promotions
from isthmus.log.run import Run
from isthmus.reasons import FEW_VERSIONS
from isthmus.wording import an
from isthmus_services.output.progress import progress
from isthmus_services.output.report import require_empty, require_free, write_json
from isthmus_services.settings import declared, shared


def run(settings: declared.Export) -> int:
    """Fold the log, and write the model in each format that was asked for. Raises `InputError`."""
    at = _time(settings.at) if settings.at is not None else None
    if settings.out is None and settings.hf is None and settings.dcp is None:
        raise InputError("choose an output: -o FILE, --hf DIR or --dcp DIR")
    if settings.promoted and at is not None:
        raise InputError("--promoted takes the newest promoted version, or the one of --version: leave out --at")
    if settings.model is not None and settings.hf is None:
        raise InputError("--model needs --hf DIR")
    if settings.out is not None:
        require_free(settings.out, "-o", force=settings.force)
    for folder, flag in ((settings.hf, "--hf"), (settings.dcp, "--dcp")):
        if folder is not None:
            require_empty(folder, flag, force=settings.force)
    if settings.dcp is not None or settings.model is not None:
        shared.need("torch", "torch")
    module = shared.module_of(settings.model) if settings.model is not None else None
    if module is not None and not hasattr(module, "save_pretrained"):
        raise InputError(f"--model {settings.model} returned {an(type(module).__name__)} without save_pretrained")
    kernels.warm()

    async def go() -> list[int]:
        async with open_log(settings.run, shared.owner_in(settings)) as log:
            promotion = await promotions.require(log, settings.version) if settings.promoted else None
            version = promotion.version if promotion else settings.version
            versions = await exports.versions_at(log, version=version, time=at)
            with progress("folding") as say:
                values = await exports.published(log, versions, say)
            if promotion and promotion.version:
                there = await log.runtime.offload(lambda: promotions.cut_digest(map(merge.array_digest, values)))
                promotions.require_bytes(promotion, there)
            tensors, learners = await global_local(log)
            local = {name: (tensor.dtype, tensor.values) for name, tensor in tensors.items()}
            if settings.out is not None:
                exports.write(Path(settings.out), log.run, values, versions, settings.dtype, local)
            if settings.hf is not None:
                _write_hf(settings, log.run, values, versions, module, local)
            if settings.dcp is not None:
                from isthmus.torch import dcp

                dcp.write(Path(settings.dcp), log.run, dict(enumerate(values)), settings.dtype, local)
            if local:
                which = f"{len(local)} tensors that are not merged ({min(local)}, …)"
                print(
                    f"including {which}: the mean over the newest checkpoints of {', '.join(learners)}, whose updates "
                    "the newest versions merged"
                )
            if local and (version is not None or at is not None):
                print(f"WARNING: {which} are of now, not of the version that was asked for")
            with suppress(Denied):  # the promotion holds all the same
                for said in promotions.doubts(promotion, await promotions.stored(log)) if promotion else ():
                    print(said)
            return versions

    versions = asyncio.run(go())
    low, high = min(versions), max(versions)
    which = f"version {low}" if low == high else f"versions {low} to {high}, by fragment"
    which += ", the initial model" if high == 0 else ""
    written = [out for out in (settings.out, settings.hf, settings.dcp) if out is not None]
    print(f"{', '.join(written)}: the global model of {settings.run} at {which}")
    if 0 < high < FEW_VERSIONS:
        print(
            "so few versions say little about merging: the first ones overshoot. Judge the model once its fragments "
            f"were merged {FEW_VERSIONS} times or more"
        )
    write_json({"out": settings.out, "hf": settings.hf, "dcp": settings.dcp, "versions": versions}, settings.json)
    return 0


def _write_hf(
    settings: declared.Export,
    run: Run,
    values: Sequence[F32],
    versions: Sequence[int],
    module: Any,
    local: exports.Local,
) -> None:
    """Write a folder that `from_pretrained` reads. Raises `InputError`.

    If the run's module is given, its `save_pretrained` writes the folder. Otherwise only the weights are written, under
    the run's names; weights of adapters get the names that peft uses in files.
    """
    assert settings.hf is not None
    folder, largest = Path(settings.hf), int(settings.largest * 1e9)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if module is None:
            adapters = any(".lora_" in spec.name for spec in run.layout.specs)
            exports.write_parts(
                folder, run, dict(enumerate(values)), dict(enumerate(versions)), dtype=settings.dtype, largest=largest,
                stem="adapter_model" if adapters else "model",
                named=(lambda name: name.replace(".default.", ".")) if adapters else str, local=local,
            )  # fmt: skip
            missing = "adapter_config.json" if adapters else "config.json"
            if not (folder / missing).exists():
                print(f"{folder} contains only weights: add the model's {missing}, or use --model")
            return
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}") from None
    import torch

    from isthmus.torch import model as torch_model

    whole = exports.tensors(run, dict(enumerate(values)))
    torch_model.load_named(module, run.layout.specs, [whole[spec.name].reshape(-1) for spec in run.layout.specs])
    torch_model.load_local(module, local)
    if settings.dtype is not None:
        module.to(getattr(torch, settings.dtype))
    try:
        module.save_pretrained(folder, max_shard_size=largest)
        for file in folder.glob("*.safetensors"):
            exports.as_new(file)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}") from None


def _time(text: str) -> float:
    """Return a time in seconds since 1970. A time without a zone is in this machine's zone. Raises `InputError`."""
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
