"""`step` takes a count or a loss of any numeric type, and otherwise names the argument that is wrong."""

import math

import numpy as np
import pytest

from isthmus.errors import InputError
from isthmus.learner.step_arguments import loss_of, tokens_of

torch = pytest.importorskip("torch")

COUNTS = [32, 32.0, np.int64(32), np.float32(32), np.array(32), np.array([32]), torch.tensor(32), torch.tensor([32.0])]


@pytest.mark.parametrize("given", COUNTS, ids=repr)
def test_a_count_of_any_kind_is_taken(given: object) -> None:
    found = tokens_of(given)
    assert found == 32
    assert type(found) is int


BAD_COUNTS = [
    (32.5, "step(tokens=32.5): a step has a whole number"),
    (0, "at least 1"),
    (-3, "at least 1"),
    (math.nan, "tokens=nan"),
    (math.inf, "tokens=inf"),
    (torch.tensor(32.5), "32.5"),
    (torch.zeros(4, 8), "is of shape (4, 8); count them: batch.numel()"),
    (np.zeros(3), "is of shape (3,)"),
    ("32", "is a str, not a number"),
    (None, "is a NoneType, not a number"),
    (True, "is a bool, not a number"),
    (1j, "is a complex, not a number"),
]


@pytest.mark.parametrize(("given", "said"), BAD_COUNTS, ids=[repr(given) for given, _ in BAD_COUNTS])
def test_what_is_no_count_is_refused_by_name(given: object, said: str) -> None:
    with pytest.raises(InputError) as caught:
        tokens_of(given)
    assert "tokens" in str(caught.value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given", [2, 2.0, np.float64(2), torch.tensor(2.0), torch.tensor([2.0], requires_grad=True), torch.tensor(2).half()]
)
def test_a_loss_of_any_kind_is_taken(given: object) -> None:
    found = loss_of(given)
    assert found == 2.0
    assert type(found) is float


def test_a_loss_need_not_be_given_or_finite() -> None:
    assert loss_of(None) is None
    found = loss_of(torch.tensor(math.nan))
    assert found is not None
    assert math.isnan(found)
    assert loss_of(math.inf) == math.inf


@pytest.mark.parametrize("given", [torch.zeros(2), np.zeros((1, 2)), "2.0", [2.0]])
def test_what_is_no_loss_is_refused_by_name(given: object) -> None:
    with pytest.raises(InputError, match=r"step\(loss="):
        loss_of(given)
