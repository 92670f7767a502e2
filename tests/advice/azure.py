"""An imitation of Azure Blob Storage: blobs in memory, permissions, and Azure's own words."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from threading import Lock
from urllib.parse import parse_qs, unquote, urlsplit

from advice.gate import Gate, gate

Raw = tuple[int, bytes, dict[str, str]]
READ, WRITE, DELETE, LIST = "rwdl"
"""Permissions, by their letters in a SAS token."""

ALL = frozenset({READ, WRITE, DELETE, LIST})


@dataclass
class Azure:
    """A storage account with containers."""

    containers: set[str] = field(default_factory=set)
    granted: set[str] = field(default_factory=lambda: set(ALL))
    blobs: dict[str, bytes] = field(default_factory=dict)
    honours: bool = True
    """Whether it heeds If-None-Match: *."""
    _writing: Lock = field(default_factory=Lock)

    def answer(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Raw:
        """Return the answer to a request: status, body and headers."""
        at = urlsplit(path)
        container, _, key = unquote(at.path).lstrip("/").partition("/")
        asked = parse_qs(at.query)
        if container not in self.containers:
            return _error(404, "ContainerNotFound", "The specified container does not exist.")
        if asked.get("comp") == ["batch"]:
            return self._batch(body)
        needs = {"GET": READ if key else LIST, "PUT": WRITE}[method]
        if needs not in self.granted:
            return _error(403, "AuthorizationPermissionMismatch", "This request is not authorized.")
        if not key:
            return 200, self._listing(asked.get("prefix", [""])[0]), {}
        there = {"ETag": '"1"', "Last-Modified": formatdate(usegmt=True)}
        if method == "PUT":
            with self._writing:
                if self.honours and headers.get("if-none-match") == "*" and key in self.blobs:
                    return _error(409, "BlobAlreadyExists", "The specified blob already exists.")
                self.blobs[key] = body
            return 201, b"", there
        if key not in self.blobs:
            return _error(404, "BlobNotFound", "The specified blob does not exist.")
        whole = self.blobs[key]
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
        start, stop = (int(found[1]), min(int(found[2]) + 1, len(whole))) if found else (0, len(whole))
        if found and start >= len(whole):
            return _error(416, "InvalidRange", "The range specified is invalid.")
        return 206, whole[start:stop], {**there, "Content-Range": f"bytes {start}-{stop - 1}/{len(whole)}"}

    def _batch(self, body: bytes) -> Raw:
        path = re.findall(rb"DELETE (\S+) HTTP", body)[0].decode()
        key = unquote(path).lstrip("/").partition("/")[2]
        if DELETE not in self.granted:
            said = "403 This request is not authorized."
        else:
            said = "202 Accepted" if self.blobs.pop(key, None) is not None else "404 The specified blob does not exist."
        part = f"--b\r\nContent-Type: application/http\r\nContent-ID: 0\r\n\r\nHTTP/1.1 {said}\r\n\r\n--b--\r\n"
        return 202, part.encode(), {"Content-Type": "multipart/mixed; boundary=b"}

    def _listing(self, prefix: str) -> bytes:
        item = (
            "<Blob><Name>{}</Name><Properties><Last-Modified>{}</Last-Modified><Etag>1</Etag><Content-Length>{}"
            "</Content-Length><Content-Type>x</Content-Type></Properties></Blob>"
        )
        now = formatdate(usegmt=True)
        found = [item.format(k, now, len(v)) for k, v in sorted(self.blobs.items()) if k.startswith(prefix)]
        return f"<EnumerationResults><Blobs>{''.join(found)}</Blobs><NextMarker/></EnumerationResults>".encode()


def _error(status: int, code: str, message: str) -> Raw:
    more = "RequestId:0\nTime:2026-11-28T00:00:00Z"
    return status, f"<Error><Code>{code}</Code><Message>{message}\n{more}</Message></Error>".encode(), {}


@contextmanager
def azure() -> Iterator[tuple[Azure, Gate]]:
    """Run the imitation with one container, `container`; yield it and the server before it."""
    there = Azure({"container"})
    with gate("", lambda *asked: there.answer(*asked)) as server:  # noqa: PLW0108  tests replace `answer`
        yield there, server
