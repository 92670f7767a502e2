"""Who one is at S3, and where that is: what botocore would say, which is asked only where the environment does not.

(Importing it takes longer than all that a short command does.)
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.errors import Denied, InputError
from isthmus.store.refused import NO_CREDENTIALS

DEFAULT_REGION = "us-east-1"
"""A region is needed to sign; stores other than AWS ignore which."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where requests go and how they are signed."""

    region: str
    endpoint: str | None
    """None: AWS's own for the region."""
    ask: Callable[[], Coroutine[Any, Any, Any]]
    """Returns `access_key_id`, `secret_access_key`, `token` and `expires_at`, a datetime or None. Raises `Denied`."""
    authorities: bytes | None
    """Certificates [PEM] to trust as well."""

    def in_path(self, bucket: str) -> bool:
        """Whether the bucket is in the path, as AWS's own clients do it: where somebody names an endpoint."""
        return self.endpoint is not None or "." in bucket

    def host(self, bucket: str) -> str:
        """Return the URL of the host that requests for a bucket go to."""
        host = f"s3.{self.region}.amazonaws.com"
        return self.endpoint or (f"https://{host}" if self.in_path(bucket) else f"https://{bucket}.{host}")


def access(environment: Mapping[str, str] = os.environ) -> Access:
    """Return what the environment says, or else what AWS's files and metadata services do. Raises `InputError`."""
    key, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    bundle = environment.get("AWS_CA_BUNDLE")
    try:
        authorities = Path(bundle).read_bytes() if bundle else None
    except OSError as error:
        raise InputError(f"AWS_CA_BUNDLE: {bundle} cannot be read ({error.strerror})") from None
    if key and secret and (region or not _has_files(environment)):
        known = {
            "access_key_id": key,
            "secret_access_key": secret,
            "token": environment.get("AWS_SESSION_TOKEN") or None,
            "expires_at": None,
        }

        async def ask() -> Any:
            return known

        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        return Access(region or DEFAULT_REGION, endpoint, ask, authorities)
    return _of_botocore(authorities)


def _has_files(environment: Mapping[str, str]) -> bool:
    named = environment.get("AWS_CONFIG_FILE"), environment.get("AWS_PROFILE")
    return any(named) or Path("~/.aws/config").expanduser().exists()


def _of_botocore(authorities: bytes | None) -> Access:
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError
    from botocore.session import get_session

    try:
        session = get_session()
        region = session.get_config_variable("region") or DEFAULT_REGION
        # The client knows every place where an endpoint may be written down.
        client = session.create_client("s3", region_name=region, config=Config(signature_version="s3v4"))
        endpoint = client.meta.endpoint_url
    except (BotoCoreError, ValueError) as error:
        raise InputError(f"AWS's configuration: {error}") from None

    def now() -> Any:
        try:
            found = session.get_credentials()
        except BotoCoreError as error:
            raise Denied(f"{NO_CREDENTIALS} ({error})") from None
        if found is None:
            raise Denied(NO_CREDENTIALS)
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": getattr(found, "_expiry_time", None),
        }

    async def ask() -> Any:
        # It may ask a metadata service, and wait for it.
        return await asyncio.get_running_loop().run_in_executor(None, now)

    return Access(region, None if endpoint.endswith(".amazonaws.com") else endpoint, ask, authorities)
