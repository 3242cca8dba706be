"""Tensors of the synthetic model in quantized types."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from qwen_serve.bench.models.header import quantized_tensors
from qwen_serve.bench.models.weights import MadeTensor
from qwen_serve.llamacpp.weights import Bytes, quantize_rows

if TYPE_CHECKING:
    from qwen_serve.bench.models.neurons import Array
    from qwen_serve.convert.config import ModelConfig
    from qwen_serve.convert.recipes import Recipe
    from qwen_serve.convert.tensors import TensorPlan

PLACES = 256  # noise begins at multiples of this many elements: no type has larger blocks


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor in the type named `dtype`, as blocks of bytes. With `noise`, all numbers of its pool in this
    type, it holds these blocks from one place on, and nothing is quantized for it."""

    made: MadeTensor
    dtype: str
    noise: Bytes | None
    path: Path = Path("synthetic")

    @property
    def name(self) -> str:
        return self.made.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.made.shape

    def read(self, start: int, count: int) -> Array:
        """The blocks of elements `start` to `start + count`, both multiples of a block."""
        kind = GGMLQuantizationType[self.dtype]
        if self.noise is None or self.made.noise is None:
            values = self.made.read(start, count).astype(np.float32)
            return quantize_rows(values.reshape(1, 1, -1), kind, None).reshape(-1)
        elements, n_bytes = (int(n) for n in GGML_QUANT_SIZES[kind])
        first = (self.made.noise.place // PLACES * PLACES + start) // elements * n_bytes % self.noise.size
        missing = count // elements * n_bytes
        part = self.noise[first : first + missing]
        return part if part.size == missing else np.concatenate([part, self.noise[: missing - part.size]])


def quantized(plan: TensorPlan, config: ModelConfig, recipe: Recipe, threads: int) -> TensorPlan:
    """The same tensors in the types of `recipe`, as llama.cpp chooses them.

    Raises:
        BenchError: the recipe prunes, or llama.cpp has no such types for this model.
    """
    pools: dict[tuple[int, str], Bytes] = {}
    tensors = []
    types = {
        tensor.name: GGMLQuantizationType(tensor.type).name for tensor in quantized_tensors(config, recipe)
    }
    for tensor in plan.tensors:
        made, kind = tensor.stored, types[tensor.name]
        assert isinstance(made, MadeTensor)
        if kind != "F32":
            pool = None
            if made.noise is not None:
                key = (id(made.noise.values), kind)
                if key not in pools:
                    values = made.noise.values.astype(np.float32).reshape(1, -1, PLACES)
                    pools[key] = quantize_rows(values, GGMLQuantizationType[kind], None, threads).reshape(-1)
                pool = pools[key]
            tensor = replace(tensor, stored=QuantizedTensor(made, kind, pool), type=kind)
        tensors.append(tensor)
    return replace(plan, tensors=tuple(tensors))
