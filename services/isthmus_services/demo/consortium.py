"""The demo of a consortium: three institutions train one model, by the commands that docs/consortium.md shows.

Each command is printed with the institution that gives it. A learner is killed and starts again; the gate refuses a cut
that one evaluator alone has measured; two of three owners expel the third one's learner. Nobody can stop it, but its
work is not merged any more. An audit ends the demo.
"""

import json
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from isthmus.errors import InputError
from isthmus_services.demo import mark
from isthmus_services.demo.board import open_in_browser
from isthmus_services.output.report import write_json
from isthmus_services.processes import Processes, end, isthmus_command
from isthmus_services.settings import declared

OWNERS = ("north", "south", "east")
LEARNERS = ("north-1", "south-1", "east-1")
EVALUATORS = ("north-eval", "south-eval")
KEYS = (*OWNERS, *LEARNERS, *EVALUATORS, "syncer")
EARLY = 2
"""The version that is promoted first."""

COMMANDS_S, STEP_S = 90.0, 0.1
"""About how long the commands take together, and a step of all learners, on two cores that do nothing else [s]."""

POLL_S = 0.2
STOP_S = 30.0
WAIT_S = 600.0
"""How long the demo waits for a step of its story, in seconds."""

CHARTER = """purpose = "a model of Python, by North, South and East"
amend = 2
admit = 2
expel = 2
manifests = true

[[owner]]
name = "north"
key = "keys/north.pub"

[[owner]]
name = "south"
key = "keys/south.pub"

[[owner]]
name = "east"
key = "keys/east.pub"

[[member]]
name = "north-1"
key = "keys/north-1.pub"
institution = "north"
sources = ["library"]

[[member]]
name = "south-1"
key = "keys/south-1.pub"
institution = "south"
sources = ["library"]

[[member]]
name = "east-1"
key = "keys/east-1.pub"
institution = "east"
factor = 0.5
cap = 2.0
sources = ["library"]

[[member]]
name = "syncer"
role = "syncer"
key = "keys/syncer.pub"
institution = "north"

[[member]]
name = "north-eval"
role = "follower"
key = "keys/north-eval.pub"
institution = "north"

[[member]]
name = "south-eval"
role = "follower"
key = "keys/south-eval.pub"
institution = "south"

[gate]
series = "held-out"
better = "lower"
tolerance = 0.05
limit = 5.5
evaluators = ["north-eval", "south-eval"]
least = 2
promoters = ["south-eval"]
"""

MANIFEST = """code = "isthmus demo"

[[source]]
name = "library"
description = "the source of Python's standard library, one third of its files"
"""

EVALUATE = """import os
from pathlib import Path

import torch
from safetensors.torch import load_file

from isthmus.demo.gpt import byte_gpt, held_out_loss

torch.set_num_threads(1)
model = byte_gpt()
for file in Path(os.environ["ISTHMUS_CUT_DIR"]).glob("*.safetensors"):
    model.load_state_dict(load_file(file), strict=False)
own = bytearray(Path(torch.__file__).read_bytes())  # no learner trains on this text
print(held_out_loss(model, torch.frombuffer(own, dtype=torch.uint8), every=8))
"""


class Story:
    """The folder of the demo, its processes, and the commands given so far."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.steps = steps
        self.processes = Processes(folder / mark.LOGS, {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})

    def isthmus(self, who: str, *words: str, may_fail: bool = False) -> str:
        """Run a command of an institution, print it with what it says, and return that.

        Raises `InputError` if it fails, unless it `may_fail`.
        """
        print(f"\n[{who}] $ isthmus {shlex.join(words)}", flush=True)
        done = subprocess.run(
            isthmus_command(*words), cwd=self.folder, env=self._environment(), text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        print(done.stdout.rstrip(), flush=True)
        if done.returncode and not may_fail:
            raise InputError(f"isthmus {words[0]} ended with status {done.returncode}: {self.folder} has its files")
        return done.stdout

    def start(self, who: str, name: str, *words: str) -> None:
        """Start a process of an institution."""
        print(f"\n[{who}] $ isthmus {shlex.join(words)} &", flush=True)
        self.processes.start(name, ["env", "-C", str(self.folder), *isthmus_command(*words)])

    def learn(self, name: str) -> None:
        """Start a learner."""
        shard = f"{LEARNERS.index(name)}/{len(LEARNERS)}"
        self.start(
            name.removesuffix("-1"), name, "learner", "run", "--learner", name, "--shard", shard,
            "--steps", str(self.steps), "--manifest", "manifest.toml", "--key", f"keys/{name}",
        )  # fmt: skip

    def proposal(self) -> str:
        """Return the id of the proposal that waits for approvals."""
        self.isthmus("east", "charter", "show", "run", "--json", "charter.json")
        return str(json.loads((self.folder / "charter.json").read_text())["proposals"][0]["id"])

    def heads(self) -> int:
        """Return the newest version that every fragment has."""
        fragments = [*(self.folder / "run" / "commits").glob("*")]
        return min((len([*fragment.iterdir()]) for fragment in fragments), default=0)

    def until(self, version: int) -> None:
        """Wait until every fragment has a version. Raises `InputError` if it takes longer than `WAIT_S`."""
        ends = time.monotonic() + WAIT_S
        while time.monotonic() < ends:
            if self.heads() >= version:
                return
            if ended := [n for n, p in self.processes.alive.items() if p.poll() not in (None, 0)]:
                raise InputError(f"{ended[0]} ended: {self.processes.log(ended[0])} says why")
            time.sleep(POLL_S)
        raise InputError(f"the run has not come to version {version} within {WAIT_S:.0f} s ({self.folder / mark.LOGS})")

    def measure(self, evaluator: str, version: int) -> None:
        """Let an evaluator measure the cut of a version."""
        self.isthmus(
            evaluator.removesuffix("-eval"), "follow", "run", "--version", str(version),
            "--into", f"cuts-{evaluator}", "--exec", f"{shlex.quote(sys.executable)} evaluate.py",
            "--series", "held-out", "--name", evaluator, "--key", f"keys/{evaluator}",
        )  # fmt: skip

    def promote(self) -> str:
        """Let the promoter promote a cut, or hear why it cannot be; return what was said."""
        return self.isthmus(
            "south", "promote", "run", "--name", "south-eval", "--key", "keys/south-eval", may_fail=True
        )

    def finish(self, name: str) -> int | None:
        """Wait for a process to end; return its status."""
        return self.processes.alive.pop(name).wait(WAIT_S)

    def _environment(self) -> dict[str, str]:
        plain = {k: v for k, v in os.environ.items() if not k.startswith("ISTHMUS_")}
        return plain | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def run(settings: declared.Demo) -> int:
    """Tell the story; return 0, or 1 if replay found a difference."""
    out = Path(settings.out)
    mark.claim(out, (mark.CONSORTIUM,))
    folder = (out / mark.CONSORTIUM).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("charter.toml", _with_buckets(folder)), ("manifest.toml", MANIFEST), ("evaluate.py", EVALUATE)):
        (folder / name).write_text(text)
    began = time.monotonic()
    print(_begins(settings.steps), flush=True)
    story = Story(folder, settings.steps)
    try:
        _found(story)
        told = _train(story)
    finally:
        for name in tuple(story.processes.alive):
            end(story.processes.alive.pop(name), STOP_S)
    story.isthmus(
        "north", "audit", "run", "--html", "audit.html", "--json", "audit.json", "--sign", "keys/north",
        "--influence", "east-1", "--influence", "north", "--last", "0",
        "--exec", f"{shlex.quote(sys.executable)} evaluate.py",
    )  # fmt: skip
    audit = json.loads((folder / "audit.json").read_text())
    differ = len(audit["replay"]["differences"])
    write_json(
        told | {"differ": differ, "wall_s": round(time.monotonic() - began, 1)}, out / "report.json", settings.json
    )
    print(f"\naudit {folder / 'audit.html'}   report {out / 'report.json'}")
    open_in_browser((folder / "audit.html").as_uri())
    return 1 if differ else 0


def _begins(steps: int) -> str:
    """Return what the demo is going to do, how long that takes, and how it differs from the page."""
    minutes = math.ceil((COMMANDS_S + STEP_S * steps) / 60.0)
    return (
        f"Three institutions train one model, by the commands of docs/consortium.md: about {minutes} minutes on two "
        f"cores that do nothing else ({steps:,} steps a learner; fewer: --steps). Unlike on the page, each learner has "
        "a bucket of its own, south-1 is killed and starts again, South and North expel east-1 instead of south-1, and "
        "the audit computes influence over all rounds."
    )


def _with_buckets(folder: Path) -> str:
    """Return the charter with a bucket for each learner's institution."""
    text = CHARTER
    for name in LEARNERS:
        key = f'key = "keys/{name}.pub"\n'
        text = text.replace(key, f'{key}bucket = "{(folder / "buckets" / name.removesuffix("-1")).as_uri()}"\n')
    return text


def _found(story: Story) -> None:
    """Make the keys, the run, and its charter with the members."""
    for name in KEYS:
        who = name.partition("-")[0] if name != "syncer" else "north"
        story.isthmus(who, "keys", "new", name, "--folder", "keys")
    story.isthmus("north", "init", "run", "--key", "keys/north", "--snapshot-every", "4")
    story.isthmus("north", "charter", "propose", "run", "charter.toml", "--key", "keys/north")
    creator = ("--owner", "keys/north.pub")
    story.isthmus(
        "south", "charter", "approve", "run", story.proposal(), "--expect", "charter.toml", *creator,
        "--key", "keys/south",
    )  # fmt: skip


def _train(story: Story) -> dict[str, object]:
    """Train, kill, measure, promote and expel; return what came of it."""
    story.start("north", "syncer", "syncer", "run", "--name", "syncer", "--key", "keys/syncer")
    for name in LEARNERS:
        story.learn(name)
    story.until(EARLY)
    story.measure("north-eval", EARLY)
    refused = story.promote()
    story.measure("south-eval", EARLY)
    promoted = story.promote()
    story.processes.kill("south-1")
    print("\nkilled south-1 (SIGKILL); it starts again, and goes on from its checkpoint", flush=True)
    story.learn("south-1")
    story.isthmus("south", "members", "remove", "run", "east-1", "--key", "keys/south")
    story.isthmus("north", "charter", "approve", "run", story.proposal(), "--key", "keys/north")
    done = {name: story.finish(name) for name in LEARNERS}
    expelled = _said(story, "east-1", "not-a-member")
    print(f"\neast-1 trained on by itself, and nothing of it was merged any more: {expelled}", flush=True)
    newest = story.heads()
    for evaluator in EVALUATORS:
        story.measure(evaluator, newest)
    again = story.promote()
    return {
        "refused": refused.strip(),
        "promoted": [promoted.strip(), again.strip()],
        "expelled": expelled,
        "learner_status": done,
    }


def _said(story: Story, name: str, word: str) -> str:
    """Return the last message with a word in a process's log; empty if there is none."""
    lines = story.processes.log(name).read_text(errors="replace").splitlines()
    return next((str(json.loads(line)["message"]) for line in reversed(lines) if word in line), "")
