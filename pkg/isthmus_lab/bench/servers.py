"""Helpers for benchmarks that use servers."""

import secrets


def bucket() -> str:
    """Return a random name for a new bucket."""
    return f"bench-{secrets.token_hex(5)}"
