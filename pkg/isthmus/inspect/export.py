"""Write the global model at any version to safetensors files, and read such files, for example to start a run."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from isthmus.codecs import kernels
from isthmus.codecs.kernels import F32
from isthmus.errors import InputError, LogCorrupt
from isthmus.format.layout import Spec, TensorClass
from isthmus.log import Log, fold
from isthmus.log.listing import ShareDone, earliest
from isthmus.log.run import Run

_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_OTHERS = {"F64": "<f8", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1", "BOOL": "?"}
_MODEL, _EMBEDDINGS, _SEED, _ORDER = "isthmus.model", "isthmus.embeddings", "isthmus.seed", "isthmus.order"
_LOCAL = "isthmus.local"

Local = Mapping[str, tuple[str, "np.ndarray[Any, Any]"]]
"""Tensors that are not merged, by name: torch's name of their dtype, and their values. Values of any floating point
dtype are held in float64."""


async def versions_at(log: Log, *, version: int | None = None, time: float | None = None) -> list[int]:
    """Return the version of each fragment: the newest, a given one, or the newest at a time [seconds since 1970].

    Raises `InputError` for a version that a fragment does not have, or a time before the run, and `LogCorrupt` if the
    log is damaged before that.
    """
    fragments = log.run.layout.fragments
    if time is not None:
        if time < log.run.header.created_at:
            began = datetime.fromtimestamp(log.run.header.created_at).astimezone()
            raise InputError(
                f"there was no model then: the run began at {began.isoformat(timespec='seconds')} "
                f"({log.run.header.created_at:.0f})"
            )
        return [await log.version_at(f.index, time) for f in fragments]
    newest = [await log.readable(f.index) for f in fragments]
    heads = [commit.version if commit else 0 for commit, _ in newest]
    least = min(heads)
    damage = next((wrong for _, wrong in newest if wrong), None)
    if damage is not None and (version is None or version > least):
        older = f"; --version {least} is the newest that all fragments have from before that" if least else ""
        raise LogCorrupt(damage.key, f"{damage.detail}{older}", damage.readable, refused=damage.refused)
    if version is None:
        return heads
    if version < 0 or version > min(heads):
        raise InputError(f"version {version}: the fragments are at versions {min(heads)} to {max(heads)}")
    return [version] * len(heads)


async def published(log: Log, versions: Sequence[int], progress: ShareDone = lambda _: None) -> list[F32]:
    """Return the published value [n] of each fragment at its version.

    Raises `InputError` if a version was collected, `LogCorrupt` if its log is damaged.
    """
    carry, done = fold.PublishedValue(log), 0

    async def one(p: int, version: int) -> F32:
        nonlocal done
        try:
            at = await fold.fold(log, p, carry, until=version)
        except LogCorrupt:
            first = await earliest(log, p)
            if version >= first:
                raise
            newest = await log.newest(p, first)
            raise InputError(
                f"version {version} of fragment {p} was collected by `isthmus gc`: versions kept are {first} to "
                f"{newest.version if newest else first}, and 0"
            ) from None
        done += 1
        progress(done / len(versions))
        return at.carried

    return list(await asyncio.gather(*(one(p, version) for p, version in enumerate(versions))))


Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def tensors(run: Run, values: Mapping[int, F32]) -> dict[str, NDArray[np.float32]]:
    """Return the tensors in these fragments, in their shapes, as float32.

    Raises `InputError` if only a part of a tensor lies in them.
    """
    shapes = {spec.name: spec.shape for spec in run.layout.specs}
    found = _arrays(run, values, "float32")
    return {name: words.view(np.float32).reshape(shapes[name]) for name, words in found.items()}


def write(
    path: Path,
    run: Run,
    values: Sequence[F32],
    versions: Sequence[int],
    dtype: str | None = None,
    local: Local | None = None,
) -> None:
    """Write a model file, whole or not at all, with the run's tensors under their names and in their shapes.

    `dtype`: that of all the run's tensors in the file; None: their own. `local`: tensors that are not merged, written
    in their own dtypes. Raises `InputError` if the file cannot be written, for example if its folder does not exist.
    """
    scratch = path.with_name(f".{path.name}.new")
    try:
        arrays = _arrays(run, dict(enumerate(values)), dtype)
        _serialize(scratch, run, arrays, run.layout.specs, versions, dtype, local=local)
        scratch.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be written: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


def write_parts(
    folder: Path,
    run: Run,
    values: Mapping[int, F32],
    versions: Mapping[int, int],
    *,
    dtype: str | None,
    largest: int,
    stem: str = "model",
    named: Callable[[str], str] = str,
    local: Local | None = None,
) -> None:
    """Write a model, or the tensors in some of its fragments, into an empty folder, as `from_pretrained` reads it.

    The files have at most `largest` bytes of tensors each; a larger tensor gets a file of its own. There is either one
    `model.safetensors`, or several files and an index. `dtype`: that of all the run's tensors in the files; None: their
    own. `named` returns the name of a tensor in the files. `local`: tensors that are not merged; they go into the last
    file, whatever its size. Raises `OSError`, and `InputError` if only a part of a tensor lies in these fragments.
    """
    arrays = _arrays(run, values, dtype)
    parts: list[list[Spec]] = [[]]
    for spec in run.layout.specs:
        if spec.name not in arrays:
            continue
        if parts[-1] and sum(arrays[s.name].nbytes for s in (*parts[-1], spec)) > largest:
            parts.append([])
        parts[-1].append(spec)
    names = [f"{stem}-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = [f"{stem}.safetensors"]
    followed = [versions.get(f.index, -1) for f in run.layout.fragments]
    try:
        for n, (name, specs) in enumerate(zip(names, parts, strict=True), 1):
            last = local if n == len(parts) else None
            _serialize(folder / name, run, arrays, specs, followed, dtype, named, last)
    except safetensors.SafetensorError as error:
        raise InputError(f"{folder} cannot be written to: {error}") from None
    if len(parts) > 1:
        total = sum(array.nbytes for array in arrays.values())
        where = {named(spec.name): name for name, specs in zip(names, parts, strict=True) for spec in specs}
        where |= {named(name): names[-1] for name in local or {}}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _arrays(run: Run, values: Mapping[int, F32], dtype: str | None) -> dict[str, Bytes]:
    """Return the bytes of every tensor in these fragments, in `dtype`; None: in its own."""
    arrays: dict[str, Bytes] = {}
    for spec, cuts in zip(run.layout.specs, run.layout.placement, strict=True):
        if 0 < sum(fragment in values for fragment, _ in cuts) < len(cuts):
            lies = ", ".join(str(fragment) for fragment, _ in cuts)
            raise InputError(f"tensor {spec.name!r} lies in the fragments {lies}: ask for all of them, or for none")
    for fragment in run.layout.fragments:
        flat = values.get(fragment.index)
        for t in fragment.tensors if flat is not None else ():
            assert flat is not None
            stored = _stored(flat[t.start : t.stop], dtype or t.spec.dtype)
            if t.rows is None:
                arrays[t.spec.name] = stored
                continue
            width = stored.size // t.size  # bytes per element
            whole = arrays.setdefault(t.spec.name, np.empty(t.spec.size * width, np.uint8))
            whole[t.origin * width : t.origin * width + stored.size] = stored
    return arrays


def _serialize(
    path: Path,
    run: Run,
    arrays: Mapping[str, Bytes],
    specs: Sequence[Spec],
    versions: Sequence[int],
    dtype: str | None,
    named: Callable[[str], str] = str,
    local: Local | None = None,
) -> None:
    """Write some of a model's tensors to a safetensors file."""
    tensors = {
        named(s.name): safetensors.TensorSpec(
            dtype=dtype or s.dtype,
            shape=list(s.shape),
            data_ptr=arrays[s.name].ctypes.data,
            data_len=arrays[s.name].nbytes,
        )
        for s in specs
    }
    kept = {name: (of, values.shape, _stored_local(of, values)) for name, (of, values) in (local or {}).items()}
    for name, (of, shape, stored) in kept.items():
        tensors[named(name)] = safetensors.TensorSpec(
            dtype=of, shape=list(shape), data_ptr=stored.ctypes.data, data_len=stored.nbytes
        )
    metadata = {
        _LOCAL: json.dumps([named(name) for name in kept]),
        "format": "pt",
        "isthmus.run": run.digest.hex(),
        "isthmus.versions": json.dumps(list(versions)),
        _MODEL: run.header.model,
        _SEED: str(run.header.seed),
        # The file format sorts tensors, but a layout depends on their order in the model.
        _ORDER: json.dumps([named(s.name) for s in specs] + [named(name) for name in kept]),
        _EMBEDDINGS: json.dumps([named(s.name) for s in specs if s.role == TensorClass.EMBEDDING]),
    }
    safetensors.serialize_file(tensors, str(path), metadata)
    as_new(path)


def as_new(path: Path) -> None:
    """Give a file the permissions of a new file, by the umask. safetensors lets only its owner read it.

    Raises `OSError`.
    """
    new = path.with_name(f".{path.name}.mode")
    new.touch()
    try:
        path.chmod(new.stat().st_mode & 0o777)
    finally:
        new.unlink()


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model that was read from a file."""

    specs: tuple[Spec, ...]
    values: tuple[F32, ...]
    """Flat float32 values of each tensor, in the order of `specs`."""
    model: str
    """The function that makes the model (`package.module:function`); empty if the file does not say."""
    seed: int


def read(path: Path) -> ModelFile:
    """Return the model in a safetensors file of any program. Raises `InputError`, which says what is wrong with it.

    Files of other programs do not say which tensors are embeddings: all of them count as dense.
    """
    try:
        with safetensors.safe_open(str(path), "np") as opened:
            metadata: Mapping[str, str] = opened.metadata() or {}
        tensors = dict(safetensors.deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
        embeddings = set(json.loads(metadata.get(_EMBEDDINGS, "[]")))
        order = json.loads(metadata.get(_ORDER, "[]")) or sorted(tensors)
        local = {name for name in json.loads(metadata.get(_LOCAL, "[]")) if tensors[name]["dtype"] in _OTHERS}
        if sorted(order) != sorted(tensors):
            raise ValueError("its metadata names other tensors than it has")
        seed = int(metadata.get(_SEED, "0"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except (safetensors.SafetensorError, ValueError, TypeError) as error:
        raise InputError(f"{path} is no safetensors file: {error}") from None
    if not tensors:
        raise InputError(f"{path} holds no tensor")
    specs, values = [], []
    for name in order:
        tensor = tensors[name]
        dtype = _NAMES.get(tensor["dtype"])
        if dtype is None and name in local:
            narrow = np.frombuffer(tensor["data"], _OTHERS[tensor["dtype"]])
            specs.append(Spec(name, tuple(tensor["shape"]), "float32", TensorClass.DENSE))
            values.append(narrow.astype(np.float32))
            continue
        if dtype is None:
            raise InputError(f"{path}: tensor {name!r} is {tensor['dtype']}: only {', '.join(_NAMES)} can be merged")
        specs.append(
            Spec(
                name, tuple(tensor["shape"]), dtype, TensorClass.EMBEDDING if name in embeddings else TensorClass.DENSE
            )
        )
        values.append(_widened(np.frombuffer(tensor["data"], np.uint8), dtype))
    return ModelFile(tuple(specs), tuple(values), metadata.get(_MODEL, ""), seed)


INDEX = "model.safetensors.index.json"


def read_folder(folder: Path) -> ModelFile:
    """Return the model that `save_pretrained` or `isthmus export --hf` wrote, in one file or several. Raises
    `InputError`."""
    index = folder / INDEX
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except FileNotFoundError:
        names = ["model.safetensors"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is no index of safetensors files: {error}") from None
    if any("/" in name or name.startswith(".") for name in names):
        raise InputError(f"{index} names files outside its folder")
    parts = [read(folder / name) for name in names]
    return ModelFile(
        tuple(spec for part in parts for spec in part.specs), tuple(flat for part in parts for flat in part.values),
        parts[0].model, parts[0].seed,
    )  # fmt: skip


def _stored_local(dtype: str, values: "np.ndarray[Any, Any]") -> Bytes:
    """Return the bytes of a tensor that is not merged, in its own dtype."""
    if dtype in ("float32", "bfloat16", "float16"):
        return _stored(np.ascontiguousarray(values.reshape(-1).astype(np.float32)), dtype)
    narrow = values.astype(np.float64) if dtype == "float64" else values
    return np.ascontiguousarray(narrow).reshape(-1).view(np.uint8)


def _stored(values: F32, dtype: str) -> Bytes:
    if dtype == "bfloat16":
        half = np.empty(values.size, np.uint16)
        kernels.encode_bf16(values, half)
        return half.view(np.uint8)
    narrow = values.astype(np.float16) if dtype == "float16" else np.ascontiguousarray(values)
    return narrow.view(np.uint8)


def _widened(data: Bytes, dtype: str) -> F32:
    if dtype == "bfloat16":
        out = np.empty(data.size // 2, np.float32)
        kernels.decode_bf16(data.view(np.uint16), out)
        return out
    return data.view(np.dtype(dtype)).astype(np.float32)
