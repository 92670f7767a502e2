"""The commands of `isthmus simulate`."""
