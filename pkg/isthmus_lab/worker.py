"""A worker process of the laboratory.

It reads settings as JSON lines from stdin, and writes progress and rows to stdout, or the error that ended a setting.
"""

import json
import logging
import sys

import msgspec

from isthmus.errors import InputError
from isthmus_lab.training.setting import Setting
from isthmus_lab.training.training import train

SAID_EVERY_SHARE = 0.01
"""Share of a run between two reports of progress."""


def main() -> None:
    """Run the settings that arrive on stdin until stdin ends."""
    logging.disable(logging.WARNING)  # processes that are killed on purpose would log warnings
    for line in sys.stdin:
        job = json.loads(line)
        setting = msgspec.convert(job["setting"], Setting)
        said = 0.0

        def progress(share: float) -> None:
            nonlocal said
            if share - said >= SAID_EVERY_SHARE:
                said = share
                print(json.dumps({"progress": share}), flush=True)

        try:
            last: dict[str, object] = {"row": train(setting, job["seed"], progress).plain()}
        except InputError as error:
            last = {"error": str(error)}
        print(json.dumps(last), flush=True)


if __name__ == "__main__":
    main()
