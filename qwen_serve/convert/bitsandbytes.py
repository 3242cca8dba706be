"""Weights that bitsandbytes quantized: NF4 and FP4 in blocks of a flat tensor, and INT8 by row.

Four bits, two to a byte with the high half first: `X.weight` [elements / 2, 1] in U8, `X.weight.quant_map`
with the 16 values, `X.weight.absmax` with a factor for each block, and `X.weight.quant_state.`, followed by
`bitsandbytes__nf4` or `__fp4`, JSON with shape and block size. With double quantization the factors are codes
of `X.weight.nested_quant_map`, times `X.weight.nested_absmax` of a block of them, plus an offset. Eight bits:
`X.weight` in I8, of which a row is multiplied by `X.SCB` / 127. Source: bitsandbytes' functional.py
(`QuantState`, `dequantize_4bit`), which rounds the products to the model's type; here they stay F32.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_serve.convert.dequantize import Dequantized, Grid, RowWise, Scales, decoded, signed
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.safetensors import StoredTensor

STATE = ".quant_state.bitsandbytes__"
PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
LARGEST = np.float32(127)


@dataclass(frozen=True, eq=False)
class Nested:
    """Codes of factors: factor = table[code] * scale of its block + offset."""

    table: NDArray[np.float32]
    scales: StoredTensor
    size: int
    offset: float


@dataclass(frozen=True, eq=False)
class Blocks:
    """Four bits: value = table[code] * factor of its block of `size` elements of the flat tensor."""

    codes: StoredTensor
    columns: int
    table: NDArray[np.float32]
    factors: StoredTensor
    size: int
    nested: Nested | None

    is_grid = False

    def rows(self, first: int, last: int) -> NDArray[np.float32]:
        start, end = first * self.columns, last * self.columns
        low, high = start // self.size, -(-end // self.size)
        most = min(high * self.size // 2, self.codes.n_elements)
        packed = self.codes.read(low * self.size // 2, most - low * self.size // 2)
        codes = np.stack([packed >> 4, packed & 15], -1).reshape(-1)
        values = self.table[codes] * self._factors(low, high).repeat(self.size)[: len(codes)]
        begin = start - low * self.size
        rows: NDArray[np.float32] = values[begin : begin + end - start].reshape(-1, self.columns)
        return rows

    def grid(self) -> Grid | None:
        return None

    def _factors(self, low: int, high: int) -> NDArray[np.float32]:
        found: NDArray[Any] = decoded(self.factors, low, high - low)
        if (nested := self.nested) is None:
            return found.astype(np.float32)
        scales = decoded(nested.scales)[np.arange(low, high) // nested.size]
        factors: NDArray[np.float32] = nested.table[found] * scales + np.float32(nested.offset)
        return factors


def with_weights(tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """The tensors, with weights in place of their quantized parts.

    Raises:
        CheckpointError: a part is missing, or parts do not fit together.
    """
    states = {name.partition(STATE)[0]: tensor for name, tensor in tensors.items() if STATE in name}
    made: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if name in states:
            made[name] = _four_bits(name, tensor, states[name], tensors)
        elif tensor.dtype == "I8" and f"{stem}.SCB" in tensors and len(tensor.shape) == 2:
            made[name] = _eight_bits(tensor, _part(tensors, f"{stem}.SCB"))
        elif not (STATE in name or name.endswith((*PARTS, ".SCB", ".weight_format"))):
            made[name] = tensor
    return made


def _part(tensors: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    if (part := tensors.get(name)) is None:
        raise CheckpointError(f"config.json: quantization_config: the checkpoint has no tensor {name}")
    return part


def _four_bits(
    name: str, codes: StoredTensor, stored: StoredTensor, tensors: Mapping[str, StoredTensor]
) -> StoredTensor:
    where = f"{stored.path}: tensor {stored.name}"
    try:
        state = json.loads(bytes(stored.read()))
        shape, size = tuple(int(n) for n in state["shape"]), int(state["blocksize"])
        offset, inner = float(state.get("nested_offset", 0)), int(state.get("nested_blocksize", 0))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: is no JSON with shape and blocksize ({error!r:.80})") from None
    factors, table = (_part(tensors, f"{name}{end}") for end in PARTS[:2])
    nested = None
    if f"{name}{PARTS[2]}" in tensors:
        scales, inner_table = (_part(tensors, f"{name}{end}") for end in PARTS[2:])
        nested = Nested(_table(inner_table, 256), scales, inner, offset)
    n_blocks = -(-prod(shape) // max(size, 1))
    fits = (
        codes.dtype == "U8"  # the default of bnb_4bit_quant_storage
        and len(shape) > 1
        and codes.n_elements == -(-prod(shape) // 2)
        and size > 1
        and size % 2 == 0
        and factors.n_elements == n_blocks
        and (factors.dtype == "U8") == (nested is not None)
        and (nested is None or (inner > 0 and nested.scales.n_elements == -(-n_blocks // inner)))
    )
    if not fits:
        raise CheckpointError(
            f"{codes.path}: tensor {codes.name} is {codes.dtype} of {list(codes.shape)} with "
            f"{factors.n_elements} factors in {factors.dtype}; {list(shape)} in blocks of {size} want U8 of "
            f"[{-(-prod(shape) // 2)}, 1] and {n_blocks} factors"
        )
    weight = Blocks(codes, shape[-1], _table(table, 16), factors, size, nested)
    return Dequantized(codes.name, "F32", shape, codes.path, codes.offset, weight)


def _eight_bits(codes: StoredTensor, scale: StoredTensor) -> StoredTensor:
    rows, columns = codes.shape
    if scale.n_elements != rows:
        raise CheckpointError(
            f"{scale.path}: tensor {scale.name} has {scale.n_elements} scales for {rows} rows of {codes.name}"
        )
    scales = Scales(scale, rows, (rows, 1), 1, columns, LARGEST, divides=True)
    weight = RowWise(codes, rows, columns, signed, scales)
    return Dequantized(codes.name, "F32", codes.shape, codes.path, codes.offset, weight)


def _table(stored: StoredTensor, count: int) -> NDArray[np.float32]:
    if stored.n_elements != count:
        raise CheckpointError(
            f"{stored.path}: tensor {stored.name} has {stored.n_elements} values; want {count}"
        )
    values: NDArray[np.float32] = decoded(stored).reshape(-1).astype(np.float32)
    return values
