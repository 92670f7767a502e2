"""A learner of several ranks that joins a run in progress: RUN NAME OUT. Writes its moments, and their source."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import isthmus
from e2e.rank_learner import placed


def main() -> None:
    run, name, out = sys.argv[1:]
    dist.init_process_group("gloo")
    model = placed("fsdp2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    link = isthmus.join(run, model, optimizer, learner=name, checkpoint_s=60.0)
    state = [
        {
            what: getattr(value, "full_tensor", lambda v=value: v)().tolist()
            for what, value in optimizer.state[p].items()
        }
        for p in model.parameters()
    ]
    rates = [group["lr"] for group in optimizer.param_groups]
    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps({"moments": link.moments, "state": state, "rates": rates}))
    link.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
