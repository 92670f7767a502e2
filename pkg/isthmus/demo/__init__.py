"""A small model and its data for a first run: a byte-level GPT, and text that every machine has."""
