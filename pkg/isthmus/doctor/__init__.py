"""Checks of everything a run depends on: store, bus, the network paths to them, this machine, keys and members.

Each finding says what was found and what to do. `isthmus doctor` runs all checks. Every syncer that starts runs one of
them, whether the store honours create-only PUT (`store.atomic`).
"""

from isthmus.doctor.bus import examine_bus
from isthmus.doctor.findings import FAILURE, NOTE, OK, WARNING, CheckOutcome, Finding, Role, RoleKind
from isthmus.doctor.machine import examine_machine
from isthmus.doctor.store import examine_open_store, examine_store, is_signed
from isthmus.doctor.trust import brought, examine_part, examine_trust
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
    "brought",
    "examine_bus",
    "examine_machine",
    "examine_open_store",
    "examine_part",
    "examine_ranks",
    "examine_store",
    "examine_trust",
    "examine_way",
    "is_signed",
]
