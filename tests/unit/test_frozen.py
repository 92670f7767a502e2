"""Frozen parameters are never sent; their digests show whether two learners have the same ones."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from isthmus.errors import InputError, LayoutMismatch
from isthmus.format.digests import digest
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import FrozenCheck
from isthmus.log.run import UNTOLD, Run
from isthmus.torch.frozen import digests_of

CHECKED = FrozenCheck.CHECKED


def base(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> nn.Sequential:
    """Return a model whose first linear layer is frozen."""
    torch.manual_seed(5)
    layer = nn.Linear(64, 64, bias=False).requires_grad_(False)
    layer.weight.mul_(scale)
    layer = layer.to(dtype)
    return nn.Sequential(layer, nn.Linear(64, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_digest_is_of_the_bytes_as_they_are_stored(dtype: torch.dtype) -> None:
    model = base(dtype)
    stored = model.get_parameter("0.weight").view(torch.uint8).numpy()
    assert digests_of(model, CHECKED) == {"0.weight": digest(stored)}
    turned = base(dtype)
    held = turned.get_parameter("0.weight")
    held.data = held.data.t().contiguous().t()  # the same values, in another order in memory
    assert digests_of(turned, CHECKED) == digests_of(model, CHECKED)


def four_bits(scale: float) -> nn.Module:
    from bitsandbytes.nn import Linear4bit  # importing it takes four seconds

    layer: nn.Module = Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    layer.load_state_dict({"weight": base(scale=scale).get_parameter("0.weight")})
    return nn.Sequential(layer.to("cpu"), nn.Linear(64, 2))


def made_of_others(scale: float) -> nn.Module:
    """Return a model whose frozen weight is a tensor made of two tensors, codes and scales, as torchao makes them."""
    model = base()
    two: Any = TwoTensor
    codes = model.get_parameter("0.weight").detach()
    model[0].weight = nn.Parameter(two(codes, torch.full_like(codes, scale)), requires_grad=False)
    return model


@pytest.mark.parametrize("quantised", [four_bits, made_of_others])
def test_quantised_weights_are_told_by_their_codes_and_scales(quantised: Callable[[float], nn.Module]) -> None:
    """Weights that are twice as large have the same codes."""
    model, again, larger = quantised(1.0), quantised(1.0), quantised(2.0)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["0.weight"]
    assert digests_of(model, CHECKED) == digests_of(again, CHECKED) != digests_of(larger, CHECKED)


def test_what_is_not_at_hand_is_trusted_or_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(InputError, match=r"frozen parameter 'weight' \(Parameter, meta\).*join\(frozen='trusted'\)"):
        digests_of(model, CHECKED)
    assert digests_of(model, FrozenCheck.TRUSTED) == {"weight": UNTOLD, "bias": UNTOLD}


def test_who_trusts_is_asked_for_names_alone() -> None:
    specs = [Spec("w", (2, 2), "float32", TensorClass.DENSE)]

    def run(frozen: dict[str, bytes]) -> Run:
        header = SimpleNamespace(model="package.module:build")
        return Run("run", bytes(32), header, partition(specs, 1), frozen)  # type: ignore[arg-type]

    known, other = digest(b"known"), digest(b"other")
    run({"base": known}).require(specs, {"base": known})
    run({"base": known}).require(specs, {"base": UNTOLD})
    run({"base": UNTOLD}).require(specs, {"base": known})
    with pytest.raises(LayoutMismatch, match="'base' is stored in other bytes here"):
        run({"base": known}).require(specs, {"base": other})
    with pytest.raises(LayoutMismatch, match="'more' is frozen only here"):
        run({"base": UNTOLD}).require(specs, {"base": UNTOLD, "more": UNTOLD})
    with pytest.raises(LayoutMismatch, match="'base' is frozen only in the run"):
        run({"base": UNTOLD}).require(specs, {})
    with pytest.raises(LayoutMismatch, match="'w' is frozen here, and trained in the run"):
        run({}).require([], {"w": known})
    with pytest.raises(LayoutMismatch, match="'base' is trained here, and frozen in the run"):
        run({"base": known}).require([Spec("base", (2, 2), "float32", TensorClass.DENSE), *specs], {})
