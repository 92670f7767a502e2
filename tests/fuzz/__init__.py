"""Every parser of outside bytes, given what nobody meant to send: seeded mutations in the tests, coverage-guided at length."""
