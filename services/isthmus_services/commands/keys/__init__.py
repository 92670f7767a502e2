"""`isthmus keys`: Ed25519 keys as OpenSSH keeps them, and who signed what with them."""
