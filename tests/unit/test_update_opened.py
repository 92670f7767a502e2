"""An update must match its announcement; each kind of mismatch is rejected with its own reason."""

from typing import Any

import numpy as np
import pytest

from isthmus.errors import RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.frame import Body
from isthmus.format.rules import Rules
from isthmus.log.updates import GRADIENT_NORM_MAX, Update
from isthmus.reasons import Reason
from support.opened import opened_update
from support.written_log import Written

PLAIN = Rules(fragments=2, sync_every=4, codec_up="f32", codec_down="f32")


def opened(
    w: Written, blob: Body, *, digest: bytes | None = None, p: int = 0, learner: str = "a", base: int = 3
) -> Update:
    return opened_update(w.run, blob, w.run.layout.fragments[p], learner, base, digest=digest)


def test_what_fits_is_opened_and_its_values_are_what_was_sent() -> None:
    async def body(w: Written) -> None:
        values = np.linspace(-1.0, 1.0, w.run.layout.fragments[0].size, dtype=np.float32)
        found = opened(w, w.update("a", 3, values=values))
        assert (found.header.learner, found.header.base) == ("a", 3)
        assert np.array_equal(found.gradient.decode(), values)

    Written(PLAIN).drive(body)


@pytest.mark.parametrize(
    ("made", "asked", "reason"),
    [
        ({}, {"digest": bytes(32)}, Reason.DIGEST_MISMATCH),
        ({"run": bytes(32)}, {}, Reason.WRONG_RUN),
        ({"fragment": 1}, {}, Reason.WRONG_LAYOUT),
        ({"codec": "int8"}, {}, Reason.WRONG_LAYOUT),
        ({}, {"p": 1}, Reason.WRONG_LAYOUT),
        ({}, {"learner": "b"}, Reason.WRONG_AUTHOR),
        ({}, {"base": 5}, Reason.MALFORMED),
        ({"base": 5}, {}, Reason.MALFORMED),
    ],
)
def test_what_an_update_says_must_be_what_was_announced(
    made: dict[str, Any], asked: dict[str, Any], reason: Reason
) -> None:
    async def body(w: Written) -> None:
        blob = w.update("a", **{"base": 3} | made)
        with pytest.raises(RecordInvalid) as caught:
            opened(w, blob, **asked)
        assert caught.value.reason is reason

    Written(PLAIN).drive(body)


@pytest.mark.parametrize(
    ("value", "reason"), [(np.nan, Reason.NON_FINITE), (-np.inf, Reason.NON_FINITE), (2e18, Reason.OVERFLOW)]
)
def test_one_number_is_enough_to_be_turned_away(value: float, reason: Reason) -> None:
    async def body(w: Written) -> None:
        values = np.zeros(w.run.layout.fragments[0].size, np.float32)
        values[-1] = value
        with pytest.raises(RecordInvalid) as caught:
            opened(w, w.update("a", 3, values=values))
        assert caught.value.reason is reason
        values[-1] = GRADIENT_NORM_MAX / 2
        opened(w, w.update("a", 3, values=values))

    Written(PLAIN).drive(body)


@pytest.mark.parametrize("by", [-64, 64])
def test_a_payload_of_another_size_is_of_another_layout(by: int) -> None:
    async def body(w: Written) -> None:
        header = opened(w, w.update("a", 3)).header
        wanted = 4 * w.run.layout.fragments[0].size
        blob = frame.draft(frame.Kind.UPDATE, header, wanted + by).blob
        with pytest.raises(RecordInvalid) as caught:
            opened(w, blob)
        assert caught.value.reason is Reason.WRONG_LAYOUT

    Written(PLAIN).drive(body)
