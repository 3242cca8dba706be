"""Reads quantized checkpoints, FP8, GPTQ and AWQ, as floats.

- FP8 (Qwen's own, after DeepSeek's): `X.weight` in E4M3, and `X.weight_scale_inv`, a scale for each block of
  `weight_block_size`.
- GPTQ (AutoGPTQ, GPTQModel): `X.qweight` [in / 8, out], `X.qzeros` and `X.scales` [groups, out], `X.g_idx`
  [in], the group of each row.
- AWQ (AutoAWQ's GEMM version): `X.qweight` [in, out / 8], eight columns to a word in an order of their own.

FP8 and GPTQ are computed as in llama.cpp's conversion/base.py (`dequant_simple`, `dequant_gptq`), AWQ as in
AutoAWQ's utils/packing_utils.py. The result is F32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.floats import to_f32
from qwen_serve.convert.safetensors import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

FP8, FP8_SCALE = "F8_E4M3", "_scale_inv"
WORD = 32
"""Bits of a word into which GPTQ and AWQ pack codes."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The column of each of a word's eight codes, from the lowest bits on."""


def method_of(config: Mapping[str, Any]) -> Any:
    """The `quantization_config` of a parsed `config.json`, on either level."""
    for values in (config, config.get("text_config") or {}):
        if method := values.get("quantization_config"):
            return method
    return None


def check_method(method: Any) -> None:
    """Raises CheckpointError for an unsupported `quantization_config`, naming the supported ones."""
    given = method if isinstance(method, dict) else {}
    name, bits = given.get("quant_method", method), given.get("bits", given.get("w_bit", 4))
    problem = None
    if name == "fp8":
        block = given.get("weight_block_size")
        if not (
            isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
        ):
            problem = f"weight_block_size is {block!r}; want two lengths, such as [128, 128]"
    elif name == "gptq":
        if bits not in (4, 8):
            problem = f"bits is {bits!r}; 4 and 8 are known"
        elif (form := given.get("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
            problem = f"checkpoint_format is {form!r}; gptq and gptq_v2 are known"
    elif name == "awq":
        if bits != 4:
            problem = f"bits is {bits!r}; 4 is known"
        elif str(version := given.get("version", "gemm")).lower() != "gemm":
            problem = f"version is {version!r}; gemm is known"
    else:
        problem = f"quant_method is {name!r}; fp8, gptq and awq are known"
    if problem is not None:
        raise CheckpointError(
            f"config.json: quantization_config: {problem}; or convert the BF16, F16 or F32 checkpoint that "
            "this one was made from"
        )


@dataclass(frozen=True)
class Dequantized(StoredTensor):
    """A weight that is computed from `parts`; `shape` is that of the weight."""

    parts: tuple[StoredTensor, ...]
    compute: Callable[..., NDArray[np.float32]]
    """Computes the weight from the parts' values, floats as F32."""

    def read(self, start: int = 0, count: int | None = None) -> NDArray[np.float32]:
        """Elements `start` to `start + count` of the flat weight; computes all of it."""
        values = [_values(part) for part in self.parts]
        weight = self.compute(*values).reshape(-1)
        return weight[start : None if count is None else start + count]


def with_weights(tensors: Mapping[str, StoredTensor], method: Any) -> Mapping[str, StoredTensor]:
    """The tensors, with weights in place of their quantized parts. `method` is a checked
    `quantization_config`; without one the tensors are unchanged.

    Raises:
        CheckpointError: a part is missing, or parts do not fit together.
    """
    if not method:
        return tensors
    made: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        stem, _, end = name.rpartition(".")
        if method["quant_method"] == "fp8":
            if name.endswith(FP8_SCALE) and name.removesuffix(FP8_SCALE) in tensors:
                continue
            made[name] = _fp8(tensor, tensors, method) if tensor.dtype == FP8 else tensor
        elif end == "qweight":
            made[f"{stem}.weight"] = _packed(f"{stem}.weight", stem, tensors, method)
        elif end not in ("qzeros", "scales", "g_idx") or f"{stem}.qweight" not in tensors:
            made[name] = tensor
    return made


def _fp8(
    tensor: StoredTensor, tensors: Mapping[str, StoredTensor], method: Mapping[str, Any]
) -> StoredTensor:
    scale = _part(tensors, tensor.name + FP8_SCALE)
    block = tuple(method["weight_block_size"])
    blocks = tuple(-(-n // size) for n, size in zip(tensor.shape[-2:], block, strict=True))
    if scale.shape != (*tensor.shape[:-2], *blocks):
        raise CheckpointError(
            f"{scale.path}: {scale.name} has shape {list(scale.shape)}; {list(tensor.shape)} weights in "
            f"blocks of {list(block)} want {[*tensor.shape[:-2], *blocks]}"
        )
    compute = partial(dequantize_fp8, block=block)
    return Dequantized(tensor.name, "F32", tensor.shape, tensor.path, tensor.offset, (tensor, scale), compute)


def _packed(
    name: str, stem: str, tensors: Mapping[str, StoredTensor], method: Mapping[str, Any]
) -> StoredTensor:
    is_gptq = method["quant_method"] == "gptq"
    bits = int(method.get("bits", method.get("w_bit", 4)))
    weight, zeros, scales = (_part(tensors, f"{stem}.{part}") for part in ("qweight", "qzeros", "scales"))
    per_word = WORD // bits
    groups, width = scales.shape if len(scales.shape) == 2 else (0, 0)
    rows = weight.shape[0] * (per_word if is_gptq else 1)
    wanted = {
        weight.name: (weight.shape[0], width if is_gptq else width // per_word),
        zeros.name: (groups, width // per_word),
    }
    for part in (weight, zeros):
        if part.dtype != "I32" or part.shape != wanted[part.name] or not groups:
            raise CheckpointError(
                f"{part.path}: {part.name} is {part.dtype} of {list(part.shape)}; with {bits} bits and "
                f"scales of {list(scales.shape)} it must be I32 of {list(wanted[part.name])}"
            )
    parts: tuple[StoredTensor, ...] = (weight, zeros, scales)
    compute: Callable[..., NDArray[np.float32]] = dequantize_awq
    if is_gptq:
        offset = int(method.get("checkpoint_format", "gptq") == "gptq")
        compute = partial(dequantize_gptq, bits=bits, offset=offset)
        if (g_idx := tensors.get(f"{stem}.g_idx")) is not None:
            parts = (*parts, g_idx)
    if rows % groups and len(parts) == 3:
        raise CheckpointError(f"{scales.path}: {scales.name} has {groups} groups for {rows} rows")
    return Dequantized(name, "F32", (width, rows), weight.path, weight.offset, parts, compute)


def dequantize_fp8(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], *, block: tuple[int, int]
) -> NDArray[np.float32]:
    """[..., rows, columns] from E4M3, with a scale for each block."""
    rows, columns = codes.shape[-2:]
    spread = scales.repeat(block[0], -2)[..., :rows, :].repeat(block[1], -1)[..., :columns]
    return E4M3[codes] * spread


def dequantize_gptq(
    codes: NDArray[np.int32],
    zeros: NDArray[np.int32],
    scales: NDArray[np.float32],
    g_idx: NDArray[np.int32] | None = None,
    *,
    bits: int,
    offset: int,
) -> NDArray[np.float32]:
    """[out, in] from codes packed along `in`; `offset`: what the file's format subtracts from zero points.

    Raises:
        CheckpointError: an unknown group.
    """
    values = np.moveaxis(_unpacked(codes, bits), -1, 1).reshape(-1, codes.shape[1])
    points = _unpacked(zeros, bits).reshape(scales.shape) + offset
    if g_idx is None:
        g_idx = np.arange(len(values), dtype=np.int32) // (len(values) // len(scales))
    if g_idx.shape != (len(values),) or g_idx.min() < 0 or g_idx.max() >= len(scales):
        raise CheckpointError(f"g_idx must give each of {len(values)} rows one of {len(scales)} groups")
    weight: NDArray[np.float32] = scales[g_idx] * (values - points[g_idx]).astype(np.float32)
    return weight.T


def dequantize_awq(
    codes: NDArray[np.int32], zeros: NDArray[np.int32], scales: NDArray[np.float32]
) -> NDArray[np.float32]:
    """[out, in] from codes packed along `out`."""
    values, points = (_unpacked(words, 4)[..., AWQ_ORDER].reshape(len(words), -1) for words in (codes, zeros))
    group = len(values) // len(scales)
    weight: NDArray[np.float32] = (values - points.repeat(group, 0)).astype(np.float32) * scales.repeat(
        group, 0
    )
    return weight.T


def _unpacked(words: NDArray[np.int32], bits: int) -> NDArray[np.int32]:
    """[..., codes of a word], the lowest bits first."""
    shifts = np.arange(0, WORD, bits, dtype=np.int32)
    return (words[..., None] >> shifts) & np.int32(2**bits - 1)


def _e4m3() -> NDArray[np.float32]:
    """Every value of FP8 E4M3 (with NaN, without infinities), by its bits."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    sizes = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    sizes[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)


E4M3 = _e4m3()


def _part(tensors: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    if name not in tensors:
        raise CheckpointError(f"config.json: quantization_config: the checkpoint has no tensor {name}")
    return tensors[name]


def _values(part: StoredTensor) -> NDArray[Any]:
    values = part.read().reshape(part.shape)
    return values if part.dtype in (FP8, "I32") else to_f32(values, part.dtype)
