"""A SeaweedFS with the identities and policies that `isthmus access` writes."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

from isthmus_services.commands import access
from isthmus_services.servers import Server, s3_server


@dataclass(frozen=True)
class Store:
    """A SeaweedFS that knows all identities, and the folder that `isthmus access` wrote."""

    server: Server
    folder: Path

    def environment(self, user: str) -> Mapping[str, str]:
        """Return the environment variables of a user's process."""
        return {
            "AWS_ENDPOINT_URL": self.server.url,
            "AWS_REGION": "us-east-1",
            "AWS_SHARED_CREDENTIALS_FILE": str(self.folder / user / access.CREDENTIALS),
        }

    def client(self, user: str = "") -> Any:
        """Return an S3 client, independent of Isthmus, of a user or of the administrator."""
        key, secret = (self.folder / access.ROOT_USER).read_text(), (self.folder / access.ROOT_PASSWORD).read_text()
        if user:
            lines = (self.folder / user / access.CREDENTIALS).read_text().splitlines()
            key, secret = (line.partition("=")[2] for line in lines[1:])
        return boto3.client(
            "s3",
            endpoint_url=self.server.url,
            region_name="us-east-1",
            aws_access_key_id=key.strip(),
            aws_secret_access_key=secret.strip(),
        )


@contextlib.contextmanager
def seaweedfs_of(place: Path, folder: Path, bucket: str) -> Iterator[Store]:
    """Start the server in a folder, with the users in another one, and make the bucket; stop it at the end."""
    root = (folder / access.ROOT_USER).read_text().strip(), (folder / access.ROOT_PASSWORD).read_text().strip()
    identities = (f"-s3.config={folder / access.SEAWEEDFS_FILE}",)
    with s3_server(place, credentials=root, arguments=identities) as server:
        store = Store(server, folder)
        with contextlib.closing(store.client()) as administrator:
            administrator.create_bucket(Bucket=bucket)
        yield store
