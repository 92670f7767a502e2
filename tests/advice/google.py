"""An imitation of Google Cloud Storage: objects in memory, permissions, and Google's own words."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, unquote, urlsplit

from advice.gate import Answer, Gate, gate

PERMISSIONS = {"GET": "storage.objects.get", "PUT": "storage.objects.create", "DELETE": "storage.objects.delete"}
ALL = frozenset({*PERMISSIONS.values(), "storage.objects.list"})


@dataclass
class Google:
    """A bucket, and the key file that leads to it."""

    key: Path
    buckets: set[str] = field(default_factory=set)
    granted: set[str] = field(default_factory=lambda: set(ALL))
    objects: dict[str, bytes] = field(default_factory=dict)
    honours: bool = True
    """Whether creates with x-goog-if-generation-match: 0 are create-only."""
    page: int = 1000
    """How many objects a listing has in one answer."""
    _writing: Lock = field(default_factory=Lock)

    def answer(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        """Return the answer to a request: status, body and headers."""
        at = urlsplit(path)
        bucket, _, key = unquote(at.path).lstrip("/").partition("/")
        asked = parse_qs(at.query)
        if bucket not in self.buckets:
            return *_error(404, "NoSuchBucket", "The specified bucket does not exist."), {}
        needs = PERMISSIONS[method] if key else "storage.objects.list"
        if needs not in self.granted or (
            method == "GET" and key not in self.objects and "storage.objects.list" not in self.granted
        ):
            who = f"someone@project.iam.gserviceaccount.com does not have {needs} access to the bucket."
            return *_error(403, "AccessDenied", "Access denied.", who), {}
        if not key:
            return 200, self._listing(asked.get("prefix", [""])[0], asked.get("continuation-token", [""])[0]), {}
        there = {"ETag": '"1"', "Last-Modified": formatdate(usegmt=True)}
        if method == "PUT":
            with self._writing:
                if self.honours and headers.get("x-goog-if-generation-match") == "0" and key in self.objects:
                    return *_error(
                        412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold."
                    ), {}
                self.objects[key] = body
            return 200, b"", there
        if key not in self.objects:
            return *_error(404, "NoSuchKey", "The specified key does not exist."), {}
        if method == "DELETE":
            del self.objects[key]
            return 204, b"", {}
        whole = self.objects[key]
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", "")):
            start, stop = int(found[1]), min(int(found[2]) + 1, len(whole))
            if start >= len(whole):
                return *_error(416, "InvalidRange", "The requested range cannot be satisfied."), {}
            return 206, whole[start:stop], {**there, "Content-Range": f"bytes {start}-{stop - 1}/{len(whole)}"}
        return 200, whole, there

    def _listing(self, prefix: str, after: str) -> bytes:
        item = "<Contents><Key>{}</Key><LastModified>{}</LastModified><ETag>1</ETag><Size>{}</Size></Contents>"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")  # those that the doctor asks for are new
        left = [(k, len(v)) for k, v in sorted(self.objects.items()) if k.startswith(prefix) and k > after]
        found = [item.format(k, now, size) for k, size in left[: self.page]]
        more = f"<NextContinuationToken>{left[self.page - 1][0]}</NextContinuationToken>" if left[self.page :] else ""
        head = (
            f"<Name>b</Name><KeyCount>{len(found)}</KeyCount><IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}"
        )
        return f"<ListBucketResult>{head}{''.join(found)}</ListBucketResult>".encode()


def _error(status: int, code: str, message: str, details: str = "") -> Answer:
    more = f"<Details>{details}</Details>" if details else ""
    return status, f"<Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>".encode()


def key_file(path: Path, url: str) -> Path:
    """Write a key file that leads to a URL and needs no token; return its path."""
    who = {"client_email": "", "private_key": "", "private_key_id": ""}
    path.write_text(json.dumps({"gcs_base_url": url, "disable_oauth": True, **who}))
    return path


@contextmanager
def google(folder: Path) -> Iterator[tuple[Google, Gate]]:
    """Run the imitation with one bucket, `bucket`; yield it and the server before it."""
    there = Google(folder / "key.json", {"bucket"})
    with gate("", there.answer) as server:
        key_file(there.key, server.url)
        yield there, server
