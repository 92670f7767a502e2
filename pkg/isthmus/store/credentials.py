"""Credentials and endpoint for S3: from the environment, or else from botocore.

The clients of a bucket ask an `Identity` again and again, since credentials change while a process lives: roles and
tokens expire, and files are replaced. botocore is imported only if it is needed, since the import takes longer than all
the work of a short command.
"""

import asyncio
import json
import math
import os
import re
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from isthmus.errors import Denied, InputError, PortError, Unavailable, told
from isthmus.runtime.urls import Place, redacted
from isthmus.store.refused import NO_CREDENTIALS

DEFAULT_REGION = "us-east-1"
"""The region to sign with if none is set; stores other than AWS ignore it."""

_ENDPOINT = re.compile(r"https?://[\w.~:/?#\[\]@!$&'()*+,;=%-]+", re.ASCII | re.IGNORECASE)
"""The characters of a URL; obstore panics at any other."""


_DIRECTORY = re.compile(r".+--([a-z0-9-]+)--x-s3")
"""The name of a directory bucket ends with its zone."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where requests go and how they are signed."""

    region: str
    endpoint: str | None
    """None: AWS's endpoint for the region."""
    identity: "Identity"
    authorities: bytes | None
    """Certificates [PEM] to trust in addition; None: no others."""

    def __post_init__(self) -> None:
        with suppress(InputError):  # which would not say where the endpoint was set
            if not self.endpoint or (_ENDPOINT.fullmatch(self.endpoint) and Place.of(self.endpoint).host):
                return
        raise InputError(
            f"AWS_ENDPOINT_URL, or endpoint= in the bucket's URL: {redacted(self.endpoint or '')!a} is no URL of a "
            "server: write http://HOST:PORT or https://HOST"
        )

    def at(self, place: Place) -> "Access":
        """Return the access to the bucket of a URL, whose options `region` and `endpoint` count before all else."""
        region, endpoint = map(place.options.get, ("region", "endpoint"))
        if not region and not endpoint:
            return self
        known = None if region else self.endpoint
        return replace(self, region=region or self.region, endpoint=endpoint or known)

    def in_path(self, bucket: str) -> bool:
        """Return whether URLs have the bucket in the path, as with AWS's own clients.

        They do if an endpoint is named, or if the bucket's name has a dot.
        """
        return self.endpoint is not None or "." in bucket

    def zone(self, bucket: str) -> str:
        """Return the zone of a directory bucket of S3 Express One Zone; empty for any other bucket."""
        found = _DIRECTORY.fullmatch(bucket) if self.endpoint is None else None
        return found[1] if found else ""

    def host(self, bucket: str) -> str:
        """Return the URL of the host that requests for a bucket go to."""
        zone = self.zone(bucket)
        host = f"s3express-{zone}.{self.region}.amazonaws.com" if zone else f"s3.{self.region}.amazonaws.com"
        return self.endpoint or (f"https://{host}" if self.in_path(bucket) else f"https://{bucket}.{host}")


def access(environment: Mapping[str, str] = os.environ, now: Callable[[], float] = lambda: 0.0) -> Access:
    """Return the access from the environment, or else from AWS's files and metadata services. Raises `InputError`.

    `now`: a clock [s]; without one the credentials are fetched once.
    """
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

        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        return Access(region or DEFAULT_REGION, endpoint, Fixed(known), authorities)
    return _of_botocore(region, authorities, now)


def _has_files(environment: Mapping[str, str]) -> bool:
    named = environment.get("AWS_CONFIG_FILE"), environment.get("AWS_PROFILE")
    return any(named) or Path("~/.aws/config").expanduser().exists()


@lru_cache(maxsize=4)
def _models(path: str | None) -> Any:
    from botocore.loaders import create_loader

    return create_loader(path)


def with_models(session: Any) -> Any:
    """Return a session of botocore that knows what all others of this process have read about AWS's services.

    Reading it takes a quarter of a second of a core, and each new session would read it again.
    """
    session.register_component("data_loader", _models(session.get_config_variable("data_path")))
    return session


def _of_botocore(region: str | None, authorities: bytes | None, now: Callable[[], float]) -> Access:
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ProfileNotFound
    from botocore.session import get_session

    session = get_session()
    try:
        with_models(session)
        # Unlike AWS's other libraries, botocore reads only AWS_DEFAULT_REGION.
        region = region or session.get_config_variable("region") or DEFAULT_REGION
        # A client knows every place where an endpoint may be set. An unsigned one asks for no credentials yet.
        client = session.create_client("s3", region_name=region, config=Config(signature_version=UNSIGNED))
        endpoint = client.meta.endpoint_url
    except ProfileNotFound:
        files = " and ".join(str(session.get_config_variable(name)) for name in ("credentials_file", "config_file"))
        known = ", ".join(session.available_profiles) or "no profiles"
        asked = session.get_config_variable("profile")
        raise InputError(
            f"there is no AWS profile {asked}: {files} have {known}: set AWS_PROFILE to one of theirs, or "
            "AWS_SHARED_CREDENTIALS_FILE to the file that has it"
        ) from None
    except (BotoCoreError, ValueError) as error:
        raise InputError(f"AWS's configuration: {error}") from None
    asked_for = None if endpoint.endswith(".amazonaws.com") else endpoint
    settings = {name: session.get_config_variable(name) for name in ("profile", "credentials_file", "config_file")}
    return Access(region, asked_for, Found(settings | {"region": region}, now), authorities)


GOOGLE = "https://storage.googleapis.com"


def google_host(environment: Mapping[str, str] = os.environ) -> str:
    """Return the URL of the host for buckets of Google: GOOGLE_BASE_URL, or what the key file names, or Google's own.

    A key file that cannot be read names no host: opening the store reports it.
    """
    file = environment.get("GOOGLE_SERVICE_ACCOUNT_PATH") or environment.get("GOOGLE_SERVICE_ACCOUNT")
    named = None
    with suppress(OSError, ValueError, AttributeError):
        key = Path(file).read_text() if file else environment.get("GOOGLE_SERVICE_ACCOUNT_KEY", "{}")
        named = json.loads(key).get("gcs_base_url")
    return environment.get("GOOGLE_BASE_URL") or named or GOOGLE


def google_signer(environment: Mapping[str, str] = os.environ) -> str:
    """Return whose credentials sign requests to Google: a variable and the key file that it names."""
    for name in ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_APPLICATION_CREDENTIALS"):
        if file := environment.get(name):
            return f"the key file {file} ({name})"
    key = "GOOGLE_SERVICE_ACCOUNT_KEY"
    return f"the key in {key}" if environment.get(key) else "this machine's own service account (no key file is named)"


_AZURE_KEYS = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY")
_AZURE_TOKENS = ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY")


def azure_host(environment: Mapping[str, str] = os.environ) -> str:
    """Return the URL for containers of Azure: AZURE_STORAGE_ENDPOINT, or Azure's own for the storage account."""
    named = environment.get("AZURE_STORAGE_ENDPOINT") or environment.get("AZURE_ENDPOINT")
    return named or f"https://{environment.get('AZURE_STORAGE_ACCOUNT_NAME', '')}.blob.core.windows.net"


def azure_signer(environment: Mapping[str, str] = os.environ) -> str:
    """Return whose credentials sign requests to Azure: a variable, or the identity that it names."""
    kinds = (
        ("the bearer token", ("AZURE_STORAGE_TOKEN",)),
        ("the account key", _AZURE_KEYS),
        ("the workload identity", ("AZURE_FEDERATED_TOKEN_FILE",)),
        ("the client secret", ("AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET")),
        ("the SAS token", _AZURE_TOKENS),
        ("the login of Azure's command line", ("AZURE_USE_AZURE_CLI",)),
    )
    found = (f"{what} ({name})" for what, names in kinds for name in names if environment.get(name))
    return next(found, "this machine's managed identity (no variable names a key, a SAS token or a client)")


def signer_of(url: str) -> str:
    """Return whose credentials sign requests to this store, if the library finds them by itself; empty if it does not.

    They are those of Google and Azure.
    """
    signers = {"gs": google_signer, "az": azure_signer}
    scheme = Place.of(url).scheme
    return signers[scheme]() if scheme in signers else ""


# --- credentials ------------------------------------------------------------------------------------------------------


class Identity(Protocol):
    """The source of the credentials that sign requests."""

    failure: PortError | None
    """The error of the last attempt to fetch credentials; None if it succeeded."""
    origin: str
    """The access key, and where it comes from: a variable, a file, a role. Never the secret. Empty before `ask`."""

    def ask(self) -> Coroutine[Any, Any, Any]:
        """Return `access_key_id`, `secret_access_key`, `token` and `expires_at`, a datetime in UTC or None.

        `expires_at` is the latest time to ask again. Raises `Denied`, and `Unavailable` if the credentials cannot be
        renewed for now.
        """
        ...

    def doubt(self) -> bool:
        """Note that a store calls the credentials expired; return whether fetching them again may help.

        If so, the next `ask` fetches them.
        """
        ...


class Fixed(Identity):
    """Credentials from the environment, which cannot change while the process lives."""

    failure: PortError | None = None

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = known
        self.origin = f"the access key {known['access_key_id']} of AWS_ACCESS_KEY_ID"

    @override
    async def ask(self) -> Any:
        return self._known

    @override
    def doubt(self) -> bool:
        return False


ASK_S = 60.0
"""Clients ask again after this time at the latest, so that replaced credentials are noticed."""

LOOK_S = 1.0
"""Time between two checks of the files, and between two tries if credentials cannot be renewed."""

SPENT = 0.75
"""Share of the credentials' remaining lifetime after which botocore is asked for newer ones."""


class Found(Identity):
    """Credentials that botocore finds: in files, from a program, for a role, from a metadata service.

    They are fetched again before they expire, when a file that may contain them has changed, and after `doubt`.
    """

    def __init__(self, settings: Mapping[str, str | None], now: Callable[[], float]) -> None:
        """`settings`: botocore's variables when the store was opened: region, profile and files. `now`: a clock [s]."""
        self._settings = settings
        self.failure: PortError | None = None
        self.origin = ""
        self._now = now
        self._files = _files(settings)
        self._known: dict[str, Any] | None = None
        self._again_at = self._looked_at = -math.inf
        self._stamps: tuple[object, ...] = ()
        self._doubted: object = None
        self._anew = True
        self._session: Any = None
        self._renewal: asyncio.Task[None] | None = None

    @override
    async def ask(self) -> Any:
        if self._is_due():
            waits = self._anew or not self._is_valid()
            if self._renewal is None or self._renewal.done():
                self._renewal = asyncio.ensure_future(self._renew())
            if waits:
                await asyncio.shield(self._renewal)
        if not self._is_valid():
            assert self.failure is not None, "fetched, or failed to"
            raise self.failure
        assert self._known is not None, "valid"
        soon = datetime.now(UTC) + timedelta(seconds=ASK_S)
        return {**self._known, "expires_at": min(soon, self._known["expires_at"] or soon)}

    async def _renew(self) -> None:
        try:
            # A metadata service or a program may take long, so this runs on a thread.
            await asyncio.get_running_loop().run_in_executor(None, self._fetch)
            self.failure = None
        except PortError as error:
            self._again_at = self._now() + LOOK_S
            self.failure = error

    @override
    def doubt(self) -> bool:
        now = None if self._known is None else (self._known["access_key_id"], self._known["token"])
        if now == self._doubted and not self._anew and self.failure is None:
            return False  # fetched again after the last doubt, and still the same
        self._doubted, self._anew = now, True
        return True

    def _is_due(self) -> bool:
        now = self._now()
        if self._anew or now >= self._again_at:
            return True
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._anew = self._stamps != _stamps(self._files)
        return self._anew

    def _is_valid(self) -> bool:
        if self._known is None:
            return False
        ends: datetime | None = self._known["expires_at"]
        return ends is None or ends > datetime.now(UTC)

    def _fetch(self) -> None:
        """Fetch credentials, on a thread. Raises `Denied`, `Unavailable`."""
        from botocore.session import get_session

        stamps = _stamps(self._files)
        if self._anew or self._session is None:
            self._session, self._anew, self._stamps = get_session(), False, stamps
            for name, value in self._settings.items():
                if value is not None:
                    self._session.set_config_variable(name, value)
        try:
            found = self._session.get_credentials()
            frozen = None if found is None else found.get_frozen_credentials()
        except Exception as error:  # botocore asks a dozen providers, each with errors of its own
            self._session = None
            raise _meaning(error, self._tried()) from None
        if frozen is None:
            self._session = None
            # A metadata service that does not answer looks as if there were none.
            if self._known is None:
                raise Denied(f"{NO_CREDENTIALS} (looked in {self._tried()})")
            raise Unavailable(f"no credentials are found any more in {self._tried()}")
        self.origin = f"the access key {frozen.access_key} of {self._source(found.method)}"
        ends: datetime | None = getattr(found, "_expiry_time", None)
        ends = None if ends is None else ends.astimezone(UTC)
        self._known = {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": ends,
        }
        left_s = math.inf if ends is None else (ends - datetime.now(UTC)).total_seconds()
        self._again_at = self._now() + max(0.1, SPENT * left_s)

    def _source(self, method: str) -> str:
        """Return where credentials come from, which botocore found by this method."""
        variable = {"shared-credentials-file": "credentials_file", "config-file": "config_file"}.get(method)
        if variable is None:
            return "AWS_ACCESS_KEY_ID" if method == "env" else f"botocore's source {method}"
        return f"{self._settings[variable]}, profile {self._settings['profile'] or 'default'}"

    def _tried(self) -> str:
        """Return where credentials were looked for."""
        files = " and ".join(name for name in (self._settings[f] for f in ("credentials_file", "config_file")) if name)
        profile = self._settings["profile"] or "default"
        return f"the environment, profile {profile} of {files}, and this machine's role"


def _meaning(error: Exception, tried: str) -> PortError:
    """Return the error to raise after a failure to fetch credentials. `tried`: where they were looked for."""
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        CredentialRetrievalError,
        HTTPClientError,
        MetadataRetrievalError,
        PartialCredentialsError,
    )

    said = f"credentials cannot be fetched: {told(error)} (looked in {tried})"
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        passes = status >= 500 or status == 429 or error.response.get("Error", {}).get("Code") in _THROTTLED
        return Unavailable(said) if passes else Denied(said)
    if isinstance(error, PartialCredentialsError):
        return Denied(f"{NO_CREDENTIALS} ({error}; looked in {tried})")
    if isinstance(error, CredentialRetrievalError | HTTPClientError | MetadataRetrievalError | OSError):
        return Unavailable(said)
    if isinstance(error, BotoCoreError):
        return Denied(f"{NO_CREDENTIALS} ({error}; looked in {tried})")
    return Unavailable(said)


_THROTTLED = {"Throttling", "ThrottlingException", "TooManyRequestsException", "RequestLimitExceeded", "SlowDown"}


def _files(settings: Mapping[str, str | None]) -> tuple[Path, ...]:
    """Return the files that may contain credentials or their configuration."""
    token = os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE")
    named = (settings.get("credentials_file"), settings.get("config_file"), token)
    return tuple(Path(name).expanduser() for name in named if name)


def _stamps(files: tuple[Path, ...]) -> tuple[object, ...]:
    found: list[object] = []
    for file in files:
        try:
            state = file.stat()
            found.append((state.st_mtime_ns, state.st_size, state.st_ino))
        except OSError:
            found.append(None)
    return tuple(found)
