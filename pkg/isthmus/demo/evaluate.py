"""`python -m isthmus.demo.evaluate [TEXT]`: print the held-out loss of the demo's model, for `--exec` of a command."""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from isthmus.demo.gpt import byte_gpt, held_out_loss
from isthmus.demo.text import corpus


def main() -> None:
    """Print the loss of the model in the folder `ISTHMUS_CUT_DIR` [nats per byte], on text that no learner trains on.

    TEXT is what the demo was given as `--data`; without it, the text is that of a demo without `--data`.
    """
    torch.set_num_threads(1)
    model = byte_gpt()
    for file in Path(os.environ["ISTHMUS_CUT_DIR"]).glob("*.safetensors"):
        model.load_state_dict(load_file(file), strict=False)
    text = corpus(sys.argv[1] if len(sys.argv) > 1 else None).held_out
    sys.stdout.write(f"{held_out_loss(model, torch.frombuffer(bytearray(text), dtype=torch.uint8))}\n")


if __name__ == "__main__":
    main()
