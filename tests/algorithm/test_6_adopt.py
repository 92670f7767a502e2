"""Step 6: learners fetch the new version once they hear of it, and put it into their models between two steps."""

import numpy as np

from isthmus.codecs.kernels import F32
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import Adoption, Pace
from isthmus.learner.boundary import Adopted, Boundary, Ready

H = 100
"""Steps between two uploads. Fragment 0 is due after the first step, and next only after these tests have ended."""

LAYOUT = partition([Spec("t", (4,), "float32", TensorClass.DENSE)], 1)


class Model:
    """Four parameters that grow by one in each step."""

    def __init__(self) -> None:
        self.values = np.zeros(4, np.float32)

    def read(self, fragment: int, out: F32) -> None:
        out[:] = self.values

    def write(self, fragment: int, values: F32) -> None:
        self.values[:] = values


def learner(adopt: Adoption) -> tuple[Model, Boundary]:
    model = Model()
    boundary = Boundary(
        LAYOUT, model, periods=(H, 8 * H), pace=Pace(), adopt=adopt, versions=[(0, np.zeros(4, np.float32), 0.0)],
        step=0, tokens_seen=0, now=lambda: 0.0, notify=lambda: None,
    )  # fmt: skip
    return model, boundary


def step(model: Model, boundary: Boundary) -> None:
    model.values += 1.0
    boundary.after_step(tokens=100)


VERSION_1 = Ready(fragment=0, version=1, values=np.full(4, 50.0, np.float32))


def test_the_version_is_in_the_model_after_the_next_step() -> None:
    """Training never waits for a version: a version that comes late is adopted late."""
    model, boundary = learner(Adoption.OVERWRITE)
    step(model, boundary)
    boundary.post(VERSION_1)
    assert model.values.tolist() == [1.0] * 4, "nothing changes while the loop computes"
    step(model, boundary)
    assert model.values.tolist() == [50.0] * 4


def test_overwriting_drops_the_steps_since_the_upload_and_counts_their_tokens() -> None:
    """The first step is already in an update. The three steps after it are in none."""
    model, boundary = learner(Adoption.OVERWRITE)
    for _ in range(3):
        step(model, boundary)
    boundary.post(VERSION_1)
    step(model, boundary)
    (adopted,) = (message for message in boundary.outbox if isinstance(message, Adopted))
    assert (adopted.version, adopted.overwritten) == (1, 300)


def test_carrying_keeps_the_steps_since_the_upload_on_top_of_the_version() -> None:
    model, boundary = learner(Adoption.CARRY)
    for _ in range(3):
        step(model, boundary)
    boundary.post(VERSION_1)
    step(model, boundary)
    assert model.values.tolist() == [53.0] * 4
