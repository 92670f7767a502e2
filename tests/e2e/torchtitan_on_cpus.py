"""Run `examples/torchtitan_train.py` without a GPU: this module answers the questions that torchtitan 0.2 asks of one.

The trainer, the model, FSDP2 and the data are unchanged; gloo replaces NCCL.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch._utils

here: Any = torch._utils
here._get_available_device_type = lambda: "cpu"
here._get_device_module = lambda kind: torch.cpu
cpu: Any = torch.cpu
cpu.current_device = lambda: 0

import torchtitan.components.metrics as metrics  # noqa: E402
import torchtitan.train as train  # noqa: E402

nothing = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
metrics.DeviceMemoryMonitor.__init__ = lambda self, *a: self.__dict__.update(
    device_name="CPU", device_capacity_gib=16.0
)
metrics.DeviceMemoryMonitor.get_peak_stats = lambda self: nothing
metrics.DeviceMemoryMonitor.reset_peak_stats = lambda self: None
train.dist_utils.set_pg_timeouts = lambda *a, **k: None


class Trainer(train.Trainer):  # type: ignore[misc]
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for module in self.model_parts[0].modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction


train.Trainer = Trainer
example = Path(__file__).parents[2] / "examples" / "torchtitan_train.py"
sys.argv[0] = str(example)
runpy.run_path(str(example), run_name="__main__")
