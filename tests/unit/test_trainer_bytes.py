"""The built-in trainer says before it joins that it trains models of bytes only."""

from typing import Any, cast

import pytest
import torch
from torch import nn

from isthmus.demo import trainer
from isthmus.errors import InputError


def task(model: nn.Module) -> trainer.Task:
    def joined(*_: object) -> Any:
        raise ArithmeticError("joined")

    found = cast(Any, type("Given", (), {"data": None, "shard": (0, 1), "seed": 0, "order": 0, "join": joined}))()
    found.model = lambda: model
    return cast(trainer.Task, found)


@pytest.mark.parametrize(
    "model", [nn.Linear(16, 1), nn.Sequential(nn.Embedding(8, 8)), nn.Embedding(256, 1)], ids=["floats", "ids", "shape"]
)
def test_a_model_of_something_else_is_refused_before_anything_is_stored(model: nn.Module) -> None:
    with pytest.raises(InputError, match=r"models of bytes.*this one raises .*--train PACKAGE.MODULE:FUNCTION"):
        trainer.train(task(model))


def test_a_model_of_bytes_is_as_it_was() -> None:
    model = nn.Sequential(nn.Embedding(256, 8), nn.Dropout(0.5), nn.Linear(8, 256))
    before, drawn = {name: value.clone() for name, value in model.state_dict().items()}, torch.random.get_rng_state()
    with pytest.raises(ArithmeticError, match="joined"):
        trainer.train(task(model))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), drawn)
