"""Every error that Isthmus raises on purpose. Each class says what the code that catches it should do next.

IsthmusError
├── InputError               fix the input: a flag, a name, a model that does not fit (exit code 2)
│   ├── RunMissing           create the run first (`isthmus init`)
│   ├── RunExists            choose another run, or use the one that is there
│   ├── LayoutMismatch       bring the model the run was made for
│   └── DenormalsFlushed     let this thread keep denormal numbers: `torch.set_flush_denormal(False)` in it
├── PortError                the store or the bus failed
│   ├── Unavailable          try again later; whether the last request took effect is unknown
│   ├── Denied               an operator has to act: credentials, permissions
│   │   └── BucketMissing    create the bucket, by hand or with `isthmus init --create-bucket`
│   └── ObjectMissing        nothing is stored under this key
├── RecordInvalid            bytes that are no valid record; carries the `Reason` under which this is counted
├── RankLost                 end this rank: the job's launcher starts all ranks again
├── Expelled                 the membership no longer names this process: stop, and ask the run's owners
├── Fenced                   another process has taken over this name: stop; it continues from what was stored
└── LogCorrupt               the log, or an object that it names, is damaged; names the key; nothing is overwritten
"""

import re
from collections.abc import Mapping
from typing import Any, cast

from isthmus.reasons import Reason


def legible(text: str) -> str:
    """Return untrusted text with unprintable characters escaped.

    So nothing in it moves a cursor, ends a line, or changes the direction of reading.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class IsthmusError(Exception):
    """The root of all errors that Isthmus raises on purpose."""


class InputError(IsthmusError):
    """The caller's input is wrong; the message says what is wrong, where, and what to do."""


OWN_MODEL = "for a model of your own, add --model PACKAGE.MODULE:FUNCTION, or call join(..., create=Rules.suited)"
"""How to create a run of another model than the built-in one."""


RUN_BACK = "run the same `isthmus create` again if that made the run, or restore it from a backup"
"""What brings back a run object that is gone."""


class RunMissing(InputError):
    """There is no run at this place."""

    def __init__(self, url: str, near: str = "", *, beside: str = "", pinned: str = "", like: str = "") -> None:
        """`near`: the URL of a run below this place, which may be meant, and around which none is created. `beside`: a
        prefix with objects of a run whose run object is gone. `pinned`: the digest that the run must have. `like`: a
        run with a similar name. Each is empty if there is none."""
        if beside:
            said = (
                f"the run object {url}/run is gone, and {beside} lie beside it (processes that run go on, and none "
                "can start): end no syncer, as one that runs writes it again within a minute (in a signed run few may, "
                f"and its log says so); else {RUN_BACK}, or choose another location; do not create a run here"
            )
        elif near:
            said = f"{url}: no run here; did you mean {near}?"
        elif pinned:
            said = (
                f"no run at {url}, and the one whose digest begins with {pinned} is expected there: check the URL; if "
                f"it is right, restore {url}/run from a backup"
            )
        else:
            meant = f" (did you mean {like}?)" if like else ""
            said = (
                f"no run at {url}{meant}: check the URL. If there was one, bring it back (is a mount or a disk lost? "
                "its processes' logs say): one that is created in its place is another run. If there never was one, "
                f"`isthmus init {url}` creates a run of the built-in model; {OWN_MODEL}"
            )
        super().__init__(said)
        self.url = url
        self.near = near
        self.beside = beside


class RunExists(InputError):
    """There is another run at this place; `difference` says how it differs."""

    def __init__(self, url: str, difference: str, remedy: str = "") -> None:
        remedy = remedy or "choose another place"
        super().__init__(f"{url} already holds a run that differs ({difference}): {remedy}")
        self.url = url
        self.difference = difference


class LayoutMismatch(InputError):
    """The given model is not the one that the run was made for; `difference` names the first difference."""

    def __init__(self, difference: str, remedy: str = "") -> None:
        super().__init__(f"this model does not fit the run: {difference}{remedy and f'; {remedy}'}")
        self.difference = difference


class DenormalsFlushed(InputError):
    """This thread's processor mode turns denormal numbers into zeros, so its results differ from the log's."""

    def __init__(self) -> None:
        super().__init__(
            "this thread flushes denormal numbers to zero, so it would compute other bits than the log records (a "
            "momentum that fades out ends in denormals): a library or torch.set_flush_denormal(True) switched that on "
            "in it, or in the thread that started it; call torch.set_flush_denormal(False) in that thread first"
        )


class PortError(IsthmusError):
    """The store or the bus did not carry out a request."""


class Unavailable(PortError):
    """The request failed for now: a timeout, a refused connection, a 5xx. It may or may not have taken effect."""


class TakesNoWrites(Unavailable):
    """The store answers, and takes no writes for now."""


class StoreReadOnly(TakesNoWrites):
    """The store's folder is on a file system that is mounted read-only; writing works again once it is mounted anew."""


class StoreFull(TakesNoWrites):
    """The store has no space left; writing works again once it has."""

    def __init__(self, where: str, url: str, why: str, more: str = "space") -> None:
        super().__init__(
            f"{where} is full ({why}): give it more {more}, or free what the run does not need any more: isthmus gc "
            f"{url} lists what can be deleted, and --apply deletes it (in a signed run with --key COLLECTOR_KEY_FILE)"
        )


class Denied(PortError):
    """The request cannot succeed as it is: credentials, permissions, no bucket, or a server that lacks a feature."""


def azure_container_command(name: str) -> str:
    """Return the command that creates a container of Azure."""
    return f'az storage container create --account-name "$AZURE_STORAGE_ACCOUNT_NAME" --name {name} --auth-mode login'


NAME_OF_A_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
"""The names that AWS gives to buckets; some other servers allow more."""


class BucketMissing(Denied):
    """The bucket does not exist."""

    def __init__(self, url: str, where: str) -> None:
        bucket = url.partition("://")[2].partition("/")[0]
        self.command = f"isthmus init {url} --create-bucket"
        """The command that creates the bucket. Few of a run's participants may: it takes an administrator's
        credentials."""
        what, self.more, self.check = "bucket (NoSuchBucket)", "", "check its name"
        if url.startswith("gs:"):
            self.command = f"gcloud storage buckets create gs://{bucket}"
        elif url.startswith("az:"):
            what, self.command = "container (ContainerNotFound)", azure_container_command(bucket)
            self.check += " and the storage account"
        else:
            self.more = f"with a run of the built-in model; {OWN_MODEL}"
            if not NAME_OF_A_BUCKET.fullmatch(bucket):
                self.check += " (in AWS it has 3 to 63 of a-z, 0-9, dots and hyphens)"
            self.check += " and the endpoint (AWS_ENDPOINT_URL)"
        self.brief = f"{where}: there is no such {what}"
        """What is missing, without what to do."""
        super().__init__(f"{self.brief}: {self.check}; `{self.command}` creates it{self.more and f', {self.more}'}")
        self.url = url


class ObjectMissing(PortError):
    """Nothing is stored under this key."""

    def __init__(self, key: str) -> None:
        super().__init__(f"nothing is stored under {legible(key)}")
        self.key = key


class RecordInvalid(IsthmusError):
    """Bytes that are not a valid record; `reason` is the name under which the rejection is counted."""

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason = reason
        self.detail = legible(detail)
        super().__init__(f"{reason.value}: {self.detail}")


class Expelled(IsthmusError):
    """The membership no longer names this process, so it stops."""

    def __init__(self, name: str, key: str, membership: int) -> None:
        super().__init__(
            f"membership {membership} of this run does not name {name} with the key {key}: this process stops, and "
            "what it has not committed is left to the run's other syncers; if that is a mistake, an owner adds it "
            "again (isthmus members add)"
        )


class Fenced(IsthmusError):
    """A process with the same name started later, so this one stops."""

    def __init__(self, name: str, incarnation: int) -> None:
        super().__init__(
            f"{name} was started again elsewhere (its incarnation {incarnation}): this process stops; if both are to "
            "train, give one of them another name (--learner, join(learner=…))"
        )
        self.name = name
        self.incarnation = incarnation


class RankLost(IsthmusError):
    """A process of this learner's job is gone or no longer answers."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"a rank of this learner is gone ({why}): end the job and start it again, as torchrun --max-restarts does; "
            "the learner continues from its newest checkpoint"
        )


class LogCorrupt(IsthmusError):
    """An object of the log is missing, or is not what the log says."""

    def __init__(
        self, key: str, detail: str, readable: tuple[int, int] | None = None, *, refused: bool = False
    ) -> None:
        key, detail = legible(key), legible(detail)
        until = "" if readable is None else f" (fragment {readable[0]} can be read up to version {readable[1]})"
        super().__init__(f"{key}: {detail}{until}")
        self.key = key
        self.detail = detail
        self.readable = readable
        """A fragment and the last version up to which it can be read; None if not known."""
        self.refused = refused
        """Whether reading the object was denied. Then nothing is known to be damaged."""

    def after(self, fragment: int, version: int) -> "LogCorrupt":
        """Return this error with the last version up to which the fragment can be read, unless it already has one."""
        if self.readable:
            return self
        return LogCorrupt(self.key, self.detail, (fragment, version), refused=self.refused)


_BOUNDS = {">=": "at least", ">": "more than", "<=": "at most", "<": "less than"}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "array": "a list"}


def plainly(error: str) -> str:
    """Return what a value must be, in plain words, from msgspec's message about it."""
    error = error.partition(" - at `")[0].removeprefix("Expected ").replace("`", "")
    if found := re.fullmatch(r"(?:int|float) ([<>]=?) (\S+)", error):
        return f"{_BOUNDS[found[1]]} {re.sub(r'[.]0$', '', found[2])}"
    kind = error.partition(", got ")[0]
    return _KINDS.get(kind, error)


def first_cause(error: BaseException) -> BaseException:
    """Return the first error of a task group, however deep the groups are nested; any other error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = cast(BaseException, error.exceptions[0])
    return error


def known_error(name: str, text: str, about: Mapping[str, Any]) -> IsthmusError:
    """Return an error that another process of the run raised, with a new text. `about`: its attributes there."""
    found = globals().get(name)
    kind: Any = found if isinstance(found, type) and issubclass(found, IsthmusError) else IsthmusError
    # The constructors of some classes build the message from their arguments; here the text is already known.
    error: IsthmusError = kind.__new__(kind)
    Exception.__init__(error, text)
    vars(error).update(about)
    if isinstance(error, RecordInvalid) and "reason" in about:
        error.reason = Reason(error.reason)
    return error


def told(error: BaseException) -> str:
    """Return an error's message, or its class name if it has none (as with `TimeoutError`)."""
    return str(error) or type(error).__name__
