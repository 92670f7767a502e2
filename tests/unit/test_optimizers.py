"""An inner optimizer's state goes into a checkpoint and comes back bit for bit, whatever the optimizer keeps."""

from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from torch import nn

from isthmus.errors import InputError
from isthmus.format.records import tree
from isthmus.torch import model as torch_model
from isthmus.torch import optimizers
from isthmus.torch.loop import Loop
from isthmus.torch.optimizers import Stepped


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).to(dtype)


Keep = Callable[[torch.Tensor], dict[Any, Any]]


class Keeps(torch.optim.Optimizer):
    """Steps by `lr` times the gradient's sign, and keeps for each parameter the state that `keep` returns."""

    def __init__(self, params: Iterable[torch.Tensor], keep: Keep, lr: float = 0.1) -> None:
        self.keep = keep
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if not self.state[p]:
                        self.state[p].update(self.keep(p))
                    p.sub_(group["lr"] * p.grad.sign())


CODEBOOK = torch.linspace(-1.0, 1.0, 256)


class Scaled(torch.Tensor):
    """A tensor subclass that holds bytes and a scale, as low-bit optimizers keep their moments."""

    @staticmethod
    def __new__(cls: "type[Scaled]", codes: torch.Tensor, scale: torch.Tensor, bits: int) -> "Scaled":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bits: int) -> None:
        self.codes, self.scale, self.bits = codes, scale, bits

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], [self.bits, self.codes.shape]

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: list[Any], size: Any = None, stride: Any = None
    ) -> "Scaled":
        return cls(inner["codes"], inner["scale"], context[0])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        if func is torch.ops.aten.clone.default:
            return cls(args[0].codes.clone(), args[0].scale.clone(), args[0].bits)
        raise NotImplementedError(f"{func} of a scaled tensor")


def noise(p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(dtype)


KEPT: dict[str, Keep] = {
    "float8": lambda p: {"m": noise(p, torch.float8_e4m3fn), "scale": torch.tensor(0.25, dtype=torch.float8_e8m0fnu)},
    "float32 of bfloat16": lambda p: {"step": torch.tensor(3.0), "m": noise(p), "v": noise(p, torch.float64)},
    "8-bit with codebook": lambda p: {
        "step": 7,
        "state1": (noise(p) * 9).to(torch.uint8).reshape(-1),
        "absmax1": noise(p).abs().reshape(-1)[:3],
        "qmap1": CODEBOOK,
    },
    "signed bytes": lambda p: {"m": (noise(p) * 50).to(torch.int8), "rows": noise(p).reshape(p.shape[0], -1).sum(1)},
    "nested": lambda p: {
        "kind": "factored",
        "history": [noise(p), {"left": (noise(p)[:2], None, True)}],
        "seen": 2**70,
        ("a", 1): b"bytes",
    },
    "half a byte": lambda p: {
        "m": torch.arange(p.numel(), dtype=torch.uint8).view(torch.uint4),  # type: ignore[attr-defined]
    },
    "not in order": lambda p: {"m": noise(p).t() if p.dim() == 2 else noise(p)},
    "a subclass": lambda p: {"m": Scaled((noise(p) * 50).to(torch.int8), noise(p)[:1], 8), "list": [noise(p)]},
}


def stepped(keep: Keep, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Keeps]:
    model = net(dtype)
    optimizer = Keeps(model.parameters(), keep)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer


def written(saver: Loop) -> dict[str, Any]:
    """Return the optimizer state of a checkpoint, written and read again."""
    leaves: list[tree.Leaf] = []
    plain = msgpack.packb(tree.flatten(saver.save().optimizer, "optimizer", saver.take, leaves))
    read = msgpack.unpackb(plain, use_list=False, strict_map_key=False)
    copies = [tree.Leaf(leaf.spec, leaf.data.copy()) for leaf in leaves]
    found: dict[str, Any] = tree.rebuild(read, copies, torch_model.make_tensor)
    return found


def same(a: Any, b: Any) -> bool:
    """Return whether two trees are equal; tensors are compared bit by bit."""
    assert type(a) is type(b)
    if isinstance(a, Scaled):
        return a.bits == b.bits and same([a.codes, a.scale], [b.codes, b.scale])
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        one, other = torch_model.take_tensor(a), torch_model.take_tensor(b)
        assert one is not None
        assert other is not None
        return np.array_equal(one.data, other.data)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("what", KEPT)
def test_what_an_optimizer_keeps_comes_back_bit_for_bit(what: str, dtype: torch.dtype) -> None:
    model, optimizer = stepped(KEPT[what], dtype)
    saved = written(Loop(model, optimizer))
    again_model = net(dtype)
    again = Keeps(again_model.parameters(), KEPT[what], lr=9.0)
    optimizers.load(again, saved, settings=True)
    for p, q in zip(model.parameters(), again_model.parameters(), strict=True):
        assert same(dict(optimizer.state[p]), dict(again.state[q]))
    assert again.param_groups[0]["lr"] == 0.1, "its settings are restored too"


def test_a_tensor_that_all_parameters_share_is_one_again() -> None:
    model, optimizer = stepped(KEPT["8-bit with codebook"])
    saved = written(Loop(model, optimizer))
    again = Keeps(net().parameters(), KEPT["8-bit with codebook"])
    optimizers.load(again, saved, settings=True)
    assert len({id(entries["qmap1"]) for entries in again.state.values()}) == 1


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.Rprop])
def test_two_go_the_same_way_after_a_restart(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """Real optimizers in bfloat16 take three steps and three more, with and without a restart in between."""
    straight, broken = net(torch.bfloat16), net(torch.bfloat16)
    one, two = kind(straight.parameters(), lr=0.01), kind(broken.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)
        optimizer.step()

    for seed in range(3):
        step(straight, one, seed)
        step(broken, two, seed)
    saved = written(Loop(broken, two))
    three = kind(broken.parameters(), lr=0.5)
    optimizers.load(three, saved, settings=True)
    for seed in range(3, 6):
        step(straight, one, seed)
        step(broken, three, seed)
    assert all(torch.equal(p, q) for p, q in zip(straight.parameters(), broken.parameters(), strict=True))


class Pair(tuple[int, int]):
    _fields = ("a", "b")


@pytest.mark.filterwarnings("ignore:.*quant")  # torch warns that its quantised tensors are deprecated
@pytest.mark.parametrize(
    ("odd", "what"),
    [
        (lambda p: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda p: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised"),
        (lambda p: torch.ones(2).as_subclass(type("Odd", (torch.Tensor,), {})), "Odd"),
        (lambda p: 2j, "complex"),
        (lambda p: Pair((1, 2)), "Pair"),
    ],
    ids=["sparse", "quantised", "subclass", "complex", "named tuple"],
)
def test_what_cannot_be_kept_is_refused_by_its_place_as_it_is_written(
    odd: Callable[[torch.Tensor], object], what: str
) -> None:
    model, optimizer = stepped(lambda p: {"deep": [0, odd(p)]})
    with pytest.raises(InputError, match=rf"\['state'\]\['state'\]\[0\]\['deep'\]\[1\] is a .*{what}"):
        written(Loop(model, optimizer))


class NeedsClosure(Keeps):
    def step(self, closure: Callable[[], object]) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        return super().step()


def test_so_is_a_subclass_that_no_restart_could_make_again() -> None:
    """Only a copy that has stepped shows the class. This optimizer needs a closure, so no copy of it can step."""
    model = net()
    optimizer = NeedsClosure(model.parameters(), KEPT["a subclass"])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(lambda: None)
    with pytest.raises(InputError, match=r"NeedsClosure cannot be brought back .*tensor subclasses"):
        written(Loop(model, optimizer))


# --- the copy that steps ----------------------------------------------------------------------------------------------


def test_the_copy_leaves_everything_as_it_was() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("hook"))
    before = [p.detach().clone() for p in model.parameters()]
    rng = torch.get_rng_state()
    stepped_once = Stepped(optimizer)
    assert seen == []
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)
    assert min(moved.rms for moved in stepped_once.moved) > 0.0, (
        "the copy does not step with the rate of 0 at the start of a schedule"
    )
    optimizer.step()
    schedule.step()  # both still work: neither was patched


def test_random_numbers_of_an_optimizer_are_not_those_of_the_training() -> None:
    class Noisy(Keeps):
        def step(self, closure: object = None) -> Any:
            torch.rand(1)
            return super().step()

    optimizer = Noisy(net().parameters(), lambda p: {})
    rng = torch.get_rng_state()
    Stepped(optimizer)
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("maximize", [False, True])
def test_it_shows_which_numbers_may_be_below_zero(maximize: bool) -> None:
    shown = Stepped(torch.optim.AdamW(net().parameters(), maximize=maximize)).outline[0]
    assert {name: entry.nonnegative for name, entry in shown.items()} == {
        "step": True,
        "exp_avg": False,
        "exp_avg_sq": True,
    }
