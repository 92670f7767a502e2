"""Metrics of simulated processes, recorded in virtual time as Prometheus scrapes them, and alerts judged by promtool."""

import asyncio
import functools
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from isthmus.runtime.metrics import Metrics

ALERTS = Path(__file__).parents[2] / "infra/prometheus/alerts.yaml"
EVERY_S = 30.0
"""Interval of scrapes, and of evaluations."""

Target = tuple[str, str]
"""Job and instance."""


@functools.cache
def alerts() -> dict[str, dict[str, str]]:
    """Return the annotations of each alert, by its name."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule["annotations"] for rule in group["rules"]}


@dataclass
class Recording:
    """Samples of all series, one for each scrape; None where a series had none."""

    up: dict[Target, Metrics | None] = field(default_factory=dict)
    """The targets that are scraped, and their metrics; None for a target that does not answer."""
    series: dict[str, list[float | None]] = field(default_factory=dict)
    scrapes: int = 0

    def scrape(self) -> None:
        """Scrape every target once."""
        for (job, instance), metrics in self.up.items():
            at = {"job": job, "instance": instance}
            self._sample("up", at, float(metrics is not None))
            for family in metrics.registry.collect() if metrics is not None else ():
                for sample in family.samples:
                    self._sample(sample.name, {**sample.labels, **at}, sample.value)
        self.scrapes += 1

    def _sample(self, name: str, labels: Mapping[str, str], value: float) -> None:
        one = f"{name}{{{', '.join(f'{k}={json.dumps(v)}' for k, v in sorted(labels.items()))}}}"
        values = self.series.setdefault(one, [])
        values += [None] * (self.scrapes - len(values))
        values.append(value)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Scrape every `EVERY_S` seconds of the loop's time during the body."""

        async def scrape() -> None:
            while True:
                self.scrape()
                await asyncio.sleep(EVERY_S)

        task = asyncio.ensure_future(scrape())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def firing(self, folder: Path) -> list[set[str]]:
        """Return the alerts that fire at each scrape, as promtool evaluates them. Skips the test without promtool."""
        promtool = shutil.which("promtool")
        if promtool is None:
            why = "not run: no promtool on PATH (Debian has it in the package prometheus)"
            if os.environ.get("ISTHMUS_REQUIRE_PROMTOOL") == "1":
                pytest.fail(why, pytrace=False)
            pytest.skip(why)
        names = sorted(alerts())
        asked = [(n, name) for n in range(self.scrapes) for name in names]
        test = {
            "rule_files": [str(ALERTS)],
            "evaluation_interval": f"{EVERY_S:.0f}s",
            "tests": [
                {
                    "interval": f"{EVERY_S:.0f}s",
                    "input_series": [
                        {"series": s, "values": _notation(v, self.scrapes)} for s, v in self.series.items()
                    ],
                    "alert_rule_test": [
                        # No alert has this label: so promtool prints each alert that fires, with its name and its time.
                        {"eval_time": f"{n * EVERY_S:.0f}s", "alertname": name, "exp_alerts": []}
                        for n, name in asked
                    ],
                }
            ],
        }
        path = folder / "recorded.yaml"
        path.write_text(yaml.safe_dump(test))
        done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False)
        return _fired(done.stdout + done.stderr, self.scrapes)


def _notation(values: Sequence[float | None], scrapes: int) -> str:
    """Return samples as promtool reads them. A series that ends is stale."""
    found, there = list[str](), False
    for value in [*values, *[None] * (scrapes - len(values))]:
        found.append(repr(value) if value is not None else "stale" if there else "_")
        there = value is not None
    return " ".join(found).replace("nan", "NaN").replace("inf", "Inf")


def _fired(said: str, scrapes: int) -> list[set[str]]:
    """Return the alerts that promtool found firing without being expected, by scrape."""
    found = [set[str]() for _ in range(scrapes)]
    for line in said.splitlines():
        words = dict(part.strip().split(": ", 1) for part in line.strip().split(", ") if ": " in part)
        if "alertname" in words and "time" in words:
            found[round(_seconds(words["time"]) / EVERY_S)].add(words["alertname"])
    return found


def _seconds(duration: str) -> float:
    """Return the seconds of a duration such as 1h2m30s."""
    total, number = 0.0, ""
    for character in duration:
        if character.isalpha():
            total += float(number) * {"h": 3600.0, "m": 60.0, "s": 1.0}[character]
            number = ""
        else:
            number += character
    return total
