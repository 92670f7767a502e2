"""`isthmus keys`: make and show Ed25519 keys as OpenSSH keeps them, and verify who signed an object."""
