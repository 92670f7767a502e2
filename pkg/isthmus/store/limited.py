"""A store whose requests have a time limit."""

import asyncio
from typing import TypeVar

from isthmus.errors import Unavailable
from isthmus.store.base import Store
from isthmus.store.layer import Layer, Send

T = TypeVar("T")


class LimitedStore(Layer):
    """Raises `Unavailable` for a request that takes longer than `request_s` seconds."""

    def __init__(self, store: Store, request_s: float) -> None:
        super().__init__(store)
        self._request_s = request_s

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        try:
            async with asyncio.timeout(self._request_s):
                return await send()
        except TimeoutError:
            raise Unavailable(f"{self.url}: no answer within {self._request_s:g} s") from None
