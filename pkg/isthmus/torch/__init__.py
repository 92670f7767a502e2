"""PyTorch as Isthmus sees it: a module, its optimizer, and what it goes on with."""
