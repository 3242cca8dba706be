"""What quantization does with tensors that no override names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mixture:
    """With `pure` all matrices get the file type's own type. `output` and `embedding` (enum ggml_type) are
    those of the head and of the embedding, which then no override changes."""

    pure: bool = False
    output: int | None = None
    embedding: int | None = None


STOCK = Mixture()
"""llama.cpp's own choice by role and layer."""
