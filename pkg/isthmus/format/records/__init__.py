"""Objects and messages, and how they become bytes: `frame` is the format, `objects` and `messages` what is in it."""
