"""The class of a tensor decides how it is merged; it is found from the module, or the run's creator names it."""

import numpy as np
import pytest
from torch import nn

from isthmus.errors import InputError
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import Rules
from isthmus.log import merge
from isthmus.torch.model import specs_of

WORDS, WIDTH = 32, 8


class Speaker(nn.Module):
    """A model with an embedding, a router, a square layer and an output layer."""

    def __init__(self, *, tied: bool = False, words: int = WORDS) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.square = nn.Linear(WIDTH, WORDS, bias=False)
        self.head = nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.table.weight


def classes(model: nn.Module, *vectors: str) -> dict[str, TensorClass]:
    return {spec.name: spec.role for spec in specs_of(model, vectors)}


def test_an_output_layer_of_its_own_is_no_matrix_and_other_layers_are() -> None:
    found = classes(Speaker())
    assert found == {
        "table.weight": TensorClass.EMBEDDING,
        "router.weight": TensorClass.DENSE,
        "square.weight": TensorClass.DENSE,  # one output for each word, but not the last layer
        "head.weight": TensorClass.VECTOR,
    }
    assert classes(Speaker(words=WORDS + 1))["head.weight"] == TensorClass.DENSE, (
        "it has more outputs than there are words"
    )
    assert "head.weight" not in classes(Speaker(tied=True)), "a tied output layer is the embedding"
    assert classes(nn.Sequential(nn.Linear(4, WORDS)))["0.weight"] == TensorClass.DENSE, "the model has no embedding"


def test_what_is_named_is_no_matrix() -> None:
    assert classes(Speaker(), "*outer.weight")["router.weight"] == TensorClass.VECTOR
    assert classes(Speaker(), "table.weight")["table.weight"] == TensorClass.EMBEDDING, (
        "an embedding stays one even if it is named"
    )
    with pytest.raises(InputError, match=r"no trainable parameter is named gate\.\*: there are table\.weight"):
        specs_of(Speaker(), ["gate.*"])


@pytest.mark.parametrize("shape", [(6, 5, 4), (2, 3, 2, 2), (7,), (9, 1)])
def test_tensors_of_other_than_two_sides_are_merged_by_rda(shape: tuple[int, ...]) -> None:
    fragment = partition([Spec("w", shape, "float32", TensorClass.DENSE)], 1).fragments[0]
    draw, found = np.random.default_rng(0), []
    given = [draw.standard_normal(fragment.size).astype(np.float32) for _ in range(4)]
    for rule in ("rda", "iso"):
        round_ = merge.Accumulator(fragment, merge.outers(Rules(merge=rule)))
        for x in given:
            round_.add(x, 1.0)
        ((delta, scale),), _ = round_.deltas()
        found.append(delta * np.float32(scale))
    assert found[0].tobytes() == found[1].tobytes()
