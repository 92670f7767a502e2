"""`python -m isthmus.demo.evaluate [TEXT]`: print the held-out loss of the demo's model, for `--exec` of a command."""

import argparse
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from isthmus.demo.gpt import byte_gpt, held_out_loss
from isthmus.demo.text import corpus


def main() -> None:
    """Print the loss of the model in the folder `ISTHMUS_CUT_DIR` [nats per byte], on text that no learner trains on.

    This command takes the whole held-out text. A demo of few steps judges its models on the beginning of that text, and
    its report says on how many bytes.
    """
    parser = argparse.ArgumentParser(
        "python -m isthmus.demo.evaluate", description=(main.__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "text", nargs="?", metavar="TEXT", help="what the demo was given as --data; none: the demo's own text"
    )
    given = parser.parse_args()
    if not (folder := os.environ.get("ISTHMUS_CUT_DIR")):
        parser.error("ISTHMUS_CUT_DIR is not set: give this command to --exec, of isthmus replay or isthmus follow")
    torch.set_num_threads(1)
    model = byte_gpt()
    for file in Path(folder).glob("*.safetensors"):
        model.load_state_dict(load_file(file), strict=False)
    text = corpus(given.text).held_out
    sys.stdout.write(f"{held_out_loss(model, torch.frombuffer(bytearray(text), dtype=torch.uint8))}\n")


if __name__ == "__main__":
    main()
