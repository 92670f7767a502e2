"""Stands in for Grafana where its image cannot be had: reads what it is given, as its user, and answers health checks.

A file that it cannot read or a folder that it cannot write to ends it with an error, as Grafana would end.
"""

import json
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

assert Path(os.environ["GF_SECURITY_ADMIN_PASSWORD__FILE"]).read_text().strip()
given = [path for path in Path(os.environ["GF_PATHS_PROVISIONING"]).rglob("*") if path.is_file()]
assert len(given) >= 2
assert all(path.read_text() for path in given)
assert json.loads(Path(os.environ["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]).read_text())["panels"]
(Path(os.environ["GF_PATHS_DATA"]) / "grafana.db").write_text("")


class Answer(BaseHTTPRequestHandler):
    """Answers every address with an empty page."""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200)
        self.end_headers()


HTTPServer(("0.0.0.0", 3000), Answer).serve_forever()
