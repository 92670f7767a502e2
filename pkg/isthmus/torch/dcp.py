"""Export of a run to torch's Distributed Checkpoint format, and import from it.

torch describes such a checkpoint in a pickle file. Unpickling can run code that the file names, so this module does not
unpickle. It reads the pickle's opcodes as data, and uses only shapes, dtypes and positions in files.
"""

import pickletools
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isthmus.codecs.kernels import F32
from isthmus.errors import InputError
from isthmus.format.layout import Spec, TensorClass
from isthmus.inspect import export
from isthmus.log.run import Run

METADATA = ".metadata"
BELOW = ("model.", "module.")
"""Prefixes under which trainers put the model in a checkpoint that also holds other state."""

MERGED = ("float32", "bfloat16", "float16")


def write(
    folder: Path, run: Run, values: Mapping[int, F32], dtype: str | None, local: export.Local | None = None
) -> None:
    """Write the tensors of a run, under their names, as a checkpoint that `torch.distributed.checkpoint.load` reads.

    `dtype`: the dtype of all merged tensors; None keeps their own. `local`: tensors that are not merged. Raises
    `InputError` if the folder cannot be written.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    dtypes = {spec.name: getattr(torch, dtype or spec.dtype) for spec in run.layout.specs}
    state = {name: torch.from_numpy(x).to(dtypes[name]) for name, x in export.tensors(run, values).items()}
    state |= {name: torch.from_numpy(np.array(x)).to(getattr(torch, of)) for name, (of, x) in (local or {}).items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a single process writes
            save(state, checkpoint_id=folder, no_dist=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}") from None


def read(folder: Path) -> export.ModelFile:
    """Return the model in a checkpoint, whichever program and however many ranks wrote it.

    If names begin with `model.` or `module.`, only those tensors are the model; otherwise all are. Tensors that cannot
    be merged are left out. Raises `InputError` if there is no model to read.
    """
    path = folder / METADATA
    try:
        told = _understood(path.read_bytes())
        tensors = {str(name): told_of for name, told_of in told["state_dict_metadata"].items()}
        places: dict[tuple[str, tuple[int, ...]], Mapping[str, Any]] = {}
        for index, where in told["storage_data"].items():
            at = index.state.get("offset")
            places[index["fqn"], tuple(at.args[0]) if isinstance(at, Named) else ()] = where.state
        below = next((b for b in BELOW if any(name.startswith(b) for name in tensors)), "")
        specs, values = [], []
        for name, of in tensors.items():
            if not name.startswith(below) or not isinstance(of, Named) or "chunks" not in of.state:
                continue
            dtype = str(of.state["properties"].dtype)
            if dtype not in MERGED:
                continue
            shape = tuple(of.state["size"].args[0])
            whole = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
            for chunk in of.state["chunks"]:
                offset, size = (tuple(chunk.state[what].args[0]) for what in ("offsets", "sizes"))
                block = _block(folder, places.get((name, offset)) or places[name, ()], size, whole.dtype)
                whole[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))] = block
            specs.append(Spec(name.removeprefix(below), shape, dtype, TensorClass.DENSE))
            values.append(whole.float().reshape(-1).numpy())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError, zipfile.BadZipFile) as error:
        raise InputError(f"{folder} is no checkpoint that torch.distributed.checkpoint has written: {error}") from None
    if not specs:
        raise InputError(f"{folder} holds no tensor of {', '.join(MERGED)}")
    return export.ModelFile(tuple(specs), tuple(values), "", 0)


def _block(folder: Path, where: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the block of a tensor that one rank wrote: the only storage in the archive at that position.

    Raises `ValueError` for a file name outside the folder, and for a storage of another size.
    """
    name = str(where["relative_path"])
    if "/" in name or name.startswith("."):
        raise ValueError(f"a part of it is said to lie in {name!r}")
    with (folder / name).open("rb") as file:
        file.seek(int(where["offset"]))
        archive = zipfile.ZipFile(BytesIO(file.read(int(where["length"]))))
    held = [member for member in archive.namelist() if member.split("/")[-2:-1] == ["data"]]
    words = archive.read(held[0]) if len(held) == 1 else b""
    if len(words) != prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} holds {len(words)} bytes of a block of {tuple(shape)} {dtype}")
    return torch.from_numpy(np.frombuffer(words, np.uint8).copy()).view(dtype).reshape(tuple(shape))


@dataclass(eq=False)
class Named:
    """An object that a pickle names but does not contain: a class or function, its arguments, and its state."""

    module: str
    name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.state[key]

    @property
    def dtype(self) -> str:
        """The name of the dtype, for the properties of a tensor: their state is a tuple of dtype, layout, …"""
        found = self.state.get("dtype") or self.state[""][0]
        return str(found.name)


def _understood(words: bytes) -> Named:
    """Return the object that a pickle describes. Raises `ValueError` for an unknown opcode and for a cut-off pickle."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []

    def since_mark() -> list[Any]:
        at = marks.pop()
        found = stack[at:]
        del stack[at:]
        return found

    for opcode, argument, _ in pickletools.genops(words):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                if len(stack) == 1 and isinstance(stack[0], Named):
                    return stack[0]
                break
            case "MARK":
                marks.append(len(stack))
            case "MEMOIZE":
                memo.append(stack[-1])
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[int(argument or 0)])
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_SET":
                stack.append([] if opcode.name == "EMPTY_LIST" else {})
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "APPEND":
                last = stack.pop()
                stack[-1].append(last)
            case "APPENDS":
                found = since_mark()
                stack[-1].extend(found)
            case "SETITEM" | "SETITEMS":
                found = since_mark() if opcode.name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                stack[-1].update(zip(found[::2], found[1::2], strict=True))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(Named(module, name))
            case "GLOBAL":
                module, name = str(argument).split(" ")
                stack.append(Named(module, name))
            case "NEWOBJ" | "REDUCE":
                args, of = stack.pop(), stack.pop()
                stack.append(Named(of.module, of.name, args))
            case "BUILD":
                state = stack.pop()
                stack[-1].state.update(state if isinstance(state, dict) else {"": state})
            case _ if isinstance(argument, str | int | float | bytes):
                stack.append(argument)
            case _:
                raise ValueError(f"its description has a word {opcode.name}, which none of torch's has")
    raise ValueError("its description ends in the middle")
