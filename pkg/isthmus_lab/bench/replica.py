"""One of two replicas that train the same model side by side, with this library or with torchft's DiLoCo.

    python -m isthmus_lab.bench.replica torchft --name a --at http://127.0.0.1:29510 --report FILE
    python -m isthmus_lab.bench.replica isthmus --name a --at s3://bucket/run --bus redis://… --report FILE

The replica trains until it is killed. Once a round it appends a line of JSON (`Line`) to its report.
"""

import argparse
import functools
import importlib
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

SYNC_EVERY = 24
WINDOWS, CONTEXT = 2, 128
STEP_TOKENS = WINDOWS * CONTEXT
INNER_LR, OUTER_LR, MOMENTUM = 3e-3, 0.7, 0.9
TIMEOUT_S = 5.0
"""All timeouts of torchft: how long a replica waits for one that is gone. torchft's default is a minute."""


class Line(msgspec.Struct, frozen=True):
    """What a replica reports once a round."""

    at: float
    """Seconds since 1970."""
    batches: int
    """For torchft, its count of rounds committed so far, summed over the replicas; else 0."""
    together: int
    """For torchft, the replicas in the last round; else 0."""
    held_s: float
    """Seconds that all calls of optimizer and library took in this round."""


def main() -> int:
    """Train until the process is killed."""
    import torch
    from torch import nn

    from isthmus.demo.gpt import ByteGPT, loss_of
    from isthmus.demo.text import corpus

    parser = argparse.ArgumentParser(prog="replica", description=__doc__)
    parser.add_argument("system", choices=("torchft", "isthmus"))
    parser.add_argument("--name", required=True)
    parser.add_argument("--at", required=True)
    parser.add_argument("--bus")
    parser.add_argument("--report", type=Path, required=True)
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = ByteGPT(128, 4, heads=4, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=INNER_LR)
    text = torch.frombuffer(bytearray(b"".join(piece.read() for piece in corpus().train[:200])), dtype=torch.uint8)
    draw = torch.Generator().manual_seed(ord(a.name[-1]))
    tell, after = (_torchft if a.system == "torchft" else _isthmus)(a, model, optimizer)
    with open(a.report, "ab", buffering=0) as report:
        while True:
            held = 0.0
            for _ in range(SYNC_EVERY):
                starts = torch.randint(len(text) - CONTEXT - 1, (WINDOWS,), generator=draw)
                windows = torch.stack([text[s : s + CONTEXT + 1].long() for s in starts.tolist()])
                loss = loss_of(model, windows)
                loss.backward()  # type: ignore[no-untyped-call]
                computed = time.perf_counter()
                optimizer.step()
                optimizer.zero_grad()
                after()
                held += time.perf_counter() - computed
            batches, together = tell()
            line = Line(time.time(), batches, together, held)
            report.write(msgspec.json.encode(line) + b"\n")


Replica = tuple[Callable[[], tuple[int, int]], Callable[[], object]]
"""A function that returns `Line.batches` and `Line.together`, and a function to call after each step."""


def _torchft(a: argparse.Namespace, model: Any, inner: Any) -> Replica:
    """Set up torchft's DiLoCo over gloo, which exchanges all parameters every `SYNC_EVERY` steps, uncompressed."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    torchft = importlib.import_module("torchft")
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_LR, momentum=MOMENTUM, nesterov=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts = {"model": model, "inner": inner, "outer": outer}
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT_S)),
        load_state_dict=lambda state: [part.load_state_dict(state[name]) for name, part in parts.items()],
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=a.name,
        timeout=timedelta(seconds=TIMEOUT_S),
        quorum_timeout=timedelta(seconds=TIMEOUT_S),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=a.at,
        hostname="127.0.0.1",
    )
    local_sgd = importlib.import_module("torchft.local_sgd")
    local_sgd.DiLoCo(manager, [model], inner, outer, sync_every=SYNC_EVERY).__enter__()
    keep = store  # the store listens only while it is referenced
    return lambda: (manager.batches_committed(), manager.num_participants()), lambda: keep


def _isthmus(a: argparse.Namespace, model: Any, optimizer: Any) -> Replica:
    """Join a run of this library, with the rules that suit the model."""
    import isthmus

    rules = isthmus.Rules(fragments=4, sync_every=SYNC_EVERY)
    link = isthmus.join(a.at, model, optimizer, bus=a.bus, learner=a.name, create=rules, checkpoint_s=2.0)
    return lambda: (0, 0), functools.partial(link.step, STEP_TOKENS)


if __name__ == "__main__":
    sys.exit(main())
