"""Chaos: rounds of mixed faults on real processes, checked after each one. `python -m chaos.run --help`."""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.checker import Checker
from chaos.cluster import RUN, Child, Cluster, end_on_sigterm
from chaos.proxy import Fault

PROGRESS_S = 90.0
"""After the faults of a round have ended, every fragment gets a new commit within this time, or the run is stuck."""

FAULT_S = (2.0, 5.0)
"""The shortest and the longest duration of a fault."""

FENCED = 1


@dataclass
class Chaos:
    """One run of chaos."""

    cluster: Cluster
    checker: Checker
    random: random.Random
    faults: Counter[str] = field(default_factory=Counter)
    kills: list[tuple[str, float]] = field(default_factory=list)
    """Names of syncer processes that were killed, and the times."""
    deck: list[str] = field(default_factory=list)
    """Faults still to come. They are dealt like cards, so that each kind has its turn."""

    def rounds(self, count: int, say: Callable[[str], None]) -> None:
        """Run this many rounds of faults, and check the run after each."""
        self.until_progress("start")
        for number in range(1, count + 1):
            chosen = sorted({self.deal() for _ in range(self.random.choice((1, 2, 2, 3)))})
            started = time.monotonic()
            for name in chosen:
                self.faults[name] += 1
                FAULTS[name](self)
            self.calm()
            when = f"round {number} ({', '.join(chosen)})"
            waited = self.until_progress(when)
            self.checker.ledgers(when)
            for crash in self.cluster.crashes:
                self.checker.violations.append(f"{when}: {crash}")
            self.cluster.crashes.clear()
            say(
                f"round {number:3d} of {count}: {', '.join(chosen):60s} commits {self.checker.count:5d}  "
                f"going on after {waited:4.1f} s  took {time.monotonic() - started:4.1f} s  "
                f"violations {len(self.checker.violations)}"
            )

    def deal(self) -> str:
        """Return the next fault; shuffle again when all have had their turn."""
        if not self.deck:
            self.deck = self.random.sample(sorted(FAULTS), len(FAULTS))
        return self.deck.pop(0)

    def calm(self) -> None:
        """End every fault."""
        for proxy in (self.cluster.proxy, self.cluster.first):
            proxy.clear()

    def until_progress(self, when: str) -> float:
        """Wait until every fragment has a new commit; return the waiting time."""
        started = time.monotonic()
        before = self.checker.newest()
        while time.monotonic() - started < PROGRESS_S:
            self.cluster.wait(0.25)
            if all(version > before[p] for p, version in self.checker.newest().items()):
                return time.monotonic() - started
        self.checker.violations.append(f"{when}: no progress within {PROGRESS_S:g} s from {before}")
        return time.monotonic() - started

    # --- processes ----------------------------------------------------------------------------------------------------

    def kill(self, *children: Child) -> None:
        """Kill these processes, one right after the other."""
        for child in children:
            if child.process is not None and child.process.poll() is None:
                life = child.life
                at = child.kill()
                if child.kind == "syncer":
                    self.kills.append((life, at))

    def pause(self, child: Child) -> None:
        """Stop a process for a while: it resumes with outdated state."""
        import signal

        if child.process is not None and child.process.poll() is None:
            child.process.send_signal(signal.SIGSTOP)
            self.cluster.wait(self.random.uniform(*FAULT_S))
            child.process.send_signal(signal.SIGCONT)

    def twin(self) -> None:
        """Start a learner a second time; the older process must stop by itself."""
        child = self.random.choice(self.cluster.learners)
        if child.process is None or child.process.poll() is not None:
            return
        older = child.twin()
        end = time.monotonic() + 60.0
        while older.poll() is None and time.monotonic() < end:
            self.cluster.wait(0.2)
        if older.poll() is None:
            self.checker.violations.append(f"two processes of {child.name}: the older one never stopped")
            older.kill()
            older.wait()
        elif older.returncode != FENCED:
            self.checker.violations.append(f"two processes of {child.name}: the older ended with {older.returncode}")

    # --- servers ------------------------------------------------------------------------------------------------------

    def store(self, fault: Fault, rate: float) -> None:
        """Let a fault strike requests to the store for a while."""
        for proxy in (self.cluster.proxy, self.cluster.first):
            proxy.set(fault, rate, slow_s=1.0)
        self.cluster.wait(self.random.uniform(*FAULT_S))
        self.calm()

    def store_of_one_cut(self) -> None:
        """Cut one syncer off from the store only: the others take over while it lasts."""
        self.cluster.first.set(Fault.REFUSE)
        self.until_progress("while one syncer is without the store")
        self.calm()

    def one_learner_denied(self) -> None:
        """Deny all reads of one learner's objects: its updates are rejected, and others' are merged meanwhile."""
        child = _learner(self)
        # A syncer that was just killed must first read the merged updates: it could not fold them while denied.
        self.until_progress(f"before objects of {child.name} are denied")
        for proxy in (self.cluster.proxy, self.cluster.first):
            proxy.set(Fault.DENIED, denied=f"/{child.name}/")
        self.until_progress(f"while objects of {child.name} may not be read")
        self.calm()

    def flood(self) -> None:
        """Let one learner announce 1200 updates a second on versions that do not exist."""
        flooding = subprocess.Popen(
            [sys.executable, "-m", "chaos.flood", RUN, self.cluster.bus, "evil"],
            env={**self.cluster.environment, **self.cluster.direct},
            stdout=subprocess.DEVNULL,
        )
        try:
            self.cluster.wait(2.0)
            self.until_progress("while one learner floods the bus")
            if flooding.poll() is not None:
                self.checker.violations.append(f"the flood ended by itself with {flooding.returncode}")
        finally:
            flooding.kill()
            flooding.wait()

    def overwritten(self) -> None:
        """Overwrite merged updates of a learner while every syncer is away; then heal the run."""
        self.kill(*self.cluster.syncers)
        self.checker.check("before updates are overwritten")
        fragments = self.checker.overwrite(self.random.choice(self.cluster.learners).name)
        for p in fragments[:1]:
            self.cluster.wait(3.0)  # the syncers are back, and cannot fold the fragment
            done = self.cluster.command("heal", RUN, "--apply", "--fragment", str(p))
            if done.returncode != 0 or f"fragment {p}" not in done.stdout or "healed: version" not in done.stdout:
                self.checker.violations.append(f"heal ended with {done.returncode}: {done.stdout} {done.stderr}")

    def store_killed(self) -> None:
        """Kill the S3 server; it comes back with the objects that it had acknowledged."""
        self.cluster.kill_s3()
        self.cluster.wait(self.random.uniform(*FAULT_S))
        self.cluster.s3 = self.cluster.start_s3()

    def redis_flushed(self) -> None:
        """Delete everything in Redis while it runs."""
        self.redis("FLUSHALL")

    def redis_restarted(self, *, lost_s: float | None) -> None:
        """Kill Redis; it comes back empty, or without the messages of its last `lost_s` seconds."""
        if lost_s is not None:
            self.redis("SAVE")
            self.cluster.wait(lost_s)
        self.cluster.kill_redis()
        self.cluster.wait(self.random.uniform(0.2, 3.0))
        self.cluster.redis = self.cluster.start_redis(keep=lost_s is not None)

    def redis(self, *command: str) -> None:
        """Send Redis a command."""
        import redis

        with redis.Redis.from_url(self.cluster.bus) as client:
            client.execute_command(*command)

    def collect(self) -> None:
        """Collect garbage while everything runs."""
        self.checker.check("before a collection")
        done = self.cluster.command("gc", RUN, "--keep", "100", "--min-age", "5", "--apply")
        if done.returncode != 0:
            self.checker.violations.append(f"gc ended with {done.returncode}: {done.stderr.strip()}")

    # --- figures ------------------------------------------------------------------------------------------------------

    def recoveries(self) -> list[float]:
        """Return, for each killed syncer that held fragments, the time to the next commit on one of them."""
        times = []
        headers = [c.header for c in self.checker.commits.values()]
        for life, at in self.kills:
            held = {h.fragment for h in headers if h.writer == life}
            following = [h.written_at - at for h in headers if h.fragment in held and h.written_at > at]
            if following:
                times.append(min(following))
        return times


def _learner(chaos: Chaos) -> Child:
    return chaos.random.choice(chaos.cluster.learners)


def _syncer(chaos: Chaos) -> Child:
    return chaos.random.choice(chaos.cluster.syncers)


FAULTS: dict[str, Callable[[Chaos], None]] = {
    "kill a learner": lambda c: c.kill(_learner(c)),
    "kill a syncer": lambda c: c.kill(_syncer(c)),
    "kill all syncers": lambda c: c.kill(*c.cluster.syncers),
    "kill all learners": lambda c: c.kill(*c.cluster.learners),
    "kill everything": lambda c: c.kill(*c.cluster.children),
    "pause a syncer": lambda c: c.pause(_syncer(c)),
    "pause a learner": lambda c: c.pause(_learner(c)),
    "two of one name": lambda c: c.twin(),
    "redis flushed": lambda c: c.redis_flushed(),
    "redis restarted empty": lambda c: c.redis_restarted(lost_s=None),
    "redis lost its tail": lambda c: c.redis_restarted(lost_s=c.random.uniform(0.5, 1.5)),
    "store refuses": lambda c: c.store(Fault.REFUSE, 1.0),
    "store answers 5xx": lambda c: c.store(Fault.ERRORS, 0.5),
    "store slow": lambda c: c.store(Fault.SLOW, 0.8),
    "store loses replies": lambda c: c.store(Fault.LOST_REPLIES, 0.5),
    "store truncates": lambda c: c.store(Fault.TRUNCATED, 0.3),
    "store cuts uploads": lambda c: c.store(Fault.CUT, 0.5),
    "store mixed": lambda c: c.store(Fault.MIXED, 0.5),
    "store killed": lambda c: c.store_killed(),
    "garbage collected": lambda c: c.collect(),
    "store of one syncer cut": lambda c: c.store_of_one_cut(),
    "one learner's objects denied": lambda c: c.one_learner_denied(),
    "one learner floods": lambda c: c.flood(),
    "merged updates overwritten": lambda c: c.overwritten(),
}


def run(
    folder: Path,
    *,
    rounds: int,
    seed: int,
    syncers: int = 2,
    learners: int = 3,
    deck: Sequence[str] = (),
    forked: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run chaos and return its report: rounds, faults, violations, recovery_s, ledger, commits, differ.

    Faults are dealt from `deck` first. `forked`: processes are forked after the imports.
    """
    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    cluster = Cluster(folder, syncers, learners, forked=forked)
    with cluster.running():
        checker = Checker(RUN, cluster.direct)
        chaos = Chaos(cluster, checker, random.Random(seed), deck=list(deck))
        try:
            chaos.rounds(rounds, say)
        except BaseException:
            say(f"logs in {cluster.logs}")
            raise
        cluster.stop()
        checker.violations += [f"end: {crash}" for crash in cluster.crashes]
        ledgers = checker.ledgers("end")
        if len(ledgers) != learners:
            checker.violations.append(f"end: ledgers of {sorted(ledgers)} only")
        report = folder / "replay.json"
        replayed = cluster.command("replay", RUN, "--json", str(report), timeout=600)
        if replayed.returncode != 0:
            checker.violations.append(f"replay: {replayed.stdout.strip()} {replayed.stderr.strip()}")
        replay = json.loads(report.read_text()) if report.exists() else {"commits": 0, "differ": None}
        recovery = chaos.recoveries()
        return {
            "seed": seed,
            "rounds": rounds,
            "faults": dict(chaos.faults),
            "injected": dict(Counter(cluster.proxy.counts) + Counter(cluster.first.counts)),
            "violations": checker.violations,
            "recovery_s": {
                "kills": len(chaos.kills),
                "seen": len(recovery),
                "p50": round(statistics.median(recovery), 3) if recovery else None,
                "max": round(max(recovery), 3) if recovery else None,
            },
            "ledger": {
                name: {
                    "lives": ledger["incarnation"],
                    "processed": ledger["processed"],
                    **{
                        part: sum(row[part] for row in ledger["fragments"]) / len(ledger["fragments"])
                        for part in ("merged", "overwritten", "late", "pending", "rejected", "lost")
                    },
                }
                for name, ledger in sorted(ledgers.items())
            },
            "commits": checker.count,
            "replayed": replay["commits"],
            "unverifiable": replay.get("unverifiable", 0),
            "differ": replay["differ"],
            "wall_s": round(time.monotonic() - started, 1),
        }


def main() -> int:
    """Run chaos with the arguments of the command line; return 1 if there was a violation."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of faults (30)")
    parser.add_argument("--seed", type=int, default=0, help="which faults, when (0)")
    parser.add_argument("--out", default="out/chaos", metavar="DIR", help="stores, logs and report (out/chaos)")
    parser.add_argument("--json", metavar="PATH", help="write the report there too")
    a = parser.parse_args()
    end_on_sigterm()
    report = run(Path(a.out), rounds=a.rounds, seed=a.seed, say=lambda line: print(line, flush=True))
    text = json.dumps(report, indent=2) + "\n"
    for path in (Path(a.out) / "report.json", a.json and Path(a.json)):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    print(text)
    violations = report["violations"]
    assert isinstance(violations, list)
    print(
        f"{report['rounds']} rounds, {report['commits']} commits, {report['differ']} differ, {len(violations)} violations"
    )
    return 1 if violations else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.TimeoutExpired as error:
        print(f"chaos: {error}", file=sys.stderr)
        sys.exit(1)
