"""The buffers of the global model, combined from the local tensors in the learners' newest checkpoints.

Buffers are not merged. For a floating point tensor, the global model has the mean over the learners that the newest
commits have merged. For a running variance, it has the variance of all the data that the learners saw: the mean of
their variances plus the variance of their means. For other tensors, such as counters, it has those of the newest
checkpoint.

With three or more learners, no single learner can move a number far: each learner's number is clipped to within
`CLOSE` median absolute deviations of the median.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.codecs import kernels
from isthmus.errors import Denied, ObjectMissing, RecordInvalid, Unavailable, told
from isthmus.format.records.keys import LEARNERS
from isthmus.format.records.objects import CheckpointHeader
from isthmus.format.records.tree import Leaf, rebuild
from isthmus.format.rules import CHECKPOINT_S, CHECKPOINTS_KEPT
from isthmus.learner import checkpoint_shards
from isthmus.learner.resume import read_checkpoint
from isthmus.log import Log
from isthmus.log.listing import by_learner, checkpoints_in
from isthmus.reasons import Reason
from isthmus.store import Entry

logger = logging.getLogger(__name__)

FLOATS = ("float32", "bfloat16", "float16", "float64")
CLOSE = 4.0
"""Limit in median absolute deviations. Of numbers drawn from one normal distribution, one in 140 is further from the
median than this."""

MAJORITY = 3

OTHERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
"""Other dtypes that are accepted. The dtype comes from another process, so no other name is looked up."""


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor of the global model that is not merged."""

    dtype: str
    """The name that torch gives it."""
    values: "np.ndarray[Any, Any]"
    """In the tensor's shape; float64 for a floating point tensor."""


class Buffers:
    """Reads the local tensors of the global model for a follower, at most once per checkpoint period."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._again_at = -math.inf
        self._denied = False
        self._found: Mapping[str, LocalTensor] = {}

    async def newest(self) -> Mapping[str, tuple[str, "np.ndarray[Any, Any]"]]:
        """Return the tensors by name, each with its dtype. If the store is unavailable, return those read before."""
        now = self._log.runtime.now()
        if now >= self._again_at and not self._denied:
            self._again_at = now + CHECKPOINT_S
            try:
                self._found, _ = await _global_local(self._log)
            except Denied as error:
                self._denied = True
                logger.warning(_WITHOUT, error)
            except Unavailable as error:
                logger.warning("could not refresh the buffers of the global model: %s", told(error))
        return {name: (tensor.dtype, tensor.values) for name, tensor in self._found.items()}


_WITHOUT = "the global model is without the learners' buffers, since their checkpoints are denied: %s"


async def global_local(log: Log) -> tuple[dict[str, LocalTensor], Sequence[str]]:
    """Return the local tensors of the global model by name, and the learners that they come from.

    A checkpoint that is damaged, or was written by an earlier release, is left out. If reading checkpoints is denied,
    log a warning and return no tensors. Raises `Unavailable`.
    """
    try:
        return await _global_local(log)
    except Denied as error:
        logger.warning(_WITHOUT, error)
        return {}, []


async def _global_local(log: Log) -> tuple[dict[str, LocalTensor], Sequence[str]]:
    held = by_learner(checkpoints_in(await log.store.list(LEARNERS)))
    merged: set[str] = set()
    for fragment in log.run.layout.fragments:
        commit, _ = await log.readable(fragment.index)
        if commit is not None:
            merged |= {given.learner for given in commit.header.inputs}
    wanted = [entries for name, entries in held.items() if name in merged] or list(held.values())[:1]
    found = [of for entries in wanted if (of := await _newest(log, entries)) is not None and of[1]]
    found.sort(key=lambda of: of[0].taken_at, reverse=True)
    return together([tensors for _, tensors in found]), [header.learner for header, _ in found]


async def _newest(log: Log, entries: Sequence[Entry]) -> tuple[CheckpointHeader, dict[str, LocalTensor]] | None:
    """Return the buffers in the newest good one of a learner's kept checkpoints, or None if there is none."""
    for entry in entries[:CHECKPOINTS_KEPT]:
        try:
            return await _of(log, entry)
        except (Unavailable, Denied):
            raise
        except Exception as error:  # another learner's object may fail in any way; it must not end an export
            logger.warning("the buffers in %s are not used: %s", entry.key, error)
    return None


async def _of(log: Log, entry: Entry) -> tuple[CheckpointHeader, dict[str, LocalTensor]]:
    checkpoint = await read_checkpoint(log, entry.key, entry.size, stranger=True)
    if checkpoint is None:
        raise ObjectMissing(entry.key)
    header, leaves = checkpoint.header, checkpoint.leaves
    named: Any = rebuild(header.local, leaves, lambda leaf: leaf) or {}
    wanted = {str(name): leaf for name, leaf in named.items() if isinstance(leaf, Leaf) and leaf.pieces}
    if (size := sum(leaf.spec.size for leaf in wanted.values())) > log.checkpoint_most:
        raise RecordInvalid(Reason.OVERSIZED, f"{size} bytes of buffers, limit {log.checkpoint_most}")
    return header, {name: tensor_of(await checkpoint_shards.whole(log, leaf)) for name, leaf in wanted.items()}


def tensor_of(leaf: Leaf) -> LocalTensor:
    """Return a tensor that torch made. Raises `RecordInvalid`, also if a number in it is not finite."""
    dtype, shape = leaf.spec.dtype, leaf.spec.shape
    if dtype not in (*FLOATS, *OTHERS):
        raise RecordInvalid(Reason.MALFORMED, f"no tensor of {dtype!r} can be put together")
    try:
        if dtype == "bfloat16":
            flat: np.ndarray[Any, Any] = np.empty(leaf.data.size // 2, np.float32)
            kernels.decode_bf16(leaf.data.view(np.uint16), flat)
        else:
            flat = leaf.data.view(np.dtype(dtype))
        values = flat.reshape(shape)
    except ValueError as error:
        raise RecordInvalid(Reason.MALFORMED, f"no tensor of {dtype} and shape {shape}: {error}") from None
    if dtype in OTHERS:
        return LocalTensor(dtype, values)
    if not np.isfinite(values).all():
        raise RecordInvalid(Reason.NON_FINITE, "a buffer holds a NaN or an infinity")
    return LocalTensor(dtype, values.astype(np.float64))


def together(of_learners: Sequence[Mapping[str, LocalTensor]]) -> dict[str, LocalTensor]:
    """Return one set of tensors from those of several learners, given newest first."""
    alike: dict[str, list[LocalTensor]] = defaultdict(list)
    for tensors in of_learners:
        for name, tensor in tensors.items():
            first = alike[name][0] if alike[name] else tensor
            if name.endswith("running_var") and np.any(tensor.values < 0):
                logger.warning("a learner's %s is not used: a variance is not negative", name)
            elif (first.dtype, first.values.shape) == (tensor.dtype, tensor.values.shape):
                alike[name].append(tensor)
    found = {}
    for name, several in alike.items():
        newest = several[0]
        if newest.dtype in FLOATS:
            values = np.mean(_close([tensor.values for tensor in several]), axis=0)
            means = alike.get(name.removesuffix("running_var") + "running_mean", [])
            if name.endswith("running_var") and len(means) == len(several):
                values = values + np.var(_close([tensor.values for tensor in means]), axis=0)
            newest = LocalTensor(newest.dtype, values)
        found[name] = newest
    return found


def _close(several: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return values of several learners [m, ...], clipped to near the median; of fewer than three, unchanged."""
    values = np.asarray(several)
    if len(several) < MAJORITY:
        return values
    middle = np.median(values, axis=0)
    far = CLOSE * np.median(np.abs(values - middle), axis=0)
    close: np.ndarray[Any, Any] = np.clip(values, middle - far, middle + far).astype(values.dtype)
    return close
