"""What `isthmus doctor` says of a bus in the run's store, and of a store that it recognises."""

from advice.azure import Azure
from advice.doctors import Doctor
from advice.gate import Gate, error
from advice.rows import row
from advice.test_doctor_azure import RUN, container

__all__ = ["container"]

ON_BUS = (RUN[0], "--role", "syncer", "--bus", "store:")


@row(
    "doctor", "bus: access: az://… at …: access denied (AuthorizationFailure) for …: …",
    means="The bus is in the store, and this identity may not list or read the messages there, below `bus/`.",
    do="do what the checks of the store say: the bus is in it",
    then="`ok bus: access: in the run's own store`",
)  # fmt: skip
def test_a_bus_in_a_store_that_refuses_messages(doctor: Doctor, container: tuple[Azure, Gate]) -> None:
    _, gate = container
    gate.answers = lambda method, path, size: (
        error("AuthorizationFailure") if "bus" in path.partition("run")[2] else None
    )
    doctor.finds(*ON_BUS)
    gate.open()
    text = doctor.finds_no_more(*ON_BUS)
    assert "ok      bus: access: in the run's own store; a look for messages takes" in text


@row(
    "doctor", "store: kind: Azure Blob Storage: …",
    means="The address tells which store it is. The line says what is special about it.",
    do="nothing is to be done; give each participant an identity of its own, with a role on this container",
    then="the same note: it is about the store, and stays",
)  # fmt: skip
def test_a_store_that_is_recognised(doctor: Doctor, container: tuple[Azure, Gate]) -> None:
    doctor.finds(*RUN)
