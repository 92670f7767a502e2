"""Isthmus: one model trained on many islands of compute that share an object store and a stream of announcements.

The entry points are `join`, for processes that train, and `follow`, for processes that use the trained model.
Everything else has a module of its own. Importing the package imports neither torch nor a client library: names are
resolved on first use.
"""

from typing import TYPE_CHECKING, Any

from isthmus.version import __version__

if TYPE_CHECKING:
    from isthmus.format.rules import Pace, Rules
    from isthmus.link import Link, join
    from isthmus.link.following import Following, follow
    from isthmus.torch.random_state import RandomState

__all__ = ["Following", "Link", "Pace", "RandomState", "Rules", "__version__", "follow", "join"]

_HOME = {
    "join": "isthmus.link",
    "Link": "isthmus.link",
    "follow": "isthmus.link.following",
    "Following": "isthmus.link.following",
    "RandomState": "isthmus.torch.random_state",
    "Rules": "isthmus.format.rules",
    "Pace": "isthmus.format.rules",
}


def __getattr__(name: str) -> Any:
    """Import the module a public name lives in, on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
