"""Planted bugs: values, weights and lengths."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from isthmus.codecs.int4 import Int4
from isthmus.codecs.int8 import Int8
from isthmus.codecs.kernels import F32
from isthmus.format.layout import TensorClass
from isthmus.format.rules import MergeRule
from isthmus.learner import backend, uplink
from isthmus.learner.boundary import Boundary
from isthmus.log import merge, polar
from simulation.bugs.planted import planted


def _advance(change: Any) -> Any:
    """Patch the outer step: `change(state, master, momentum)` replaces its result."""

    def step(self: Any, state: Any, publication: Any) -> Any:
        master, momentum, cancelled = original(self, state)
        master, momentum = change(state, master, momentum)
        publication.take(slice(0, master.size), master, momentum)
        return master, momentum, cancelled

    original = merge.Accumulator.outer_step
    return patch.object(merge.Accumulator, "outer_step", step)


@planted(20)
def publish_the_way_of_the_master() -> Iterator[None]:
    """The published difference is how far the master moved, without what the codec dropped before."""

    def advance(state: Any, *more: Any, stated: bool) -> Any:
        masters.append(state.master)
        return original(state, *more, stated=stated)

    def take(self: Any, at: slice, master: F32, momentum: F32) -> None:
        np.subtract(master, masters[-1][at], out=self.published[at])

    masters, original = list[F32](), merge.advance
    with (
        patch.object(merge, "advance", advance),
        patch.object(merge.Publication, "take", take),
        patch.object(Int4, "advances", new=False),
        patch.object(Int8, "advances", new=False),
    ):
        yield


@planted(20)
def the_momentum_pushes_back() -> Iterator[None]:
    """Nesterov's step has the wrong sign."""

    def change(state: Any, master: Any, momentum: Any) -> Any:
        return state.master + (state.master - master), momentum

    with _advance(change):
        yield


@planted(20)
def the_momentum_is_not_kept() -> Iterator[None]:
    """Every round starts with no momentum."""

    def change(state: Any, master: Any, momentum: Any) -> Any:
        return master, momentum - np.float32(0.8) * state.momentum

    with _advance(change):
        yield


@planted(40, caught_by=2)
def directions_are_not_made_longer() -> Iterator[None]:
    """RDA does not restore the length: the mean direction is used as it is."""
    with patch.object(merge, "CANCELLED_BELOW", 1e9):
        yield


@planted(40, caught_by=22)
def matrices_are_merged_like_vectors() -> Iterator[None]:
    """Matrices are merged by RDA instead of Iso."""
    with patch.object(merge, "_merge_of", lambda _, rule: MergeRule.RDA if rule == MergeRule.ISO else rule):
        yield


@planted(60, caught_by=22)
def a_quintic_is_left_out() -> Iterator[None]:
    """Small directions are not made as long as the others."""
    with patch.object(polar, "QUINTICS", polar.QUINTICS[:-1]):
        yield


@planted(40, caught_by=1)
def embeddings_are_merged_like_the_rest() -> Iterator[None]:
    """The merge rule for embeddings is ignored."""

    def outers(rules: Any) -> Any:
        found = original(rules)
        return dict.fromkeys(found, found[TensorClass.DENSE])

    original = merge.outers
    with patch.object(merge, "outers", outers):
        yield


@planted(20)
def weigh_by_tokens_alone() -> Iterator[None]:
    """The weight ignores tokens per step."""
    with patch.object(merge, "weight", lambda tokens, steps: float(tokens)):
        yield


@planted(20)
def codes_are_cut_off() -> Iterator[None]:
    """A quantised level is rounded towards zero."""

    def encode(self: Any, x: Any, out: Any) -> None:
        original(self, np.float32(0.8) * x, out)

    original = Int4.encode
    with patch.object(Int4, "encode", encode):
        yield


@planted(60, caught_by=10)
def blend_with_another_share() -> Iterator[None]:
    """More of the local model remains than the rule says."""
    with patch.object(backend, "BLEND", np.float32(0.6)):
        yield


@planted(60, caught_by=6)
def carry_what_was_uploaded_too() -> Iterator[None]:
    """All local work since the base is carried, even what an update already contains."""

    def adopt(self: Any, fragment: Any) -> None:
        self.slots[fragment].sent_values = None
        original(self, fragment)

    original = Boundary._adopt
    with patch.object(Boundary, "_adopt", adopt):
        yield


@planted(40, "choir", caught_by=19)
def a_life_begins_with_what_is_published() -> Iterator[None]:
    """The local work of a checkpoint is counted, but its parameters are not loaded."""

    def point(self: Any, history: Any, p: Any, version: Any, values: Any) -> Any:
        found = original(self, history, p, version, values)
        return None if found is None else replace(found, values=values)

    original = uplink.Uplink.point
    with patch.object(uplink.Uplink, "point", point):
        yield
