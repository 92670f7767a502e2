"""What benchmarks need of servers."""

import secrets


def bucket() -> str:
    """Return a name of a bucket that nobody has."""
    return f"bench-{secrets.token_hex(5)}"
