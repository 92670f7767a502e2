"""Tries on all ranks of a sharded model what another learner's moments would do to it.

Each rank takes a step with a copy of its shards. The first rank adds up the results of all ranks, and so has the same
figures as a learner of one process.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from typing_extensions import override

from isthmus.torch.optimizers import Array, Outline, Plain, Stepped, Sums, Tried, Wrapped


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """A rank's result of a step."""

    why: str
    """The error; empty if the step succeeded."""
    nonnegative: list[bool]
    """The flag `nonnegative` of each entry of the outline, in the outline's order."""
    moved: list[Sums]
    lengths: list[Sums]


class Trial:
    """One rank's part in the trial."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a step with a copy of this rank's shards. A failure is kept for `begun`."""
        self.stepped: Stepped | None = None
        self._why = ""
        try:
            self.stepped = Stepped(optimizer)
        except Exception as error:  # an optimizer may raise anything, and all ranks have to learn of it
            self._why = repr(error)

    def begun(self) -> bytes:
        """Return this rank's result of the first step, encoded."""
        if self.stepped is None:
            return msgspec.msgpack.encode(_Said(self._why, [], [], []))
        flags = list(_flags(self.stepped.outline))
        return msgspec.msgpack.encode(_Said("", flags, self.stepped.moved, self.stepped.lengths()))

    def tried(self, saved: dict[str, Any]) -> bytes:
        """Return this rank's result, encoded, of a step with this rank's part of a saved state's moments."""
        assert self.stepped is not None, "all ranks have begun"
        try:
            return msgspec.msgpack.encode(_Said("", [], self.stepped.moved_by(saved), []))
        except Exception as error:  # foreign moments may raise anything, and all ranks have to learn of it
            return self.failed(error)

    def failed(self, error: Exception) -> bytes:
        """Return the result, encoded, of a step with moments that failed."""
        return msgspec.msgpack.encode(_Said(repr(error), [], [], []))


class GroupCheck(Tried):
    """The results of all ranks, added up on the first rank; see `optimizers.Tried`.

    Raises `ValueError` if a rank cannot step.
    """

    def __init__(self, own: Trial, begun: Sequence[bytes], tried: Callable[[dict[str, Any]], Sequence[bytes]]) -> None:
        """`begun`: each rank's result of the first step. `tried`: has all ranks try a state; returns their results."""
        said = _heard(begun)
        assert own.stepped is not None, "else its own words have raised"
        flags = iter([all(of) for of in zip(*(s.nonnegative for s in said), strict=True)])
        self.outline: dict[Hashable, Outline] = _with_flags(own.stepped.outline, flags)
        self.moved = _added([s.moved for s in said])
        self._lengths = _added([s.lengths for s in said])
        self._tried = tried

    @override
    def moved_by(self, saved: dict[str, Any]) -> list[Sums]:
        return _added([s.moved for s in _heard(self._tried(saved))])

    @override
    def lengths(self) -> list[Sums]:
        return self._lengths


def _heard(words: Sequence[bytes]) -> list[_Said]:
    said = [msgspec.msgpack.decode(each, type=_Said) for each in words]
    for rank, of in enumerate(said):
        if of.why:
            raise ValueError(f"rank {rank}: {of.why}")
    return said


def _added(of_ranks: Sequence[list[Sums]]) -> list[Sums]:
    """Return the sums over all ranks.

    A tensor that several ranks hold alike counts once for each in both squares and count, so its mean stays the same.
    """
    return [sum(of, Sums(0.0, 0)) for of in zip(*of_ranks, strict=True)]


def _flags(tree: Outline) -> Iterator[bool]:
    match tree:
        case Array() | Plain():
            yield tree.nonnegative
        case Wrapped():
            yield from _flags(tree.parts)
        case dict():
            for value in tree.values():
                yield from _flags(value)
        case list() | tuple():
            for item in tree:
                yield from _flags(item)


def _with_flags(tree: Outline, flags: Iterator[bool]) -> Outline:
    """Return an outline with its flags `nonnegative` replaced by `flags`, in the order of `_flags`."""
    match tree:
        case Array() | Plain():
            return replace(tree, nonnegative=next(flags))
        case Wrapped():
            return replace(tree, parts=_with_flags(tree.parts, flags))
        case dict():
            return {key: _with_flags(value, flags) for key, value in tree.items()}
        case list() | tuple():
            return type(tree)(_with_flags(item, flags) for item in tree)
    return tree
