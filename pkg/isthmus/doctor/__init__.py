"""Checks of everything a run depends on: the store, the bus, the network paths to them, and this machine.

Each finding says what was found and what to do. `isthmus doctor` runs all checks. Every syncer that starts runs one of
them, whether the store honours create-only PUT (`store.atomic`).
"""

from isthmus.doctor.bus import examine_bus
from isthmus.doctor.findings import FAILURE, NOTE, OK, WARNING, CheckOutcome, Finding, Role, RoleKind, counted
from isthmus.doctor.machine import examine_machine
from isthmus.doctor.store import examine_open_store, examine_store
from isthmus.doctor.trust import examine_trust
from isthmus.doctor.way import examine_ranks, examine_way

__all__ = [
    "FAILURE",
    "NOTE",
    "OK",
    "WARNING",
    "CheckOutcome",
    "Finding",
    "Role",
    "RoleKind",
    "counted",
    "examine_bus",
    "examine_machine",
    "examine_open_store",
    "examine_ranks",
    "examine_store",
    "examine_trust",
    "examine_way",
]
