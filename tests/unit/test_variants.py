"""Each variant of the arithmetic that only the lab tries does what its name says, and ends with its setting."""

import itertools
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from isthmus.codecs import codec, pack, unpack
from isthmus.codecs.kernels import F32
from isthmus.codecs.packed import keep_dropped
from isthmus.errors import InputError
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import Adoption, Pace, Rules
from isthmus.learner import backend
from isthmus.learner import boundary as boundary_module
from isthmus.learner.backend import local_array
from isthmus.learner.boundary import Boundary, Captured, Ready, UploadDone
from isthmus.log import merge
from isthmus_lab.training.variants import VARIANTS, filtered, sparse, variant

FRAGMENT = partition([Spec("w", (12, 9), "float32", TensorClass.DENSE)], 1).fragments[0]
RULES = Rules(merge="avg", outer_lr=0.5, outer_momentum=0.8)
DRAW = np.random.default_rng(0)
X: F32 = DRAW.normal(size=FRAGMENT.size).astype(np.float32)
M: F32 = DRAW.normal(size=FRAGMENT.size).astype(np.float32)


def step(state: merge.State, x: F32) -> merge.State:
    round_ = merge.Accumulator(FRAGMENT, merge.outers(RULES))
    round_.add(x, 1.0)
    master, momentum, _ = round_.outer_step(state)
    return merge.State(state.version + 1, master, master, momentum)


def at(version: int, momentum: F32) -> merge.State:
    return merge.State(version, M, M, momentum)


def close(found: F32, expected: NDArray[np.floating]) -> bool:
    return bool(np.allclose(found, expected, rtol=1e-5, atol=1e-6))


def test_none_is_the_librarys_own_and_one_that_is_over_is_gone() -> None:
    before = step(at(3, -X), X)
    for name in VARIANTS:
        with variant(name):
            pass
    with variant(""):
        after = step(at(3, -X), X)
    assert after.digest == before.digest
    with pytest.raises(InputError, match="unknown variant 'better': choose one of restart every 8"):
        variant("better")


def test_momentum_is_forgotten_where_the_merge_is_opposed_to_it() -> None:
    plain = step(at(3, X), X)
    with variant("restart where opposed"):
        assert close(step(at(3, -X), X).momentum, X)
        assert close(step(at(3, X), X).momentum, plain.momentum)
        assert close(step(at(3, X), X).master, plain.master)
    assert close(step(at(3, -X), X).momentum, 0.2 * X)


@pytest.mark.parametrize("every", [8, 16])
def test_momentum_is_forgotten_every_so_many_versions(every: int) -> None:
    with variant(f"restart every {every}"):
        assert close(step(at(every - 1, M), X).momentum, X)
        assert close(step(at(every, M), X).momentum, X + 0.8 * M)


def test_momentum_follows_how_alike_merges_are() -> None:
    with variant("momentum of lag"):
        same = at(0, np.zeros_like(X))
        for _ in range(40):
            same = step(same, X)
        before, same = same, step(same, X)
        mu = float((same.momentum - X) @ before.momentum / (before.momentum @ before.momentum))
        assert mu == pytest.approx(0.9, abs=1e-4)
        assert close(same.master - before.master, -(0.5 / 0.2) * 0.1 * (X + mu * same.momentum))
    with variant("momentum of lag"):
        turning = at(0, np.zeros_like(X))
        for i in range(10):
            turning = step(turning, X if i % 2 else -X)
        assert close(turning.momentum, X), "differences that turn at every version get no momentum"


def test_schedule_free_averages_all_steps_evenly() -> None:
    with variant("schedule-free"):
        now = at(0, np.zeros_like(X))
        for _ in range(5):
            now = step(now, X)
    z = M.astype(np.float64) - 0.5 * np.arange(1, 6)[:, None] * X
    assert close(now.momentum, z.mean(axis=0))
    assert close(now.master, 0.2 * z[-1] + 0.8 * z.mean(axis=0))


def test_what_is_opposed_to_the_momentum_is_taken_out_of_late_updates() -> None:
    assert np.array_equal(filtered(X, X, FRAGMENT), X)
    assert np.abs(filtered(-X, X, FRAGMENT)).max() < 1e-6
    assert close(filtered(-X, X, FRAGMENT, kept=0.25), -0.25 * X)
    aside = M - float(M @ X) / float(X @ X) * X
    assert close(filtered((aside - X).astype(np.float32), X, FRAGMENT), aside)
    assert np.array_equal(filtered(X, np.zeros_like(X), FRAGMENT), X)


def test_of_a_sparse_update_the_largest_are_left_at_two_magnitudes() -> None:
    found = sparse(X, FRAGMENT, 8, chunk=54)
    for part in (slice(0, 54), slice(54, 108)):
        left = np.flatnonzero(found[part])
        assert left.size == 8
        assert set(left) == set(np.argsort(-np.abs(X[part]))[:8])
        assert np.array_equal(np.sign(found[part][left]), np.sign(X[part][left]))
        magnitudes = np.sort(np.abs(X[part]))[::-1]
        assert np.allclose(np.unique(np.abs(found[part][left])), [magnitudes[4:8].mean(), magnitudes[:4].mean()])
    assert not sparse(np.zeros_like(X), FRAGMENT, 8, chunk=54).any()


def test_residuals_in_bfloat16_are_what_two_bytes_hold_of_them() -> None:
    code = codec("int4")
    data = pack(code, FRAGMENT, X)
    exact, half = X.copy(), X.copy()
    vars(backend)["keep_dropped"](FRAGMENT, code, data, exact)
    with variant("residuals in bfloat16"):
        vars(backend)["keep_dropped"](FRAGMENT, code, data, half)
    assert exact.any()
    assert not np.array_equal(half, exact)
    assert np.abs(half - exact).max() <= 2.0**-8 * np.abs(exact).max()


def test_a_learner_that_sends_sparsely_keeps_what_it_dropped() -> None:
    code = codec("int8")

    def sent() -> tuple[F32, F32]:
        blob = vars(backend)["pack"](code, FRAGMENT, X, whole=False)
        left, values = X.copy(), np.empty_like(X)
        keep_dropped(FRAGMENT, code, blob, left)
        unpack(code, FRAGMENT, blob, values)
        return values, left

    with variant("sparse 64"):
        values, left = sent()
    assert np.count_nonzero(values) == max(1, 64 * X.size // 4096)
    assert np.allclose(values + left, X, atol=1e-6)
    assert np.count_nonzero(sent()[0]) > X.size // 2


class Model:
    """A model of one fragment. The tests add one to its values at each step."""

    def __init__(self) -> None:
        self.values = np.zeros(FRAGMENT.size, np.float32)

    def read(self, fragment: int, out: F32) -> None:
        out[:] = self.values

    def write(self, fragment: int, values: F32) -> None:
        self.values[:] = values


def learner(model: Model, sync_every: int) -> Boundary:
    return Boundary(
        partition([Spec("w", (12, 9), "float32", TensorClass.DENSE)], 1),
        model,
        periods=(sync_every, 8 * sync_every),
        pace=Pace(),
        adopt=Adoption.OVERWRITE,
        versions=[(0, np.zeros(FRAGMENT.size, np.float32), 0.0)],
        step=0,
        tokens_seen=0,
        now=lambda: 0.0,
        notify=lambda: None,
    )


def steps(boundary: Boundary, model: Model, count: int) -> list[Captured]:
    said = []
    for _ in range(count):
        model.values += 1
        boundary.after_step(100)
        said += [m for m in boundary.outbox if isinstance(m, Captured)]
        boundary.outbox.clear()
        boundary.post(UploadDone(0))
    return said


def test_what_a_version_replaced_is_in_the_updates_after_it() -> None:
    model = Model()
    with variant("overwritten fed back"):
        boundary = learner(model, 4)
        (first,) = steps(boundary, model, 3)
        assert (first.step, local_array(first.values)[0]) == (1, 1)
        boundary.post(Ready(0, 1, np.full(FRAGMENT.size, 10, np.float32)))
        (again,) = steps(boundary, model, 4)[:1]
    # Adopting at the boundary of step 4 overwrote steps 2 to 4. The next update has them, the model itself does not.
    assert local_array(again.values)[0] - local_array(again.base_values)[0] == (again.step - 4) + 3
    assert model.values[0] == 10 + 3
    steps(boundary, model, 1)


def test_tensors_are_cut_where_a_fragment_is_smaller() -> None:
    specs = [Spec("w", (96, 96), "float32", TensorClass.DENSE), Spec("v", (64, 64), "float32", TensorClass.DENSE)]
    with variant("tensors cut"):
        cut = partition(specs, 6)
    assert len(cut.fragments) == 6
    assert max(f.size for f in cut.fragments) < 96 * 96 / 2, "each fragment is smaller than half of the larger tensor"
    assert len(partition(specs, 6).fragments) == 2


def test_rounds_grow_with_a_learners_steps() -> None:
    model = Model()
    # No update is merged here. Without the patch, updates would therefore be sent less and less often.
    with variant("H 6, 12, 24"), patch.object(boundary_module, "GROWTH", 1 << 30):
        boundary = learner(model, 4)
        at = [m.step for m in steps(boundary, model, 400)]
    gaps = {later: later - before for before, later in itertools.pairwise(at)}
    assert {gap for step, gap in gaps.items() if step < 150} == {6}
    assert {gap for step, gap in gaps.items() if 170 < step < 300} == {12}
    assert {gap for step, gap in gaps.items() if step > 330} == {24}
    assert {vars(Boundary)[name].__name__ for name in ("_within", "_capture")} == {"_within", "_capture"}
