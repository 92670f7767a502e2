"""Whether this process can open anything at all."""

import errno
import os
import resource

NONE_LEFT = "this process has no file descriptors left"
_TOO_MANY = "too many open files"
"""What libraries say of it, in any case of letters."""


def raise_limit() -> str:
    """Return what to do for a process without file descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"raise its limit of {limit} (ulimit -n, LimitNOFILE= of a systemd service), and start it again"


def any_left() -> bool:
    """Return whether another file or connection can be opened."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True


def explained(said: str) -> str:
    """Return what an error says, or that there are no descriptors left and what to do, if it says so."""
    return f"{NONE_LEFT}: {raise_limit()}" if _TOO_MANY in said.lower() else said
