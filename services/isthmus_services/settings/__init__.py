"""Where settings come from: their declaration by command, what commands share, and how a value is found."""
