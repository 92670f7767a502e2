"""The syncer: `agent` hears and speaks, `coordinator` keeps one fragment."""

from isthmus.syncer.agent import Syncer

__all__ = ["Syncer"]
