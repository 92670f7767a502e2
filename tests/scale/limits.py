"""Print the limits of large runs as a table: the results of `isthmus plan` for many sizes. `python -m scale.limits`.

Every learner takes one step a second and sends each fragment once in 100 steps, with 4 bits both ways, merged by RDA.
"""

import math
import sys

from isthmus.format.rules import KEPT_VERSIONS
from isthmus_lab.forecast.island import Island
from isthmus_lab.forecast.outcome import CHECKPOINT_BYTES, FEEDBACK_BYTES, OBJECT_MAX, SYNCER_CORES
from isthmus_lab.forecast.planner import plan
from isthmus_lab.forecast.search import Fixed
from isthmus_lab.forecast.speeds import classes
from isthmus_services.board.prices import Prices

SYNC_EVERY = 100
LINK_GBIT_S = 10.0
COMMIT_BYTES = 350
"""Approximate bytes of a commit's header for each input; the limit of a header is 1 MiB."""

PARAMETERS = (1e8, 1e9, 1e10, 7e10)
LEARNERS = (8, 32, 100)
HEAD = ("N", "M", "P", "state of a fragment, GB", "syncers", "each: cores", "Gbit/s in", "GiB", "what one dead leaves: GB",
        "s", "store, GB an hour", "kept after `gc`, GB", "learner: Mbit/s each way", "host GiB", "checkpoint, GB",
        "commit, KiB")  # fmt: skip


def main() -> int:
    """Print the table."""
    default, known = classes()
    free = Prices(put_per_1000=0.0, get_per_1000=0.0, storage_gb_month=0.0, egress_gb=0.0)
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD))
    for params in PARAMETERS:
        for learners in LEARNERS:
            island = Island(name="all", count=learners, up_gbit_s=LINK_GBIT_S, down_gbit_s=LINK_GBIT_S, latency_s=0.05)
            fixed = Fixed(sync_every=SYNC_EVERY, codec="int4", codec_down="int4", merge="rda")
            found = plan(params, [island], free, fixed=fixed, speeds=known[default].of)
            s, day, f = found.syncer, found.day, found.forecasts[0]
            syncers = max(1, math.ceil(s["cores"] / SYNCER_CORES))
            updates = s["down_gbit_s"] / 8 * 3600  # syncers read what learners wrote
            values = f.down_gb_day / 24
            state = 12.0 * params / found.rules.fragments
            assert state < OBJECT_MAX, "a snapshot of a fragment fits into an object"
            row = (
                f"{params:.0e}".replace("e+0", "e").replace("e+", "e"), learners, found.rules.fragments, f"{state / 1e9:.3g}", syncers,
                f"{s['cores'] / syncers:.2g}", f"{s['down_gbit_s'] / syncers:.2g}", f"{s['memory_gib'] / syncers:.3g}",
                f"{s['takeover_gb'] / syncers:.3g}", f"{s['takeover_s'] / syncers:.3g}", f"{updates + values:,.3g}",
                f"{day['stored_gb']:,.4g}", f"{8e3 * f.down_gb_day / 86400:.3g}", f"{f.memory_gib:.3g}",
                f"{params * (CHECKPOINT_BYTES + FEEDBACK_BYTES * found.rules.error_feedback) / 1e9:.3g}", f"{COMMIT_BYTES * learners / 1024:.2g}",
            )  # fmt: skip
            print("| " + " | ".join(map(str, row)) + " |")
    print(f"\nKept: {KEPT_VERSIONS} versions of each fragment, and two checkpoints a learner.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
