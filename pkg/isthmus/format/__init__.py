"""What is written: objects, messages and keys, the layout of a model, rules, signatures and permissions."""
