"""Keeps a checkpoint's own integers where a GGUF type can hold them, so that nothing is rounded twice.

A quantized checkpoint's weight is scale * (code - zero) with a scale for each group of columns. ggml's blocks
of 32 columns hold that exactly if a block has one scale and zero point, the scale is a number of F16, and:

- Q4_0 (scale * (q - 8), q from 0 to 15): code - zero is from -8 to 7, as without zero points;
- Q8_0 (scale * q, q from -128 to 127), for 8 bits.

Groups of 64 or 128 columns, and one for a row, repeat their scale in each block. A scale in BF16 is one of
F16 from 7.6e-6 up to 65504. Scales in F32 need more bits than F16 has: then the integers are kept, too, and
the scales rounded to F16. That moves a weight by less than 1/130 of a step, where rounding to another grid
moves it by a quarter, and the converter says so.

Two types would hold more, and are not used. Q4_1 (scale * q + offset) holds 4 bits with zero points, in half
a bit more than Q4_K; such a file was larger and diverged more than one that is rounded again
(docs/conversion.md). Q4_K has a scale in F16 for 256 columns and multiples of it in 6 bits, which hold groups
of 256 and more columns alone, in no fewer bits.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.dequantize import Dequantized, Grid
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.recipes import Recipe
from qwen_serve.convert.safetensors import Joined, TensorSource
from qwen_serve.convert.tensors import PlannedTensor, TensorPlan
from qwen_serve.convert.whole_model import UnquantizedFile
from qwen_serve.llamacpp.gguf import read_header
from qwen_serve.llamacpp.quantize import quantized_types

GRID_VERSION: Final = 2
"""Raise it when the same grid would be written differently."""
BLOCK = 32
MIDDLE_4 = 8
"""What Q4_0 subtracts."""
RELATIVE = 2.0**-11
"""Largest relative error of rounding to a normal number of F16."""
Q4_0, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0


class NotHeld(Exception):
    """No type holds the integers; the message says why."""


@dataclass(frozen=True)
class Kept:
    """The matrices of a plan that keep their integers, and the types that hold them."""

    plan: TensorPlan
    config: ModelConfig
    types: Mapping[str, GGMLQuantizationType]

    @classmethod
    def choose(
        cls, model: Checkpoint, plan: TensorPlan, base: Path, recipe: Recipe, *, weighted: bool
    ) -> Kept | None:
        """Reads every grid of `plan`, and says on stderr what is kept. `base` is the model in floats.

        None if nothing is. `weighted`: quantized with an importance matrix.
        """
        if not has_grids(model):
            return None
        planned = quantized_types(
            base,
            file_type=recipe.file_type,
            overrides=recipe.overrides,
            mixture=recipe.mixture,
            weighted=weighted,
        )
        types: dict[str, GGMLQuantizationType] = {}
        kept, others = Counter[str](), Counter[str]()
        for tensor in plan.tensors:
            if not has_grid(tensor.stored):
                continue
            try:
                kind, _, exact = blocks_of(_grid(tensor, model.config))
                if _bits(kind) > _bits(planned[tensor.name]):
                    raise NotHeld(f"the recipe's {planned[tensor.name].name} is smaller")
            except NotHeld as why:
                others[str(why)] += 1
            else:
                types[tensor.name] = kind
                kept[kind.name if exact else f"{kind.name}, scales rounded to F16"] += 1
        print(f"matrices that keep the checkpoint's integers: {_counts(kept)}", file=sys.stderr)
        if others:
            print(f"matrices whose integers are rounded again: {_counts(others)}", file=sys.stderr)
        return cls(plan, model.config, types) if types else None

    @property
    def overrides(self) -> list[tuple[str, int]]:
        """Patterns of names, and types, for `quantize_file`."""
        escaped = ((name.replace(".", r"\."), kind) for name, kind in self.types.items())
        return [(f"^{name}$", int(kind)) for name, kind in escaped]

    def write(self, path: Path) -> None:
        """Writes the integers into a quantized file, in place of what llama.cpp made of the floats.

        Raises:
            ConvertError: the file has another type for one.
        """
        tensors = read_header(path).tensors
        with path.open("r+b") as file:
            for tensor in self.plan.tensors:
                if (kind := self.types.get(tensor.name)) is None:
                    continue
                info = tensors[tensor.name]
                found, blocks, _ = blocks_of(_grid(tensor, self.config))
                if info.type != kind or found != kind or blocks.nbytes != info.n_bytes:
                    raise ConvertError(
                        f"{path}: tensor {tensor.name} is {info.type_name}, {info.n_bytes:,} bytes; its "
                        f"integers are {found.name}, {blocks.nbytes:,} bytes"
                    )
                file.seek(info.offset)
                file.write(blocks.data)
            file.flush()
            os.fsync(file.fileno())


def has_grids(model: Checkpoint | UnquantizedFile) -> bool:
    """Whether a model has matrices of integers; a GGUF in floats has none."""
    return any(map(has_grid, getattr(model, "tensors", {}).values()))


def has_grid(stored: TensorSource) -> bool:
    """Whether a tensor, or every part of one, is stored as integers and scales."""
    if isinstance(stored, Joined):
        return all(
            has_grid(piece.source) and piece.start == 0 and piece.count == _elements(piece.source)
            for piece in stored.pieces
        )
    return isinstance(stored, Dequantized) and stored.weight.is_grid


def blocks_of(grid: Grid) -> tuple[GGMLQuantizationType, NDArray[np.uint8], bool]:
    """The type that holds a grid, its blocks [rows, bytes], and whether scales are exact in F16.

    Raises:
        NotHeld: there is none.
    """
    rows, columns = grid.codes.shape
    if columns % BLOCK or grid.bits not in (4, 8):
        raise NotHeld(f"{grid.bits} bits, rows of {columns}")
    shape = (rows, columns // BLOCK, BLOCK)
    scales, zeros = _one_each(grid.scales.reshape(shape)), _one_each(grid.zeros.reshape(shape))
    if scales is None or zeros is None:
        raise NotHeld("blocks with more than one scale")
    steps, exact = _as_f16(scales)
    values = grid.codes.reshape(shape).astype(np.int16) - zeros.astype(np.int16)[..., None]
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if grid.bits == 8:
        if low < -128 or high > 127:
            raise NotHeld("integers beyond 8 bits")
        return Q8_0, _joined(rows, steps[..., None], values.astype(np.int8)), exact
    if low >= -MIDDLE_4 and high < MIDDLE_4:
        return Q4_0, _joined(rows, steps[..., None], _nibbles(values + MIDDLE_4)), exact
    raise NotHeld("4 bits with zero points")


def _grid(tensor: PlannedTensor, config: ModelConfig) -> Grid:
    """A planned tensor's integers, reordered as its floats are."""
    parts = list(_grids(tensor.stored))
    columns = tensor.shape[-1]

    def whole(arrays: list[NDArray[Any]]) -> NDArray[Any]:
        values = np.concatenate([array.reshape(-1, columns) for array in arrays])
        if tensor.reorder is not None:
            values = tensor.reorder(values.reshape(tensor.stored.shape), config).reshape(-1, columns)
        return np.ascontiguousarray(values)

    if len({grid.bits for grid in parts}) != 1:
        raise NotHeld("parts of several bits")
    return Grid(
        whole([grid.codes for grid in parts]),
        whole([grid.zeros for grid in parts]),
        whole([grid.scales for grid in parts]),
        parts[0].bits,
    )


def _grids(stored: TensorSource) -> Iterator[Grid]:
    if isinstance(stored, Joined):
        for piece in stored.pieces:
            yield from _grids(piece.source)
    elif isinstance(stored, Dequantized) and (grid := stored.weight.grid()) is not None:
        yield grid


def _elements(source: TensorSource) -> int:
    return int(np.prod(source.shape))


def _one_each(values: NDArray[Any]) -> NDArray[Any] | None:
    """The value of each block; None if one has several."""
    first: NDArray[Any] = values[..., 0]
    return first if (values == first[..., None]).all() else None


def _as_f16(values: NDArray[np.float32]) -> tuple[NDArray[np.float16], bool]:
    """In F16, and whether that is exact. Raises NotHeld: a number is too large or small for F16."""
    with np.errstate(over="ignore", invalid="ignore"):
        halves = values.astype(np.float16)
        off = np.abs(halves.astype(np.float32) - values)
        if not (off <= np.abs(values) * RELATIVE).all():
            raise NotHeld("scales out of F16's range")
    return halves, not off.any()


def _nibbles(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Two to a byte, as ggml has them: column j in the low half of byte j, column j + 16 in the high one."""
    small = values.astype(np.uint8)
    return np.asarray(small[..., : BLOCK // 2] | small[..., BLOCK // 2 :] << np.uint8(4), np.uint8)


def _joined(rows: int, scales: NDArray[np.float16], codes: NDArray[Any]) -> NDArray[np.uint8]:
    blocks = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in (scales, codes)], -1)
    return blocks.reshape(rows, -1)


def _bits(kind: GGMLQuantizationType) -> float:
    elements, n_bytes = GGML_QUANT_SIZES[kind]
    return float(8 * n_bytes / elements)


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{count} ({what})" for what, count in found.most_common()) or "none"
