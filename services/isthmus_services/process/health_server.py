"""Health and metrics of a service over HTTP: /metrics for Prometheus, /healthz and /livez for its supervisor.

    /livez     200 while the event loop runs. Kill a service that fails this: nothing else helps.
    /healthz   200 while the service serves, and store and bus answer too. Do not kill a service that fails this: it
               waits until the outage is over.
    /metrics   Prometheus's text format, including the event loop's lag and the silence of store and bus

The server has a thread of its own, so it reports a stuck event loop instead of being silent.
"""

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, disable_created_metrics, generate_latest

from isthmus.agent.health import Pulse, Vitals
from isthmus.errors import InputError
from isthmus.runtime.metrics import Metrics

logger = logging.getLogger("isthmus.services.board")

REQUEST_S = 5.0


class HealthServer:
    """The HTTP answers of one service. Until `serves` is called, the service is alive but not healthy."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.phase = "starting"
        self._vitals: Vitals | None = None
        self._registry = CollectorRegistry()

    def serves(self, vitals: Vitals, metrics: Metrics) -> None:
        """Report these vitals and metrics from now on: the service has started."""
        self._vitals, self._registry, self.phase = vitals, metrics.registry, "serving"

    def stops(self) -> None:
        """Report from now on that the service was asked to end and must get no new work."""
        self.phase = "stopping"

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return status, content type and body for a path."""
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path not in ("/livez", "/healthz"):
            return 404, "text/plain", b"/metrics, /healthz or /livez\n"
        pulse = self._vitals.pulse() if self._vitals else Pulse(0.0, 0.0, 0.0)
        trouble = pulse.trouble or ("" if self.phase == "serving" else self.phase)
        good = pulse.alive if path == "/livez" else not trouble
        report = {
            "service": self.service,
            "phase": self.phase,
            "ok": good,
            "trouble": trouble,
            "seconds_since": {
                "loop_turned": round(pulse.loop_s, 3),
                "store_answered": round(pulse.store_s, 3),
                "bus_answered": round(pulse.bus_s, 3),
            },
        }
        return 200 if good else 503, "application/json", json.dumps(report).encode() + b"\n"


@contextmanager
def shown(board: HealthServer, address: str | None) -> Iterator[None]:
    """Serve the answers over HTTP while the body runs; without an address, serve nothing. Raises `InputError`."""
    if address is None:
        yield
        return
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a gauge for each counter that nothing reads
    server = _listen(board.answer, address)
    threading.Thread(target=server.serve_forever, name="isthmus-board", daemon=True).start()
    logger.info("metrics and health on http://%s:%d", *server.server_address[:2])
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _listen(answer: Callable[[str], tuple[int, str, bytes]], address: str) -> ThreadingHTTPServer:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InputError(f"--http {address}: write it as HOST:PORT, such as 127.0.0.1:9464")

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_S
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, kind, body = answer(self.path.partition("?")[0])
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: probes and scrapes are not events."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        server = Server((host.strip("[]"), int(port)), Handler)
    except OSError as error:
        raise InputError(
            f"--http {address}: {error.strerror or error}: choose another address; port 0 takes a free one "
            f"(--http {host}:0)"
        ) from None
    server.daemon_threads = True
    return server
