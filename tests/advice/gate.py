"""A proxy before a store that answers some requests itself, delays others, or drops their headers."""

import http.client
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

Answer = tuple[int, bytes]
Serve = Callable[[str, str, bytes, dict[str, str]], tuple[int, bytes, dict[str, str]]]
"""From a request's method, path, body and headers (names in small letters) to the status, body and headers."""

OPEN: Callable[[str, str, int], Answer | None] = lambda method, path, size: None  # noqa: E731


@dataclass
class Gate:
    """The proxy. Its fields may be changed while it runs."""

    upstream: str
    answers: Callable[[str, str, int], Answer | None] = OPEN
    """From a request's method, path and size of its body [bytes] to the answer; None: the store answers."""
    without: set[str] = field(default_factory=set)
    """Headers, in small letters, that do not reach the store."""
    bytes_s: float = float("inf")
    """How many bytes of bodies pass in a second."""
    url: str = ""

    def open(self) -> None:
        """Let everything pass."""
        self.answers, self.without, self.bytes_s = OPEN, set(), float("inf")


def error(code: str, message: str = "said so", status: int = 403) -> Answer:
    """Return the answer with which a store reports an error."""
    return status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


@contextmanager
def gate(upstream: str, serve: Serve | None = None, certificate: tuple[Path, Path] | None = None) -> Iterator[Gate]:
    """Run a proxy before a server, or before a function that answers in its place.

    `certificate`: files (PEM) of a certificate and its key, with which the proxy speaks only TLS.
    """
    there = Gate(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # a body would wait 40 ms for the acknowledgement of its head

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            answer = there.answers(self.command, self.path, len(body))
            status, content, headers = (*answer, {}) if answer else self._ask(body)
            if len(content) + len(body) > 1 << 10:
                time.sleep((len(content) + len(body)) / there.bytes_s)
            self.send_response(status)
            length = {} if "Content-Length" in headers else {"Content-Length": str(len(content))}
            for name, value in {**headers, **length}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def _ask(self, body: bytes) -> tuple[int, bytes, Mapping[str, str]]:
            at = urlsplit(there.upstream)
            if serve is not None:
                return serve(self.command, self.path, body, {k.lower(): v for k, v in self.headers.items()})
            connection = http.client.HTTPConnection(at.hostname or "", at.port or 80, timeout=30)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in there.without}
            connection.request(self.command, self.path, body, headers)
            got = connection.getresponse()
            content = got.read()
            connection.close()
            dropped = ("transfer-encoding", "connection", "date", "server")
            return got.status, content, {n: v for n, v in got.getheaders() if n.lower() not in dropped}

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    there.url = f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield there
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
