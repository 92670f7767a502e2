"""The metrics, from the registries that services serve."""

from isthmus.runtime.metrics import Declared, LearnerMetrics, Metrics, SyncerMetrics


def page() -> str:
    """Return the page of all metrics."""
    shared = Metrics().declared
    names = {metric.name for metric in shared}
    out = [
        "# Metrics",
        "Served as Prometheus reads them by `--http` ([watching a run](../monitoring.md)); in a training loop of your "
        "own the registry is `link.metrics.registry`. Durations are seconds on a clock that never goes back. Of a "
        "histogram there are `_bucket`, `_sum` and `_count`.",
        "## Syncers and learners",
        _table(shared),
    ]
    for title, metrics in (("Syncers", SyncerMetrics()), ("Learners", LearnerMetrics())):
        out += [f"## {title}", _table([metric for metric in metrics.declared if metric.name not in names])]
    return "\n\n".join(out) + "\n"


def _table(metrics: list[Declared]) -> str:
    lines = ["| name | type | labels | what it is |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.description} |")
    return "\n".join(lines)
