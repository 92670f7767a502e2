"""The syncer: `agent` reads and writes messages on the bus, `coordinator` keeps one fragment."""

from isthmus.syncer.agent import Syncer

__all__ = ["Syncer"]
