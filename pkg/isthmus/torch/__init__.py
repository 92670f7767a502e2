"""The part of Isthmus that knows PyTorch: a module, its optimizer, and the state that a restart continues from."""
