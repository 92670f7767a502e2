"""A fold of the log measures how similar successive merged differences are."""

import numpy as np
import pytest

from isthmus.codecs.kernels import F32
from isthmus.errors import InputError
from isthmus.inspect import explain
from isthmus.inspect.persistence import differences
from isthmus.log import merge
from support.written_log import Written


def merged(w: Written, keys: list[str]) -> F32:
    accumulator = merge.Accumulator(w.run.layout.fragments[0], merge.outers(w.run.rules))
    for key in keys:
        about, gradient = w.merged(key, w.states[0].version + 1)
        accumulator.add(gradient, about.weight, about.scale, learner=about.learner)
    return np.concatenate([delta * np.float32(scale) for delta, scale in accumulator.deltas()[0]])


def test_what_was_merged_is_read_back_from_the_momenta() -> None:
    async def body(w: Written) -> None:
        wanted = []
        for _ in range(4):
            keys = [w.upload(who, w.states[0].version) for who in ("a", "b")]
            wanted.append(merged(w, keys))
            await w.commit(*keys)
        found = await differences(w.log, 0)
        assert [d.version for d in found] == [1, 2, 3, 4]
        assert [d.length for d in found] == pytest.approx([float(np.linalg.norm(x)) for x in wanted], rel=1e-4)
        assert found[0].cosine is None
        for d, a, b in zip(found[1:], wanted[1:], wanted[:-1], strict=True):
            assert d.cosine == pytest.approx(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)), abs=1e-3)

    Written().drive(body)


def test_a_fragment_has_a_story() -> None:
    async def body(w: Written) -> None:
        for _ in range(3):
            await w.commit()
        told = await explain.explain(w.log, "0")
        assert "versions 1 to 3: merged differences are" in told.lines[1]
        assert "the outer momentum is 0.8" in told.lines[2]
        with pytest.raises(InputError, match="there is no fragment 99"):
            await explain.explain(w.log, "99")
        assert "nothing was merged" in (await explain.explain(w.log, "1")).lines[1]

    Written().drive(body)
