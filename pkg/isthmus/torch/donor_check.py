"""What another learner's moments would do to a sharded model, tried on all of its ranks at once.

Each rank steps a copy of what it holds; the first adds up what they say, and has what a learner of one process has.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from typing_extensions import override

from isthmus.torch.optimizers import Array, Outline, Plain, Stepped, Sums, Tried, Wrapped


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of a step."""

    why: str
    """What was wrong, or nothing."""
    nonnegative: list[bool]
    """Of each entry of the outline, in its order."""
    moved: list[Sums]
    lengths: list[Sums]


class Trial:
    """One rank's part."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Step a copy of what this rank holds, if there can be one."""
        self.stepped: Stepped | None = None
        self._why = ""
        try:
            self.stepped = Stepped(optimizer)
        except Exception as error:  # the optimizer's own: whatever it is, all ranks are to hear of it
            self._why = repr(error)

    def begun(self) -> bytes:
        """Return what this rank says of the first step."""
        if self.stepped is None:
            return msgspec.msgpack.encode(_Said(self._why, [], [], []))
        flags = list(_flags(self.stepped.outline))
        return msgspec.msgpack.encode(_Said("", flags, self.stepped.moved, self.stepped.lengths()))

    def tried(self, saved: dict[str, Any]) -> bytes:
        """Return what this rank says of a step with a saved state's moments, of which it has its part."""
        assert self.stepped is not None, "all ranks have begun"
        try:
            return msgspec.msgpack.encode(_Said("", [], self.stepped.moved_by(saved), []))
        except Exception as error:  # a stranger's moments: whatever they do, all ranks are to hear of it
            return self.failed(error)

    def failed(self, error: Exception) -> bytes:
        """Return what this rank says where that came to nothing."""
        return msgspec.msgpack.encode(_Said(repr(error), [], [], []))


class GroupCheck(Tried):
    """All ranks' parts, of the first rank; see `optimizers.Tried`. Raises `ValueError` where a rank cannot step."""

    def __init__(self, own: Trial, begun: Sequence[bytes], tried: Callable[[dict[str, Any]], Sequence[bytes]]) -> None:
        """`begun`: what each rank says. `tried`: has all of them try a state, and returns what each says then."""
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
    """Return the sums over all ranks. What several hold alike counts as often on both sides of a mean."""
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
    """Return an outline with what all ranks know to be nowhere negative, in the order of `_flags`."""
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
