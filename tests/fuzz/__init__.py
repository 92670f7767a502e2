"""Fuzzing of every parser of outside bytes: by seeded mutations in the tests, guided by coverage in `make fuzz`."""
