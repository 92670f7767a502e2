"""The documentation site: pages of docs/, and a reference that is written from what the code declares."""
