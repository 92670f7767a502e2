"""A layer: a store that passes requests on to another store and does one more job. Layers can be stacked."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from typing_extensions import override

from isthmus.format.records.frame import Blob, Body, Data
from isthmus.store.base import Entry, Store

T = TypeVar("T")

Send = Callable[[], Awaitable[T]]
"""Sends a request to the store below, and may be called again."""


class Layer(Store):
    """Passes every request on unchanged, through `_through`, which a layer overrides to do its job."""

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self._store = store

    @override
    async def get(self, key: str) -> Body:
        return await self._through("get", key, lambda: self._store.get(key))

    @override
    async def get_range(self, key: str, start: int, stop: int) -> Body:
        return await self._through("get", key, lambda: self._store.get_range(key, start, stop))

    @override
    async def put(self, key: str, data: Data) -> None:
        await self._through("put", key, lambda: self._store.put(key, data))

    @override
    async def create(self, key: str, data: Blob) -> bool:
        return await self._through("create", key, lambda: self._store.create(key, data))

    @override
    async def list(self, prefix: str) -> Sequence[Entry]:
        return await self._through("list", prefix, lambda: self._store.list(prefix))

    @override
    async def delete(self, key: str) -> None:
        await self._through("delete", key, lambda: self._store.delete(key))

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        """Send a request (`get`, `put`, `create`, `list` or `delete`) for a key or prefix; return its result."""
        return await send()
