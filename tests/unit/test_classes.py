"""What kind of tensor a module's parameters are to a merge: found from the module, or named by the run's creator."""

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
    """Words in, a gate of experts, words out."""

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
        "square.weight": TensorClass.DENSE,  # as wide as there are words, but not the last
        "head.weight": TensorClass.VECTOR,
    }
    assert classes(Speaker(words=WORDS + 1))["head.weight"] == TensorClass.DENSE, "those are no words"
    assert "head.weight" not in classes(Speaker(tied=True)), "what is tied is the embedding"
    assert classes(nn.Sequential(nn.Linear(4, WORDS)))["0.weight"] == TensorClass.DENSE, "nothing is embedded"


def test_what_is_named_is_no_matrix() -> None:
    assert classes(Speaker(), "*outer.weight")["router.weight"] == TensorClass.VECTOR
    assert classes(Speaker(), "table.weight")["table.weight"] == TensorClass.EMBEDDING, "it is one all the same"
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
