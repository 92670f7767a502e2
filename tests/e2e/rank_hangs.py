"""Run by torchrun, two ranks: one rank hangs with all its connections open; the other rank names it and ends."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn

import isthmus
from isthmus.errors import RankLost
from isthmus.torch import ranks

ranks.LOOK_S, ranks.TELL_S, ranks.NAME_S, ranks.HUNG_S = 0.5, 1.0, 2.0, 4.0
dist.init_process_group("gloo")
torch.set_default_device("meta")  # messages between ranks must not depend on the default device
with torch.device("cpu"):
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
link = isthmus.join(sys.argv[1], model, optimizer, learner="a", create=isthmus.Rules(fragments=2))
link.step(4)
pids: list[object] = [None, None]
with torch.device("cpu"):
    dist.all_gather_object(pids, os.getpid())
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    link.step(4)
except RankLost as error:
    print(error, flush=True)
    os.kill(int(str(pids[1])), signal.SIGKILL)
    os._exit(0)
