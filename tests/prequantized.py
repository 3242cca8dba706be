"""nano as a quantized checkpoint: FP8 in blocks, GPTQ with activation order, AWQ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qwen_serve.convert.checkpoint import INDEX, read_tensors
from qwen_serve.convert.floats import to_f32
from qwen_serve.convert.safetensors import write_file

NANO = Path(__file__).parents[1] / "models" / "nano"
GROUP = 32
METHODS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
}
Method = Literal["fp8", "gptq", "awq"]
Parts = list[tuple[str, str, NDArray[Any]]]
AWQ_PACKED = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's WQLinear_GEMM: which column goes where in a word, from the lowest bits on."""


def write_prequantized(folder: Path, method: Method) -> dict[str, NDArray[np.float32]]:
    """Write the checkpoint with quantized MLPs and attention projections. Returns their weights by name."""
    shutil.copytree(NANO, folder, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": METHODS[method]}))
    random, parts, weights = np.random.default_rng(7), Parts(), {}
    for name, tensor in read_tensors(NANO).items():
        values = tensor.read().reshape(tensor.shape)
        if not ((".mlp." in name or ".self_attn." in name) and name.endswith("_proj.weight")):
            parts.append((name, tensor.dtype, values))
            continue
        matrix = to_f32(values, tensor.dtype)
        make = fp8(name, matrix) if method == "fp8" else packed(name, matrix, method, random)
        parts += make[0]
        weights[name] = make[1]
    write_file(folder / "model.safetensors", parts, {"format": "pt"})
    return weights


def fp8(name: str, matrix: NDArray[np.float32]) -> tuple[Parts, NDArray[np.float32]]:
    """(tensors of a quantized weight, the weight that they represent)."""
    rows, columns = matrix.shape
    codes = np.empty(matrix.shape, np.uint8)
    scales = np.empty((-(-rows // 128), -(-columns // 128)), np.float32)
    weight = np.empty_like(matrix)
    # by the format's definition: sign, 4 bits of exponent with a bias of 7, 3 of mantissa; 448 is the largest
    sizes = [
        (m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)
    ]
    finite = np.array(sizes[:127], np.float32)
    for i, j in np.ndindex(scales.shape):
        block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
        scale = np.float32(np.abs(matrix[block]).max() / 448)
        scaled = matrix[block] / scale
        nearest = np.searchsorted((finite[1:] + finite[:-1]) / 2, np.abs(scaled))
        scales[i, j] = scale
        codes[block] = nearest + 128 * (scaled < 0)
        weight[block] = np.where(scaled < 0, -finite[nearest], finite[nearest]) * scale
    return [(name, "F8_E4M3", codes), (f"{name}_scale_inv", "F32", scales)], weight


def packed(
    name: str, matrix: NDArray[np.float32], method: Method, random: np.random.Generator
) -> tuple[Parts, NDArray[np.float32]]:
    """The same for codes of 4 bits with zero points; GPTQ's groups are in an order of their own."""
    by_input = matrix.T
    n_in = len(by_input)
    groups = np.arange(n_in) // GROUP
    if method == "gptq":
        groups = random.permutation(groups)
    low, high = (
        np.array([edge(by_input[groups == g], 0) for g in range(n_in // GROUP)]) for edge in (np.min, np.max)
    )
    scales = ((high - low) / 15).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 1, 15).astype(np.int64)
    steps = scales.astype(np.float32)[groups]
    codes = np.clip(np.rint(by_input / steps) + zeros[groups], 0, 15).astype(np.int64)
    weight = (steps * (codes - zeros[groups]).astype(np.float32)).T
    stem = name.removesuffix(".weight")
    order = AWQ_PACKED if method == "awq" else range(8)

    def words(values: NDArray[np.int64]) -> NDArray[np.int32]:
        """[n, m] to [n, m / 8]."""
        eights = values.reshape(len(values), -1, 8)
        made = sum(eights[..., column] << (4 * place) for place, column in enumerate(order))
        return np.asarray(made).astype(np.uint32).view(np.int32)

    parts: Parts = [(f"{stem}.scales", "F16", scales)]
    if method == "gptq":  # zero points less one, codes packed along the inputs
        parts += [
            (f"{stem}.qweight", "I32", np.ascontiguousarray(words(codes.T).T)),
            (f"{stem}.qzeros", "I32", words(zeros - 1)),
            (f"{stem}.g_idx", "I32", groups.astype(np.int32)),
        ]
    else:
        parts += [(f"{stem}.qweight", "I32", words(codes)), (f"{stem}.qzeros", "I32", words(zeros))]
    return parts, weight
