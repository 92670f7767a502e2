"""The formats of a run: objects, messages and keys, the layout of a model, rules, signatures and permissions."""
