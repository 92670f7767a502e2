"""The update that is turned away if a merge overflows is the one with the most of the sum."""

from typing import Any, cast

import msgspec

from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.records.objects import Input
from isthmus.format.rules import BOUNDS, Rules
from isthmus.rounds.bounds import Influence
from isthmus.runtime.clock import single_threaded
from isthmus.syncer.round_sum import RoundSum
from support.filled import filled

FRAGMENT = partition([Spec("t", (1,), "float32", TensorClass.DENSE)], 1).fragments[0]


def test_neither_the_longest_nor_the_heaviest_update_is_turned_away_but_the_one_that_adds_most() -> None:
    nobody = cast(Any, None)
    total = RoundSum(FRAGMENT, Rules(), Influence(BOUNDS, Rules()), single_threaded(), nobody, nobody)
    total.inputs = [
        msgspec.structs.replace(filled(Input), learner=name, weight=weight, scale=scale, norm=norm)
        for name, weight, scale, norm in (
            ("long", 1.0, 1.0, 50.0),
            ("heavy", 90.0, 1.0, 0.5),
            ("cut", 20.0, 0.01, 100.0),
            ("most", 10.0, 0.5, 20.0),
        )
    ]
    assert total.furthest().learner == "most"
