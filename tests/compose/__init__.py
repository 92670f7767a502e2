"""compose.yaml under a real container engine: `make compose-test`."""
