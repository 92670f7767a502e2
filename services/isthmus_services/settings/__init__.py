"""Settings: their declaration by command, those that commands share, and how a value is found."""
