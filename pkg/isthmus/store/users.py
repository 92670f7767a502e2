"""Users of a store that has AWS's API for them (IAM): AWS itself, and SeaweedFS at the endpoint of its buckets."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from isthmus.errors import Denied, Unavailable, told
from isthmus.runtime.clock import Runtime
from isthmus.runtime.urls import Place
from isthmus.store.credentials import Identity
from isthmus.store.s3 import open_client

_THERE = "EntityAlreadyExists"
_GONE = "NoSuchEntity"
_PASSING = {"Throttling", "ThrottlingException", "RequestLimitExceeded", "ServiceUnavailable"}


@dataclass(frozen=True, slots=True)
class AccessKey:
    """The credentials of a user."""

    id: str
    secret: str


class StoreUsers:
    """Creates users, each with one policy and one access key. What is right already stays as it is."""

    def __init__(self, client: Any, bucket: str, identity: Identity, *, conditional: bool) -> None:
        """`identity`: the source of the credentials that sign requests."""
        self._client = client
        self._identity = identity
        self._where = f"users of bucket {bucket} at {client.meta.endpoint_url}"
        self.conditional = conditional
        """Whether this is AWS, whose policies can say that an object may only be created."""

    async def ensure(self, name: str, policy: Mapping[str, Any], known: str) -> AccessKey | None:
        """Create a user with this policy, and return a new access key; None if the user has the `known` key (its id).

        A policy that differs is replaced. If the user does not have the known key, its other keys are deleted: their
        secrets were lost when an earlier call was interrupted, and AWS allows only two. Raises `Denied` if the store
        has no such API or refuses its use, and `Unavailable`.
        """
        with self._failures():
            with _passing_over(_THERE):
                await self._client.create_user(UserName=name)
            user = (await self._client.get_user(UserName=name))["User"]["Arn"]
            await self._attach(name, user.replace(":user/", ":policy/", 1), policy)
            found = (await self._client.list_access_keys(UserName=name))["AccessKeyMetadata"]
            keys = [key["AccessKeyId"] for key in found]
            if known in keys:
                return None
            for key in keys:
                await self._client.delete_access_key(UserName=name, AccessKeyId=key)
            made = (await self._client.create_access_key(UserName=name))["AccessKey"]
            return AccessKey(made["AccessKeyId"], made["SecretAccessKey"])
        raise AssertionError("unreachable: the failure was raised")

    async def remove(self, name: str) -> bool:
        """Delete a user with its policy and its access keys; return whether there was such a user.

        Raises what `ensure` does.
        """
        with self._failures():
            try:
                user = (await self._client.get_user(UserName=name))["User"]["Arn"]
            except ClientError as error:
                if _code(error) == _GONE:
                    return False
                raise
            arn = user.replace(":user/", ":policy/", 1)
            for key in (await self._client.list_access_keys(UserName=name))["AccessKeyMetadata"]:
                await self._client.delete_access_key(UserName=name, AccessKeyId=key["AccessKeyId"])
            with _passing_over(_GONE):
                await self._client.detach_user_policy(UserName=name, PolicyArn=arn)
            with _passing_over(_GONE):
                for version in (await self._client.list_policy_versions(PolicyArn=arn))["Versions"]:
                    if not version["IsDefaultVersion"]:
                        await self._client.delete_policy_version(PolicyArn=arn, VersionId=version["VersionId"])
                await self._client.delete_policy(PolicyArn=arn)
            await self._client.delete_user(UserName=name)
        return True

    async def named(self, prefix: str) -> list[str]:
        """Return the names of the users that begin with a prefix, in order. Raises what `ensure` does."""
        found: list[str] = []
        more: dict[str, str] = {}
        with self._failures():
            while True:
                page = await self._client.list_users(**more)
                found += [user["UserName"] for user in page["Users"] if user["UserName"].startswith(prefix)]
                if not page.get("IsTruncated"):
                    break
                more = {"Marker": page["Marker"]}
        return sorted(found)

    async def _attach(self, name: str, arn: str, policy: Mapping[str, Any]) -> None:
        """Give a user its managed policy. An inline policy of a user may have 2,048 characters, which are too few."""
        text = json.dumps(policy, separators=(",", ":"))
        with _passing_over(_THERE):
            await self._client.create_policy(PolicyName=name, PolicyDocument=text)
        version = (await self._client.get_policy(PolicyArn=arn))["Policy"]["DefaultVersionId"]
        there = await self._client.get_policy_version(PolicyArn=arn, VersionId=version)
        if _plain(there["PolicyVersion"]["Document"]) != _plain(policy):
            await self._client.create_policy_version(PolicyArn=arn, PolicyDocument=text, SetAsDefault=True)
        await self._client.attach_user_policy(UserName=name, PolicyArn=arn)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn a failed request into the error to raise."""
        try:
            yield
        except (ResponseParserError, KeyError) as error:  # a page, or the answer of another API
            raise Denied(f"{self._where}: the store has no IAM API there ({type(error).__name__})") from None
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            passes = status == 429 or (status >= 500 and status != 501) or _code(error) in _PASSING
            if passes:
                raise Unavailable(f"{self._where}: {error}") from None
            raise Denied(f"{self._where}: {error}, signed with {self._identity.origin}") from None
        except (BotoCoreError, aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unavailable(f"{self._where}: {told(error)}") from None


@contextmanager
def _passing_over(code: str) -> Iterator[None]:
    """Ignore an error answer with this code."""
    try:
        yield
    except ClientError as error:
        if _code(error) != code:
            raise


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", error.response).get("Code", ""))


def _plain(document: Any) -> Any:
    """Return a policy in one form: SeaweedFS returns a list of one word as that word."""
    if isinstance(document, Mapping):
        return {name: _plain(value) for name, value in document.items()}
    if isinstance(document, list):
        return _plain(document[0]) if len(document) == 1 else [_plain(value) for value in document]
    return document


@asynccontextmanager
async def open_users(url: str, runtime: Runtime) -> AsyncIterator[StoreUsers]:
    """Open the users of the store with the bucket of this URL (s3://). Raises `InputError`."""
    place = Place.of(url)
    async with open_client(place, runtime, "iam") as (client, found):
        yield StoreUsers(client, place.authority, found.identity, conditional=found.endpoint is None)
