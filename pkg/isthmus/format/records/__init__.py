"""Objects and messages as bytes: `frame` is the format, `objects` and `messages` define the headers."""
