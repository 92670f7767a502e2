"""A wrapped module has the same parameter names as the module itself, and a partial optimizer gives a warning."""

import logging
import socket
from collections.abc import Callable, Iterator

import pytest

from isthmus.torch import model as torch_model

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, from torch.compile


def net() -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def names(model: nn.Module) -> list[str]:
    return [spec.name for spec in torch_model.specs_of(model)]


def inner_compiled() -> nn.Module:
    model = net()
    model[0] = torch.compile(model[0])
    return model


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "compiled": lambda: torch.compile(net()),
    "data parallel": lambda: nn.DataParallel(net()),
    "both": lambda: torch.compile(nn.DataParallel(net())),
    "a compiled part": inner_compiled,
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED.keys())
def test_names_are_those_of_the_module_itself(wrap: Callable[[], nn.Module]) -> None:
    model = torch_model.unwrapped(wrap())
    assert names(model) == names(net())


def test_what_is_written_is_seen_through_the_wrapper() -> None:
    inner = net()
    wrapped = torch.compile(inner)
    model = torch_model.unwrapped(wrapped)
    with torch.no_grad():
        next(model.parameters()).fill_(7.0)
    assert next(wrapped.parameters())[0, 0] == 7.0


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of one process."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_data_parallel_of_one_process_is_unwrapped(process_group: None) -> None:
    model = nn.parallel.DistributedDataParallel(net())
    assert names(torch_model.unwrapped(model)) == names(net())


def test_an_optimizer_over_a_part_of_the_model_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    torch_model.check_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        torch_model.check_optimizer(model, torch.optim.SGD(model[0].parameters(), lr=1.0))
    assert "does not train 2 of the model's trainable parameters (2.weight, 2.bias)" in caplog.text
    model[2].requires_grad_(False)
    caplog.clear()
    torch_model.check_optimizer(model, torch.optim.SGD(model[0].parameters(), lr=1.0))
    assert not caplog.records
