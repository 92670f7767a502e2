"""What a first run trains: a small byte-level GPT, on text that every machine has."""
