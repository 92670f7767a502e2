"""Judge every version of a run's global model that there is time for, and keep its loss in the run.

python examples/evaluate_versions.py RUN [--until 20]
isthmus status RUN --plot loss.png            # shows it
"""

import argparse

import torch
from trainer import Counting, make_model

import isthmus
from isthmus.inspect.follow import Cut


def main() -> None:
    """Judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="s3://bucket/prefix or a folder")
    parser.add_argument("--until", type=int, help="end with this version (never)")
    arguments = parser.parse_args()
    model = make_model().eval()
    held_out = torch.stack([Counting(0)[i]["input_ids"] for i in range(64)])  # lines of a seed that nobody trains on

    def judge(cut: Cut) -> dict[str, float]:
        tensors = {**cut.tensors(), **cut.buffers()}
        model.load_state_dict({name: torch.tensor(values) for name, values in tensors.items()}, strict=False)
        with torch.no_grad():
            loss = model(input_ids=held_out, labels=held_out).loss.item()
        print(f"version {cut.number}: {loss:.4f}", flush=True)
        return {"held-out": loss}

    with isthmus.follow(arguments.run, judge) as following:
        while arguments.until is None or following.cut < arguments.until:
            following.wait(1.0)


if __name__ == "__main__":
    main()
