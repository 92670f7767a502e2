"""One learner of a run at scale: a byte-level GPT in bfloat16, in one process or sharded by FSDP2 in a torchrun job.

python -m scale.learner RUN --bus URL --learner NAME --width 1024 --layers 24 --stop FILE --report FILE
"""

import argparse
import json
import os
import resource
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import isthmus
from isthmus.demo.gpt import ByteGPT, loss_of
from isthmus.demo.text import corpus


def resident_gib() -> float:
    """Return the resident memory of this process now, in GiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 30)


def main() -> None:
    """Train until the stop file exists."""
    parser = argparse.ArgumentParser(prog="scale.learner", description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--bus")
    parser.add_argument("--learner", required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--fragments", type=int, required=True)
    parser.add_argument("--sync-every", type=int, required=True)
    parser.add_argument("--context", type=int, default=16)
    parser.add_argument("--stop", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    a = parser.parse_args()

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    # Create the model in bfloat16: a float32 model that is converted would be in memory twice.
    torch.set_default_dtype(torch.bfloat16)
    model = ByteGPT(a.width, a.layers, heads=a.width // 64, context=a.context)
    torch.set_default_dtype(torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    if ranks > 1:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    # With two learners, two syncers and a store on one machine there is no memory for moments.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    before = resident_gib()
    rules = isthmus.Rules(fragments=a.fragments, sync_every=a.sync_every)
    # This many processes on few cores are late with everything; none must be taken for dead because of that.
    pace = isthmus.Pace(heartbeat_s=4.0, silence_s=20.0)
    text = torch.frombuffer(bytearray(b"".join(piece.read() for piece in corpus().train[:200])), dtype=torch.uint8)
    draw = torch.Generator().manual_seed(rank + int.from_bytes(a.learner.encode()[-4:], "little"))
    began = time.monotonic()
    holds, durations, losses = [], [], []
    with isthmus.join(
        a.run, model, optimizer, bus=a.bus, learner=a.learner, create=rules, checkpoint_s=float("inf"), pace=pace
    ) as link:
        joined_s = time.monotonic() - began
        while True:
            at = time.monotonic()
            start = int(torch.randint(len(text) - a.context - 1, (1,), generator=draw))
            windows = text[start : start + a.context + 1].long()[None]
            loss = loss_of(model, windows)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            stepped = time.monotonic()
            link.step(tokens=a.context * ranks, loss=losses[-1])
            holds.append(time.monotonic() - stepped)
            durations.append(time.monotonic() - at)
            over = torch.tensor([a.stop.exists()], dtype=torch.int32)
            if ranks > 1:
                dist.broadcast(over, 0)  # the first rank decides, so all ranks end after the same step
            if over.item():
                break
        steps = link.steps_done
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    report = {
        "learner": a.learner, "rank": rank, "ranks": ranks, "parameters": parameters, "steps": steps,
        "joined_s": joined_s, "step_s": statistics.median(durations),
        "hold_s": {"median": statistics.median(holds), "largest": max(holds), "mean": statistics.fmean(holds)},
        "gib": {"before_joining": before, "peak": peak},
        "loss": {"first": statistics.fmean(losses[:5]), "last": statistics.fmean(losses[-5:])},
    }  # fmt: skip
    a.report.with_suffix(f".{rank}.json").write_text(json.dumps(report))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
