"""What can go wrong in llama.cpp."""

from __future__ import annotations


class LlamaError(Exception):
    """A call into llama.cpp failed; the message carries what llama.cpp logged about it."""


class NoMemorySlot(LlamaError):
    """The batch found no room in the cache. Nothing was computed, the cache is as it was."""


class ModelLoadError(LlamaError):
    """The file is missing, damaged or of a kind that llama.cpp refuses."""
