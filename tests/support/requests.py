"""A request of each kind to a store, by the words in which a refusal names it."""

from collections.abc import Awaitable, Callable

from isthmus.store import EdgeStore
from isthmus.store.s3 import S3Store

DOING: dict[str, Callable[[EdgeStore | S3Store], Awaitable[object]]] = {
    "reading k": lambda store: store.get("k"),
    "writing a": lambda store: store.create("a", b"x"),
    "writing b": lambda store: store.put("b", b"x"),
    "listing a/b/": lambda store: store.list("a/b/"),
    "deleting k": lambda store: store.delete("k"),
}
