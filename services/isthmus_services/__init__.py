"""What runs: the `isthmus` command and its services. Each is a thin main: settings → ports → library object → signals."""
