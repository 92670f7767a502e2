"""compose.yaml as users start it, under a real container engine: `make compose-test`.

    python -m compose.run [--out out/compose] [--steps 2500]

Builds the image, starts every service, looks at each, kills a learner, a syncer, Redis and the store, lets the learners
finish, folds the log again, collects garbage, takes everything down and up again, and goes on. Each check is printed as
it is made, and the report names the images that had to be replaced. Returns 1 if a check failed, 77 if there is no engine
and none can be made.
"""

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compose.engine import ROOT, Engine, NotRun, engine
from compose.images import Images, images
from isthmus_services.output.report import write_json

PROJECT, IMAGE = "isthmus-test", "isthmus-test/isthmus:1"
LEARNERS = ("learner-a", "learner-b", "learner-c", "learner-d")
ONCE = ("prepare", "store-users", "init")
BOARD, PROMETHEUS = "http://127.0.0.1:8470", "http://127.0.0.1:9090"
HEALTHY_S, DONE_S, BACK_S = 300.0, 1800.0, 180.0
LOSS_BEFORE = 5.5
"""Nats per byte of a model that knows nothing, rounded down: ln 256 is 5.545."""

FIRED = "count_over_time(ALERTS%7Balertstate=%22firing%22%7D[3h])"
"""A query of Prometheus: the alerts that have fired."""

NOT_RUN = 77


@dataclass
class Check:
    """One thing that was looked at."""

    name: str
    passed: bool = False
    said: str = ""
    """What was measured, or why it failed."""
    seconds: float = 0.0


@dataclass
class Stack:
    """The services of compose.yaml under an engine, and what was found out about them."""

    found: Engine
    images: Images
    steps: int
    logs: Path
    """Where the services' logs are kept."""
    checks: list[Check] = field(default_factory=list)

    @contextmanager
    def check(self, name: str) -> Iterator[Check]:
        """Make a check: it fails by `AssertionError`, and the others are still made."""
        made, began = Check(name), time.monotonic()
        try:
            yield made
            made.passed = True
        except AssertionError as error:
            made.said = f"{made.said} {error}".strip()
        made.seconds = time.monotonic() - began
        self.checks.append(made)
        line = f"{'ok' if made.passed else 'FAILED':7}{made.seconds:6.1f} s  {name}: {' '.join(made.said.split())}"
        print(line if made.passed else line[:1000], flush=True)

    def compose(self, *words: str, check: bool = True, within_s: float = 900.0) -> str:
        """Return what a compose command printed. Raises `AssertionError` if it fails and `check` is set."""
        files = [word for file in self.images.files for word in ("-f", file)]
        environment = {"STEPS": str(self.steps), "ISTHMUS_IMAGE": IMAGE, **self.images.environment}
        command = ("docker", "compose", "--ansi", "never", "--progress", "quiet", "-p", PROJECT, *files, *words)
        done = self.found.run(*command, environment=environment, check=check, within_s=within_s)
        return done.stdout

    def down(self, *words: str, check: bool = True) -> None:
        """Add the services' logs to the kept ones, and remove the containers. Raises as `compose` does."""
        with self.logs.open("a") as kept:
            kept.write(self.compose("logs", "--no-color", "--timestamps", check=False))
        self.compose("down", *words, check=check)

    def services(self) -> dict[str, list[dict[str, Any]]]:
        """Return the containers of each service, as the engine describes them."""
        rows: dict[str, list[dict[str, Any]]] = {}
        for line in self.compose("ps", "-a", "--format", "json").splitlines():
            row = json.loads(line)
            rows.setdefault(row["Service"], []).append(row)
        return rows

    def trouble(self) -> str:
        """Return the containers that are not healthy and have not ended well; empty if all are or have."""
        bad = []
        for service, rows in self.services().items():
            for row in rows:
                fine = row["State"] == "running" and row["Health"] in ("healthy", "")
                if not fine and not (row["State"] == "exited" and row["ExitCode"] == 0):
                    bad.append(f"{service} {row['State']} {row['Health']} {row['ExitCode']}")
        return ", ".join(bad)

    def until(self, what: str, true: Callable[[], bool], within_s: float) -> float:
        """Wait until something is true, and return after how many seconds it was. Raises `AssertionError`."""
        began = time.monotonic()
        while not true():
            assert time.monotonic() - began < within_s, f"{what}: not within {within_s:.0f} s; {self.trouble()}"
            time.sleep(0.2)
        return time.monotonic() - began

    def board(self, path: str) -> dict[str, Any]:
        """Return an answer of the board."""
        answer: dict[str, Any] = json.loads(self.found.get(f"{BOARD}/api/{path}"))
        return answer

    def targets(self) -> list[tuple[str, str]]:
        """Return job and health of each target of Prometheus."""
        answer = json.loads(self.found.get(f"{PROMETHEUS}/api/v1/targets"))["data"]["activeTargets"]
        return [(target["labels"]["job"], target["health"]) for target in answer]

    def commits(self) -> int:
        """Return how many commits the log has by the board, or zero while it does not answer."""
        try:
            return int(self.board("state")["totals"]["commits"])
        except AssertionError:
            return 0

    def steps_of(self, learner: str) -> float:
        """Return the step of a learner by Prometheus; zero if it was not scraped within the last seconds."""
        query = f'isthmus_learner_steps{{learner="{learner.removeprefix("learner-")}"}}'
        answer = json.loads(self.found.get(f"{PROMETHEUS}/api/v1/query?query={query}"))
        return max((float(r["value"][1]) for r in answer["data"]["result"]), default=0.0)

    def tool(self, *words: str, service: str = "tools", check: bool = True) -> str:
        """Return what a command prints that is run as a service, beside the others. Raises as `compose` does."""
        alone = () if service == "tools" else ("--no-deps",)
        return self.compose("run", "--rm", "-T", *alone, service, *words, check=check)


def story(s: Stack) -> None:
    """Do what a user does, and look at what a user sees."""
    s.down("--volumes", "--remove-orphans")
    with s.check("the image is built by the Dockerfile as it is") as c:
        s.compose("build", "init", within_s=3600.0)
        size = json.loads(s.found.run("docker", "image", "inspect", IMAGE).stdout)[0]["Size"]
        c.said = f"{size / 1e9:.2f} GB"
    with s.check("docker compose up: every service is healthy") as c:
        s.compose("up", "-d")
        took = s.until("healthy", lambda: not s.trouble(), HEALTHY_S)
        rows = s.services()
        c.said = (
            f"{len(rows)} services, {sum(map(len, rows.values()))} containers, {took:.0f} s after they were started"
        )
        assert {name for name, r in rows.items() if r[0]["State"] == "exited"} == set(ONCE), rows.keys()
    look(s)
    kills(s)
    finish(s, "the learners are done")
    with s.check("the collector deletes, and the log can still be folded") as c:
        s.compose("stop", "syncer")
        said = s.tool("gc", "--apply", "--min-age", "0", "--keep", "16", service="collector")
        deleted = re.search(r"\ball\W+([\d,]+)\W+([\d,]+)", said)
        assert deleted is not None, said
        c.said = f"{deleted[1]} objects, {deleted[2]} bytes"
        assert deleted[1] != "0", said
        assert "done" in said, said
        s.compose("start", "syncer")
    with s.check("docker compose down and up again, volumes kept: the run goes on") as c:
        before = s.commits()
        s.down()
        s.steps += s.steps // 3
        s.compose("up", "-d")
        s.until("healthy", lambda: not s.trouble(), HEALTHY_S)
        s.until("the log as it was", lambda: s.commits() >= before, BACK_S)
        c.said = f"{before} commits before, {s.commits()} after; {s.steps} steps instead of {s.steps * 3 // 4}"
    finish(s, "the learners are done again")
    with s.check("docker compose down --volumes leaves nothing") as c:
        s.down("--volumes")
        mine = f"label=com.docker.compose.project={PROJECT}"
        left = [s.found.run("docker", kind, "ls", "-q", "--filter", mine).stdout for kind in ("volume", "network")]
        left.append(s.found.run("docker", "ps", "-aq", "--filter", mine).stdout)
        assert not "".join(left), left


def look(s: Stack) -> None:
    """Look at the services while the learners train."""
    with s.check("the four learners train and are merged") as c:
        s.until("50 commits", lambda: s.commits() >= 50, HEALTHY_S)
        c.said = s.board("state")["sentence"]
        assert c.said.startswith("4 of 4 learners train"), c.said
    with s.check("a container sees its own secrets and cannot write") as c:
        for name in ("learner-a", "syncer", "board"):
            seen = s.compose("exec", "-T", name, "ls", "/run/isthmus").split()
            assert seen == ["reader" if name == "board" else name], f"{name} sees {seen}"
            said = s.compose("exec", "-T", name, "sh", "-c", "id -u; touch /opt/x 2>&1; true")
            assert re.match(r"10001\s[\s\S]*Read-only file system", said), f"{name}: {said}"
        c.said = "a learner, a syncer and the board, as user 10001 on a read-only file system"
    with s.check("the board serves its page") as c:
        page = s.found.get(f"{BOARD}/")
        assert "<title>" in page, page[:200]
        c.said = f"run {s.board('run')['run'][:16]}, {len(s.board('learners')['learners'])} learners"
    with s.check("Prometheus scrapes all and has the rules") as c:
        answer = s.targets()
        assert [health for _, health in answer] == ["up"] * 6, answer
        groups = json.loads(s.found.get(f"{PROMETHEUS}/api/v1/rules"))["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert rules, groups
        assert not [rule for rule in rules if rule["health"] not in ("ok", "unknown")], rules
        firing = [rule["name"] for rule in rules if rule["state"] == "firing"]
        c.said = f"{len(answer)} targets up, {len(rules)} rules, firing: {', '.join(firing) or 'none'}"
        assert not firing, c.said
    with s.check("tools status") as c:
        said = s.tool("status")
        c.said = said.splitlines()[0]
        assert c.said.startswith("4 of 4 learners merge"), said[:500]
    with s.check("doctor: no failure as reader, learner, syncer, collector") as c:
        counts = []
        for role, service in (("reader", "tools"), ("learner", "learner-a"), ("syncer", "syncer"), ("collector",) * 2):
            said = s.tool("doctor", "--role", role, service=service, check=False)
            failures = [line for line in said.splitlines() if line.startswith("failure")]
            counts.append("; ".join([f"{role}: {said.splitlines()[-1]}", *failures]))
        c.said = "; ".join(counts)
        assert c.said.count(", 0 failures") == 4, c.said


def kills(s: Stack) -> None:
    """Kill a container of each kind, start it, and see it back with nothing lost."""
    for service in ("learner-a", "syncer", "redis", "object-store"):
        with s.check(f"{service} killed and started") as c:
            versions = s.board("state")["totals"]["versions"]
            step = s.steps_of(service) if service in LEARNERS else 0.0
            if service == "syncer":
                s.found.run("docker", "kill", "--signal", "SIGKILL", f"{PROJECT}-syncer-1")
            else:
                s.compose("kill", "--signal", "SIGKILL", service)
            began = time.monotonic()
            s.compose("start", service)
            started = time.monotonic() - began
            s.until("healthy", lambda service=service: not s.trouble(), BACK_S)  # type: ignore[misc]
            healthy = time.monotonic() - began
            before = s.commits()
            s.until("more commits", lambda before=before: s.commits() > max(before, 1) + 5, BACK_S)  # type: ignore[misc]
            if step:
                s.until("more steps", lambda n=service, step=step: s.steps_of(n) > step, BACK_S)  # type: ignore[misc]
            now = s.board("state")["totals"]["versions"]
            assert all(new >= old for new, old in zip(now, versions, strict=True)), (versions, now)
            c.said = f"started after {started:.1f} s, healthy after {healthy:.1f} s, commits go on"


def finish(s: Stack, name: str) -> None:
    """Wait for the learners to finish; check what they learnt, and fold the log again."""
    with s.check(name) as c:
        took = s.until("done", lambda: all(s.services()[n][0]["State"] == "exited" for n in LEARNERS), DONE_S)
        codes = {n: s.services()[n][0]["ExitCode"] for n in LEARNERS}
        assert not any(codes.values()), codes
        answer = json.loads(s.found.get(f"{PROMETHEUS}/api/v1/query?query={FIRED}"))
        alerts = [r["metric"] for r in answer["data"]["result"]]
        fired = sorted({f"{m['alertname']} of {m['instance']}" if "instance" in m else m["alertname"] for m in alerts})
        c.said = f"after {took:.0f} s more; alerts since the start, kills included: {', '.join(fired) or 'none'}"
        assert not fired, c.said
    with s.check("Prometheus scrapes no learner that is done") as c:
        took = s.until("off the list", lambda: all(job != "learner" for job, _ in s.targets()), BACK_S)
        c.said = f"after {took:.0f} s"
    with s.check("what they did is in the run") as c:
        state, rows = s.board("state"), s.board("learners")["learners"]
        losses = [row["said"]["loss"] for row in rows]
        totals = state["totals"]
        c.said = (
            f"{totals['commits']:,} commits, {totals['participation']:.0%} of the places filled, "
            f"{totals['kept']:.0%} of the tokens merged, losses {', '.join(f'{loss:.2f}' for loss in sorted(losses))}"
        )
        assert sorted(row["learner"] for row in rows if row["merged"]) == ["a", "b", "c", "d"], rows
        assert max(losses) < LOSS_BEFORE / 2, losses
        said = s.tool("status", "--check").splitlines()[0]
        assert "4 of 4 learners are done" in said, said
    with s.check("replay: no commit differs") as c:
        c.said = next((line for line in s.tool("replay").splitlines() if "differ" in line), "")
        assert " 0 differ" in c.said, c.said


def report(s: Stack, seconds: float) -> str:
    """Return the report as Markdown."""
    lines = [f"Engine: {s.found.said}. {seconds / 60:.0f} minutes in all, {len(s.checks)} checks.", ""]
    if s.images.stand_ins:
        lines += ["These images could not be had, and something stood in for them:", ""]
        lines += [f"- `{image}`: {what}" for image, what in s.images.stand_ins] + [""]
    lines += ["| check | result | seconds | found |", "|---|---|---|---|"]
    for c in s.checks:
        lines.append(
            f"| {c.name} | {'ok' if c.passed else '**failed**'} | {c.seconds:.0f} | {' '.join(c.said.split())[:300]} |"
        )
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def main() -> int:
    """Run all checks and write the report."""
    parser = argparse.ArgumentParser(prog="compose", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=ROOT / "out/compose", help="folder of the report (out/compose)")
    parser.add_argument("--steps", type=int, default=2500, help="steps of each learner (2500)")
    a = parser.parse_args()
    shutil.rmtree(a.out, ignore_errors=True)
    a.out.mkdir(parents=True)
    began = time.monotonic()
    try:
        with engine() as found:
            print(f"engine: {found.said}", flush=True)
            with images(found) as made:
                for image, what in made.stand_ins:
                    print(f"stands in for {image}: {what}", flush=True)
                s = Stack(found, made, a.steps, a.out / "services.log")
                try:
                    story(s)
                finally:
                    s.down("--volumes", "--remove-orphans", check=False)
                    (a.out / "report.md").write_text(report(s, time.monotonic() - began))
                    write_json(
                        {"engine": found.said, "stand_ins": made.stand_ins, "checks": [asdict(c) for c in s.checks]},
                        a.out / "report.json",
                    )
    except NotRun as why:
        print(f"not run: {why}")
        return NOT_RUN
    failed = [c.name for c in s.checks if not c.passed]
    print(f"{len(s.checks)} checks, {len(failed)} failed; report: {a.out / 'report.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
