"""nano as a quantized checkpoint: FP8, GPTQ with activation order, AWQ, compressed-tensors, modelopt."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qwen_serve.convert.checkpoint import INDEX, read_tensors
from qwen_serve.convert.floats import convert, to_f32
from qwen_serve.convert.safetensors import write_file

NANO = Path(__file__).parents[1] / "models" / "nano"
GROUP = 32


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


PACKED, FLOAT = "pack-quantized", "float-quantized"
METHODS: dict[str, dict[str, Any]] = {
    "w4a16": compressed(PACKED, num_bits=4, strategy="group", group_size=32),
    "w4a16-128": compressed(PACKED, num_bits=4, strategy="group", group_size=128),
    "w4a16-asym": compressed(PACKED, num_bits=4, strategy="group", group_size=32, symmetric=False),
    "w4a16-order": compressed(PACKED, num_bits=4, strategy="group", group_size=32, actorder="group"),
    "w8a16": compressed(PACKED, num_bits=8, strategy="channel"),
    "int8": compressed("int-quantized", num_bits=8, strategy="channel"),
    "fp8-tensor": compressed(FLOAT, num_bits=8, type="float", strategy="tensor"),
    "fp8-channel": compressed(FLOAT, num_bits=8, type="float", strategy="channel"),
    "fp8-block": compressed(FLOAT, num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
    "nvfp4": compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"),
    "modelopt-fp8": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "modelopt-nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "fp8-static": {"quant_method": "fp8", "activation_scheme": "static"},
    "auto-round": {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"},
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
}
Method = Literal[
    "fp8",
    "gptq",
    "awq",
    "w4a16",
    "w4a16-128",
    "w4a16-asym",
    "w4a16-order",
    "w8a16",
    "int8",
    "fp8-tensor",
    "fp8-channel",
    "fp8-block",
    "nvfp4",
    "modelopt-fp8",
    "modelopt-nvfp4",
    "fp8-static",
    "auto-round",
]
Parts = list[tuple[str, str, NDArray[Any]]]
SIZES = [2.0**-9 * m if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)]
FINITE_E4M3 = np.array([*SIZES[:127], np.inf, *(-size for size in SIZES[:127]), -np.inf], np.float32)
"""By the format's definition: sign, 4 bits of exponent with a bias of 7, 3 of mantissa; 448 is the largest.
The codes of NaN are infinite here, so that no number is nearest to them."""
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
        make = quantized(name, matrix, method, random)
        parts += make[0]
        weights[name] = make[1]
    write_file(folder / "model.safetensors", parts, {"format": "pt"})
    return weights


def quantized(
    name: str, matrix: NDArray[np.float32], method: Method, random: np.random.Generator
) -> tuple[Parts, NDArray[np.float32]]:
    """(tensors of a quantized weight, the weight that they represent)."""
    if method == "fp8":
        return fp8(name, matrix)
    if method in ("gptq", "awq", "auto-round"):
        return packed(name, matrix, method, random)
    if method in ("nvfp4", "modelopt-nvfp4"):
        return fp4(name, matrix, method)
    if "fp8" in method:
        return fp8_scaled(name, matrix, method)
    return integers(name, matrix, method, random)


def fp8_scaled(name: str, matrix: NDArray[np.float32], method: Method) -> tuple[Parts, NDArray[np.float32]]:
    """FP8 with a scale for the tensor or for each row, or in blocks."""
    codes, weight = fp8(name, matrix)
    if method == "fp8-block":
        (_, _, values), (_, _, scales) = codes
        return [(name, "F8_E4M3", values), (f"{name}_scale", "F32", scales)], weight
    largest = np.abs(matrix).max(axis=1, keepdims=True) if method == "fp8-channel" else np.abs(matrix).max()
    scale = np.asarray(largest / 448, np.float32)
    order = np.argsort(FINITE_E4M3)
    values = FINITE_E4M3[order]
    nearest = np.searchsorted((values[1:] + values[:-1]) / 2, matrix / scale)
    found = order[nearest].astype(np.uint8)
    about_inputs: Parts = [(name.replace(".weight", ".input_scale"), "F32", np.ones((), np.float32))]
    stored: Parts = [(name, "F8_E4M3", found), (f"{name}_scale", "F32", scale), *about_inputs]
    return stored, FINITE_E4M3[found] * scale


def fp4(name: str, matrix: NDArray[np.float32], method: Method) -> tuple[Parts, NDArray[np.float32]]:
    """NVFP4: 16 columns share an E4M3, and the tensor a factor."""
    rows, columns = matrix.shape
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    groups = matrix.reshape(rows, -1, 16)
    whole = np.float32(np.abs(matrix).max() / (6 * 448))
    positive = FINITE_E4M3[:127]
    found = np.searchsorted((positive[1:] + positive[:-1]) / 2, np.abs(groups).max(axis=2) / 6 / whole)
    scales = found.clip(1).astype(np.uint8)
    factor = 1 / (1 / whole) if method == "nvfp4" else whole
    steps = positive[scales] / (1 / whole) if method == "nvfp4" else positive[scales] * factor
    codes = np.searchsorted((sizes[1:] + sizes[:-1]) / 2, np.abs(groups) / steps[..., None])
    weight = (np.where(groups < 0, -sizes[codes], sizes[codes]) * steps[..., None]).reshape(matrix.shape)
    bits = (codes + 8 * (groups < 0)).astype(np.uint8).reshape(rows, columns // 2, 2)
    packed_bits = bits[..., 0] | bits[..., 1] << 4
    if method == "nvfp4":
        both = f"{name}_packed", (f"{name}_global_scale", "F32", np.array([1 / whole], np.float32))
    else:
        both = name, (f"{name}_scale_2", "F32", np.array(whole, np.float32))
    return [(both[0], "U8", packed_bits), (f"{name}_scale", "F8_E4M3", scales), both[1]], weight


def integers(
    name: str, matrix: NDArray[np.float32], method: Method, random: np.random.Generator
) -> tuple[Parts, NDArray[np.float32]]:
    """compressed-tensors' integers, packed or not, with scales in BF16."""
    settings = METHODS[method]["config_groups"]["group_0"]["weights"]
    rows, columns = matrix.shape
    bits, size = settings["num_bits"], settings.get("group_size") or columns
    middle, order = 2 ** (bits - 1), np.arange(columns) // size
    if "actorder" in settings:
        order = random.permutation(order)
    places = np.argsort(order, kind="stable")
    groups = matrix[:, places].reshape(rows, -1, size)
    low, high = groups.min(axis=2), groups.max(axis=2)
    spread = high - low if not settings["symmetric"] else 2 * np.abs(groups).max(axis=2)
    stored = convert((spread / (2**bits - 1)).astype(np.float32).reshape(-1), "F32", "BF16")
    scales = to_f32(stored, "BF16").reshape(spread.shape)
    zeros = np.full(scales.shape, middle)
    if not settings["symmetric"]:
        zeros = np.clip(np.rint(-low / scales), 0, 2**bits - 1).astype(np.int64)
    codes = np.clip(np.rint(matrix / scales[:, order]) + zeros[:, order], 0, 2**bits - 1).astype(np.int64)
    weight = (codes - zeros[:, order]).astype(np.float32) * scales[:, order]
    parts: Parts = [(f"{name}_scale", "BF16", stored.reshape(scales.shape))]
    if METHODS[method]["format"] == "int-quantized":
        return [(name, "I8", (codes - middle).astype(np.int8)), *parts], weight

    def words(values: NDArray[np.int64]) -> NDArray[np.int32]:
        """Packed along the rows, which zeros fill up to whole words."""
        per_word = 32 // bits
        filled = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word)))
        of_word = filled.reshape(len(values), -1, per_word).astype(np.uint64)
        made = sum(of_word[..., place] << np.uint64(bits * place) for place in range(per_word))
        return np.asarray(made).astype(np.uint32).view(np.int32)

    parts += [
        (f"{name}_packed", "I32", words(codes)),
        (f"{name}_shape", "I64", np.array(matrix.shape, np.int64)),
    ]
    if not settings["symmetric"]:
        parts.append((f"{name}_zero_point", "I32", np.ascontiguousarray(words(zeros.T).T)))
    if "actorder" in settings:
        parts.append((f"{name}_g_idx", "I32", order.astype(np.int32)))
    return parts, weight


def fp8(name: str, matrix: NDArray[np.float32]) -> tuple[Parts, NDArray[np.float32]]:
    """(tensors of a quantized weight, the weight that they represent)."""
    rows, columns = matrix.shape
    codes = np.empty(matrix.shape, np.uint8)
    scales = np.empty((-(-rows // 128), -(-columns // 128)), np.float32)
    weight = np.empty_like(matrix)
    finite = FINITE_E4M3[:127]
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
    if method != "awq":  # zero points less one, codes packed along the inputs
        parts += [
            (f"{stem}.qweight", "I32", np.ascontiguousarray(words(codes.T).T)),
            (f"{stem}.qzeros", "I32", words(zeros - 1)),
        ]
        parts += [(f"{stem}.g_idx", "I32", groups.astype(np.int32))] if method == "gptq" else []
    else:
        parts += [(f"{stem}.qweight", "I32", words(codes)), (f"{stem}.qzeros", "I32", words(zeros))]
    return parts, weight
