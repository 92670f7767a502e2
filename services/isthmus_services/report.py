"""Machine-readable reports: what a command prints, as JSON."""

import json
from collections.abc import Mapping
from pathlib import Path


def write_json(report: Mapping[str, object], *paths: str | Path | None) -> None:
    """Write the report to each path that is given."""
    for path in paths:
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(report, indent=2) + "\n")
