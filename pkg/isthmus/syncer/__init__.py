"""The syncer: `agent` hears and speaks, `keeper` keeps one fragment."""

from isthmus.syncer.agent import Syncer

__all__ = ["Syncer"]
