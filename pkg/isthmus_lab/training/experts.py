"""A small mixture of experts: the byte GPT with several feed-forward nets per block; each token takes one of them."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from isthmus.demo.gpt import Block, ByteGPT

BALANCE_WEIGHT = 0.01
"""Weight of the load-balancing loss (Switch Transformer, arXiv 2101.03961, equation 4)."""


class Experts(nn.Module):
    """n feed-forward nets with top-1 routing; each token's output is scaled by the router's probability."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(4 * width, width, bias=False) for _ in range(count))
        self.balance = torch.zeros(())
        """Load-balancing loss of the last batch."""
        self.seen = torch.zeros(count, dtype=torch.long)
        """Tokens that each expert got since this count was last reset."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the experts. Shapes of `x` and of the output: [batch, time, width]."""
        flat = x.reshape(-1, x.shape[-1])
        chances = self.router(flat).softmax(-1)
        chance, choice = chances.max(-1)
        out = torch.zeros_like(flat)
        counts = torch.bincount(choice, minlength=len(self.up))
        for e, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            mine: Tensor = torch.where(choice == e)[0]
            if len(mine):
                out = out.index_add(0, mine, down(functional.gelu(up(flat[mine]))) * chance[mine, None])
        self.balance = len(self.up) * (counts / len(flat) * chances.mean(0)).sum()
        self.seen += counts
        return out.view_as(x)


class ExpertBlock(Block):
    """A block with experts in place of its feed-forward net."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__(width, heads)
        del self.up, self.down
        self.experts = Experts(width, experts)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return the output of the experts; see `Block.feed_forward`."""
        return self.experts.forward(x)


class ExpertGPT(ByteGPT):
    """A byte GPT with expert blocks."""

    def __init__(self, width: int, layers: int, heads: int, experts: int) -> None:
        super().__init__(width, layers, heads, block=lambda: ExpertBlock(width, heads, experts))
        with torch.no_grad():
            for choice in self.choices:
                for down in choice.down.parameters():
                    down.mul_((2 * layers) ** -0.5)

    @property
    def choices(self) -> list[Experts]:
        """The experts of each block."""
        return [m for m in self.modules() if isinstance(m, Experts)]
