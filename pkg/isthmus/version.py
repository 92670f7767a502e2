"""The version of the package, and of the process that says it: written here and nowhere else (docs/releasing.md)."""

__version__ = "0.1.0.dev0"
