"""Points of Ed25519 that no honest key or signature has, under which a signature can fit a message that was not signed.

Edwards25519 has eight points whose order divides 8. If one of them is a public key, forgeries are possible under
libraries that verify without the cofactor: for any message under the identity, for one in eight under a point of order
8. As the point R of a signature, such a point does not come from a nonce. RFC 8032 does not forbid these points, and
OpenSSL accepts them. They are rejected here in every encoding.
"""

P = 2**255 - 19
_SIGN = 1 << 255
# The y of a point of order 8. The other y of that order is P minus this.
_ORDER_8 = 2707385501144840649318225287225658788936804267575313519463743609750303402022

_YS = (0, 1, P - 1, _ORDER_8, P - _ORDER_8, P, P + 1)
"""The y of every such point, and the two of them that also fit into 255 bits unreduced."""

SMALL_ORDER = frozenset((y | sign).to_bytes(32, "little") for y in _YS for sign in (0, _SIGN))
"""The fourteen encodings [32 bytes each]. x = 0 with a sign bit is no point by RFC 8032, but some libraries take it."""


def is_small_order(point: bytes) -> bool:
    """Return whether 32 bytes encode a point of small order."""
    return point in SMALL_ORDER
