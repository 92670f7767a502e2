"""What runs: the `isthmus` command and its services. Thin mains: settings → ports → library object → signals."""
