"""Points of Ed25519 that no honest key or signature has: under them a signature can fit a message nobody signed.

Edwards25519 has eight points whose order divides 8. As a public key, one of them makes forgeries possible under
libraries that verify without the cofactor (the identity: any message; of order 8: one in eight); as R, a signature that
no nonce made. RFC 8032 does not forbid them, and OpenSSL accepts them. They are refused here in each spelling there is.
"""

P = 2**255 - 19
_SIGN = 1 << 255
# y of a point of order 8; the other y of that order is P - this.
_ORDER_8 = 2707385501144840649318225287225658788936804267575313519463743609750303402022

_YS = (0, 1, P - 1, _ORDER_8, P - _ORDER_8, P, P + 1)
"""y of every such point, and the two of them that fit into 255 bits unreduced as well."""

SMALL_ORDER = frozenset((y | sign).to_bytes(32, "little") for y in _YS for sign in (0, _SIGN))
"""The fourteen spellings [32 bytes each]: x = 0 with a sign bit is no point by RFC 8032, and taken for one by some."""


def is_small_order(point: bytes) -> bool:
    """Return whether 32 bytes are a spelling of a point of small order."""
    return point in SMALL_ORDER
