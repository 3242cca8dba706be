"""The types of tensors that no override names."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mixture:
    """With `pure` all matrices get the file type's own type. `output` and `embedding` (enum ggml_type) set
    the head's and the embedding's type, which overrides then cannot change."""

    pure: bool = False
    output: int | None = None
    embedding: int | None = None


STOCK = Mixture()
"""llama.cpp's own choice by role and layer."""
