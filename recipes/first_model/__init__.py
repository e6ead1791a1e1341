"""A small language model from PyPI, converted from GGUF, and trained on sums."""
