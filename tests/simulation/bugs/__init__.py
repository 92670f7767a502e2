"""Planted bugs: each breaks one promise of the library, as a plausible mistake would. The checker must find every bug.

A bug is a context manager that patches the library while it is entered.
"""

from simulation.bugs import arithmetic, lies, outages, overload, promises, reviewed, waiting
from simulation.bugs.planted import BUGS, Bug, Planted

__all__ = ["BUGS", "Bug", "Planted", "arithmetic", "lies", "outages", "overload", "promises", "reviewed", "waiting"]
