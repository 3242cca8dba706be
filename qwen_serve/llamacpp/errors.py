"""Errors of llama.cpp."""


class LlamaError(Exception):
    """A call into llama.cpp failed; the message carries what llama.cpp logged about it."""


class NoMemorySlot(LlamaError):
    """The cache has no room for the batch. Nothing was computed, and the cache is unchanged."""


class ModelLoadError(LlamaError):
    """The file is missing, damaged or of a kind that llama.cpp refuses."""
