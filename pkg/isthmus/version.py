"""The version of the package, and of the process that says it."""

__version__ = "0.1.0"
