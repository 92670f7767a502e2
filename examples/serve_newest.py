"""A running Hugging Face model that is brought up to date in place, between two requests: of the run of `trainer.py`.

python examples/serve_newest.py RUN [--requests 20]
"""

import argparse
import time

import torch
from trainer import make_model

import isthmus


def main() -> None:
    """Answer requests, each by the newest version that has arrived."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="s3://bucket/prefix or a folder")
    parser.add_argument("--requests", type=int, default=20)
    arguments = parser.parse_args()
    model = make_model().eval().to(torch.bfloat16)
    question = (torch.arange(8) * 7)[None] % 61
    with isthmus.follow(arguments.run, model) as following:
        following.update(wait_s=60.0)
        for number in range(arguments.requests):
            following.update()  # nothing is fetched here: what has arrived is copied in, 2 bytes a parameter
            answer = model.generate(question, max_new_tokens=6, do_sample=False, pad_token_id=0)
            print(f"request {number}: version {following.cut} goes on with {answer[0, 8:].tolist()}", flush=True)
            time.sleep(0.5)


if __name__ == "__main__":
    main()
