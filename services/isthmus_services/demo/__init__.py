"""`isthmus demo`: real processes on one machine train one model; they are killed on request and judged at the end."""

from isthmus_services.demo.run import run

__all__ = ["run"]
