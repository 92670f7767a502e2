"""Dashboard, alerts and docs/monitoring.md agree with the declared metrics, with promtool and a real Prometheus."""

import http.client
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import pytest
import yaml
from prometheus_client import Counter, Gauge, Histogram

from isthmus.agent.health import Vitals
from isthmus.bus.endpoints import Listener, Speaker
from isthmus.reasons import Reason
from isthmus.runtime.clock import single_threaded
from isthmus.runtime.metrics import LearnerMetrics, Metrics, SyncerMetrics, declared
from isthmus.store import EdgeStore
from isthmus_services.process.health_server import HealthServer, shown
from isthmus_services.servers import free_ports

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "infra" / "prometheus"
GRAFANA = ROOT / "infra" / "grafana"
DOCUMENT = (ROOT / "docs" / "monitoring.md").read_text()
DASHBOARD = json.loads((GRAFANA / "dashboards" / "isthmus.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
(GROUP,) = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())["groups"]
ALERTS = GROUP["rules"]
CASES = yaml.safe_load((PROMETHEUS / "alerts.test.yaml").read_text())["tests"]

SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}
OF_TARGETS = {"job", "instance"}
START_S = 60.0


def samples() -> dict[str, set[str]]:
    """Return every metric that an expression may name, with its labels."""
    found = {"up": set(OF_TARGETS), "ALERTS": {"alertname", "alertstate", "severity"}}
    for d in declared():
        for suffix in SUFFIXES.get(d.kind, ("",)):
            found[d.name + suffix] = {*d.labels, *OF_TARGETS, *(["le"] if suffix == "_bucket" else [])}
    return found


def asked() -> dict[str, str]:
    """Return every expression as Prometheus gets it, by its place."""
    found = {rule["alert"]: rule["expr"] for rule in ALERTS}
    for panel in PANELS:
        found |= {f"{panel['title']}/{target['refId']}": target["expr"] for target in panel["targets"]}
    values = {"__rate_interval": "1m"} | {v["name"]: v["allValue"] for v in DASHBOARD["templating"]["list"]}
    # An undeclared variable stays in the expression, and a test finds it.
    return {w: re.sub(r"\$(\w+)", lambda m: values.get(m[1], m[0]), expression) for w, expression in found.items()}


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:isthmus_\w+|up|ALERTS)\b", re.sub(r'"[^"]*"', '""', expression)))


def argument(text: str) -> str:
    """Return a text, which begins with a parenthesis, up to the matching parenthesis."""
    depth = 0
    for end, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return text[:end]
    raise AssertionError(f"not closed: {text}")


def mistakes(expression: str) -> list[str]:
    """Return what is wrong in an expression: metrics that do not exist, and labels that its metrics do not have."""
    known = samples()
    wrong = [f"no metric {name}" for name in names_in(expression) - known.keys()]
    for name, selector in re.findall(r"(\w+)\{([^}]*)\}", expression):
        labels = set(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', selector))
        wrong += [f"{name} has no {label}" for label in labels - known.get(name, labels)]
    for clause in re.finditer(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)\s*", expression):
        # `by` and `without` apply to their argument, and vector matching to both sides.
        about = argument(expression[clause.end() :]) if clause[1] in ("by", "without") else expression
        for label in filter(None, re.split(r"[,\s]+", clause[2])):
            wrong += [f"{name} has no {label}" for name in names_in(about) if label not in known.get(name, {label})]
    return wrong


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        why = f"not run: no {name} on PATH (Debian has it in the package prometheus)"
        if os.environ.get("ISTHMUS_REQUIRE_PROMTOOL") == "1":
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    return found


def rows(first: str) -> list[list[str]]:
    """Return the cells of the table in the document whose first column has this heading."""
    _, found, rest = DOCUMENT.partition(f"\n| {first} |")
    assert found, f"no table of {first}s"
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


# --- expressions ------------------------------------------------------------------------------------------------------


def test_every_expression_asks_for_what_there_is() -> None:
    wrong = {where: found for where, expression in asked().items() if (found := mistakes(expression))}
    assert not wrong
    assert not any("$" in expression for expression in asked().values()), "a variable is not declared"


@pytest.mark.parametrize(
    ("expression", "mistake"),
    [
        ("sum(rate(isthmus_commits[1m]))", "no metric isthmus_commits"),
        ("isthmus_round_seconds > 1", "no metric isthmus_round_seconds"),
        ('isthmus_commits_total{reason="stale"}', "isthmus_commits_total has no reason"),
        ("sum by (le) (rate(isthmus_round_seconds_sum[1m]))", "isthmus_round_seconds_sum has no le"),
        ("max by (part) (up) + isthmus_ledger_tokens", "up has no part"),
        ("isthmus_fragment_version - on (fragment) group_left () isthmus_steps_total", "isthmus_steps_total has no f"),
    ],
)
def test_a_mistake_in_an_expression_is_found(expression: str, mistake: str) -> None:
    assert any(found.startswith(mistake) for found in mistakes(expression))


def test_everything_measured_is_shown() -> None:
    seen = set().union(*map(names_in, asked().values()))
    unseen = [d.name for d in declared() if not {d.name + s for s in SUFFIXES.get(d.kind, ("",))} & seen]
    assert not unseen


# --- the dashboard ----------------------------------------------------------------------------------------------------


def test_panels_have_a_place_a_unit_and_a_sentence() -> None:
    assert DASHBOARD["uid"] == "isthmus"
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, f"{a} and {b} overlap"
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for key in ("id", "title"):
        assert len({panel[key] for panel in DASHBOARD["panels"]}) == len(places), f"two of one {key}"
    for panel in PANELS:
        title = panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], title
        assert re.fullmatch(r"[^.]+(\.[^ ][^.]*)*\.", panel["description"]), f"{title}: one sentence"
        assert panel["targets"], title
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]), title
        assert all(target["legendFormat"] for target in panel["targets"]), title


def test_the_dashboard_asks_the_provisioned_datasource() -> None:
    provisioned = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yaml").read_text())
    (source,) = ({"type": d["type"], "uid": d["uid"]} for d in provisioned["datasources"])
    used = [*PANELS, *DASHBOARD["templating"]["list"], *(target for panel in PANELS for target in panel["targets"])]
    assert all(user["datasource"] == source for user in used)


# --- the alerts -------------------------------------------------------------------------------------------------------


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)
    for rule in ALERTS:
        assert rule["alert"].startswith("Isthmus"), rule["alert"]
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}, rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]
        assert all(rule["annotations"].values()), rule["alert"]
    others = {name for rule in ALERTS for name in re.findall(r"\bIsthmus\w+", rule["annotations"]["description"])}
    assert others < {rule["alert"] for rule in ALERTS}


def test_every_reason_is_harmless_or_explained() -> None:
    (rule,) = (rule for rule in ALERTS if rule["alert"] == "IsthmusUpdatesRejected")
    (harmless,) = re.findall(r'reason!~"([^"]*)"', rule["expr"])
    explained = [r for r in Reason if re.search(rf"\b{r}\b", rule["annotations"]["description"])]
    assert sorted([*harmless.split("|"), *explained]) == sorted(Reason), "each reason must be harmless or explained"


def test_every_alert_is_seen_firing_and_quiet() -> None:
    seen: dict[str, set[bool]] = {}
    for case in (case for test in CASES for case in test["promql_expr_test"]):
        for name in re.findall(r'alertname="(\w+)"', case["expr"]):
            seen.setdefault(name, set()).add(bool(case["exp_samples"]))
            for text in (rule["annotations"].values() for rule in ALERTS if rule["alert"] == name):
                for label in re.findall(r"\$labels\.(\w+)", " ".join(text)):
                    assert all(f'{label}="' in sample["labels"] for sample in case["exp_samples"]), (name, label)
    assert seen == {rule["alert"]: {True, False} for rule in ALERTS}


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yaml"),
        ("check", "rules", "--lint=all", "--lint-fatal", "alerts.yaml"),
        ("test", "rules", "alerts.test.yaml"),
    ],
    ids=" ".join,
)
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([tool("promtool"), *arguments], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- a real Prometheus ------------------------------------------------------------------------------------------------


def feed(metrics: Metrics) -> None:
    """Give every metric a value, and advance counters and histograms."""
    every = [m for m in vars(metrics).values() if isinstance(m, Counter | Gauge | Histogram)]
    for d, metric in zip(metrics.declared, every, strict=True):
        child = metric.labels(*("x" for _ in d.labels)) if d.labels else metric
        match child:
            case Counter():
                child.inc()
            case Gauge():
                child.set(1.0)
            case Histogram():
                child.observe(1.0)


def unheard(metrics: Metrics) -> Vitals:
    """Return the vitals of an agent to which neither store nor bus has answered."""
    never = SimpleNamespace(answered_at=None, down_since=None)
    store, listener, speaker = SimpleNamespace(outage=never), never, never
    return Vitals(single_threaded(0), cast(EdgeStore, store), cast(Listener, listener), cast(Speaker, speaker), metrics)


Get = Callable[..., Any]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Get]:
    """Queries a Prometheus that has this repository's configuration and scrapes two syncers and two learners."""
    binary, folder = tool("prometheus"), tmp_path_factory.mktemp("prometheus")
    jobs = ["syncer", "syncer", "learner", "learner"]
    served: list[Metrics] = [SyncerMetrics(), SyncerMetrics(), LearnerMetrics(), LearnerMetrics()]
    port, *ports = free_ports(1 + len(served))
    addresses = [f"127.0.0.1:{p}" for p in ports]
    config = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        targets = [address for name, address in zip(jobs, addresses, strict=True) if name == job["job_name"]]
        job["static_configs"] = [{"targets": targets}]
    config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "200ms"}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(PROMETHEUS / "alerts.yaml", folder)

    def get(path: str, **query: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
        try:
            connection.request("GET", f"/api/v1/{path}?" + "&".join(f"{k}={quote(v)}" for k, v in query.items()))
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        assert answer["status"] == "success", f"{query}: {answer.get('error')}"
        assert not answer.get("warnings"), f"{query}: {answer['warnings']}"
        return answer["data"]

    def scraped(times: int) -> bool:
        try:
            found = get("query", query="count_over_time(isthmus_store_silence_seconds[1m])")["result"]
        except (OSError, ValueError, http.client.HTTPException):
            return False  # not up yet
        return len(found) == len(served) and all(float(series["value"][1]) >= times for series in found)

    def wait(times: int) -> None:
        until = time.monotonic() + START_S
        while not scraped(times):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until, f"not scraped {times} times: {(folder / 'log').read_text()}"
            time.sleep(0.05)

    with ExitStack() as stack:
        for job, address, metrics in zip(jobs, addresses, served, strict=True):
            board = HealthServer(job)
            board.serves(unheard(metrics), metrics)
            feed(metrics)
            stack.enter_context(shown(board, address))
        listen = f"--web.listen-address=127.0.0.1:{port}"
        process = subprocess.Popen(
            [binary, "--config.file=prometheus.yaml", "--storage.tsdb.path=data", "--log.level=warn", listen],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stack.enter_context(open(folder / "log", "wb")),
        )
        try:
            wait(2)
            for metrics in served:
                feed(metrics)
            wait(6)
            yield get
        finally:
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def test_a_real_prometheus_evaluates_every_expression(api: Get) -> None:
    for expression in asked().values():
        api("query", query=expression)


def test_every_panel_shows_something(api: Get) -> None:
    expressions = asked()
    for panel in PANELS:
        for target in panel["targets"]:
            where = f"{panel['title']}/{target['refId']}"
            found = api("query", query=expressions[where])["result"]
            assert found or "ALERTS" in names_in(target["expr"]), f"{where} is empty"
            for series in found:
                assert series["value"][1] not in ("NaN", "+Inf"), where
                labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                assert labels == series["metric"].keys() - {"__name__", "job"} or not labels, f"{where}: {series}"
            assert len(found) <= 1 or "{{" in target["legendFormat"], f"{where}: several lines of one name"


def test_variables_have_values(api: Get) -> None:
    for variable in DASHBOARD["templating"]["list"]:
        query = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert query is not None
        selector, label = query.groups()
        found = api("query", query=f"count by ({label}) ({selector.replace('$job', '.*')})")["result"]
        assert len(found) == {"job": 2, "instance": 4}[variable["name"]], variable["name"]


def test_the_rules_are_loaded_and_well(api: Get) -> None:
    rules = [rule for group in api("rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in rules] == [rule["alert"] for rule in ALERTS]
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []


# --- the document -----------------------------------------------------------------------------------------------------


def test_the_document_has_every_metric_as_it_is_declared() -> None:
    expected = [[f"`{d.name}`", d.kind, ", ".join(d.labels) or "–", d.description] for d in declared()]
    wanted = "\n".join(f"| {' | '.join(row)} |" for row in expected)
    assert rows("metric") == expected, f"the table should be:\n{wanted}"


def test_the_document_has_every_panel_with_its_description() -> None:
    assert rows("panel") == [[panel["title"], panel["description"]] for panel in PANELS]


def test_the_document_has_every_alert() -> None:
    found = [[name.strip("`"), severity] for name, severity, when, what in rows("alert") if when and what]
    assert found == [[rule["alert"], rule["labels"]["severity"]] for rule in ALERTS]


def test_texts_speak_of_metrics_there_are() -> None:
    texts = [DOCUMENT, *(text for rule in ALERTS for text in rule["annotations"].values())]
    texts += [panel["description"] for panel in PANELS]
    known = samples().keys() | {d.name for d in declared()}
    # A name before a dot is a module.
    assert {name for text in texts for name in re.findall(r"\bisthmus_\w+\b(?!\.\w)", text)} <= known
