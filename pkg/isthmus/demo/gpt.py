"""A byte-level GPT of 0.84 million parameters, with pre-norm blocks and a tied head. It needs no tokenizer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
CONTEXT = 128
INIT_STD = 0.06
"""Standard deviation of initial weights. For this size and 1,200 steps of 256 tokens it gave 2.14 nats per byte; the
usual 0.02 gave 2.23."""


class Block(nn.Module):
    """Causal self-attention and a feed-forward net, both added to a residual stream [batch, time, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream [batch, time, width] after the block, for `x` of the same shape."""
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.feed_forward(self.norm2(x))

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return the output of the feed-forward net [batch, time, width], for `x` of the same shape."""
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class ByteGPT(nn.Module):
    """A model that takes bytes and returns logits over the next byte."""

    def __init__(
        self,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        context: int = CONTEXT,
        block: Callable[[], Block] | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(block() if block else Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.bytes.weight
        for name, p in self.named_parameters():
            if p.dim() > 1:
                # Layers that write to the residual stream start smaller, so that its variance does not grow with depth.
                scale = (2 * layers) ** -0.5 if name.endswith(("proj.weight", "down.weight")) else 1.0
                nn.init.normal_(p, std=INIT_STD * scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [batch, time, 256] for bytes [batch, time ≤ context] int64."""
        h = self.bytes(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def byte_gpt() -> nn.Module:
    """Return the demo's model, initialised from torch's current seed."""
    return ByteGPT()


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte over windows [batch, time + 1] of bytes."""
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, *, every: int = 1, context: int = CONTEXT, batch: int = 32) -> float:
    """Return the mean loss in nats per byte on text [n] uint8.

    The text is cut into windows of `context` bytes that do not overlap; one window in `every` is used.
    """
    was = model.training
    model.eval()
    starts = torch.arange(0, (text.numel() - 1) // context, every) * context
    total = 0.0
    for part in torch.split(starts, batch):
        windows = torch.stack([text[s : s + context + 1] for s in part.tolist()]).long()
        total += float(loss_of(model, windows)) * len(part)
    model.train(was)
    return total / len(starts)


@torch.no_grad()
def sample(model: nn.Module, prompt: bytes, length: int, seed: int, temperature: float = 0.8) -> str:
    """Return the prompt continued by `length` bytes drawn from the model."""
    generator = torch.Generator().manual_seed(seed)
    context = int(getattr(model, "context", CONTEXT))
    x = torch.tensor(list(prompt), dtype=torch.long)[None]
    for _ in range(length):
        logits = model(x[:, -context:])[0, -1] / temperature
        x = torch.cat([x, torch.multinomial(logits.softmax(-1), 1, generator=generator)[None]], dim=1)
    return bytes(x[0].tolist()).decode("utf-8", errors="replace")
