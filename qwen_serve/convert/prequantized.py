"""Recognizes quantized checkpoints, and puts weights in place of their quantized parts.

- FP8 in blocks (Qwen's own, after DeepSeek's: `weight_scale_inv`), by row, or by tensor (`weight_scale`), of
  fp8, fbgemm_fp8, modelopt and compressed-tensors; `input_scale` is about activations and not needed.
- compressed-tensors: integers packed along the inputs (`weight_packed`, `weight_scale`, `weight_shape`, with
  `weight_zero_point` and `weight_g_idx`), INT8, FP8, NVFP4, MXFP4.
- modelopt: FP8, NVFP4 (`weight_scale`, `weight_scale_2`).
- GPTQ (AutoGPTQ, GPTQModel): `X.qweight` [in / 8, out], `X.qzeros` and `X.scales` [groups, out], `X.g_idx`
  [in], the group of each row. AWQ (AutoAWQ's GEMM version): `X.qweight` [in, out / 8], eight columns to a
  word in an order of their own. auto-round's own format is one of them by its `packing_format`.
- bitsandbytes: convert.bitsandbytes.

Which codes a weight has follows from its parts, which groups from their shapes.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import Any, TypeGuard

from qwen_serve.convert import bitsandbytes
from qwen_serve.convert.dequantize import (
    SMALL_FLOATS,
    WORD,
    Dequantized,
    RowWise,
    Scales,
    Words,
    decoded,
    from_fp4,
    signed,
    unpacked_rows,
    unsigned,
)
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.safetensors import WEIGHT_TYPES, StoredTensor

CODES = ("F8_E4M3", "F8_E5M2", "I8")
SCALE_TYPES = (*WEIGHT_TYPES, *SMALL_FLOATS)
SCALE_NAMES = ("_scale", "_scale_inv")
AUXILIARY = ("_scale", "_scale_inv", "_scale_2", "_global_scale", "_zero_point", "_shape", "_g_idx")
"""Ends of the names of a weight's other parts."""
ABOUT_ACTIVATIONS = (
    *(
        f".{which}_{what}"
        for which in ("input", "output")
        for what in ("scale", "global_scale", "zero_point")
    ),
    *(f".{which}_scale" for which in "qkv"),
    "activation_scale",
)
FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
METHODS = (
    "fp8",
    "fbgemm_fp8",
    "compressed-tensors",
    "modelopt",
    "gptq",
    "awq",
    "auto-round",
    "bitsandbytes",
)
ALGORITHMS = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
BITS = (2, 4, 8)


def method_of(config: Mapping[str, Any]) -> Any:
    """The `quantization_config` of a parsed `config.json`, on either level; compressed-tensors used to call
    it `compression_config`."""
    inner = config.get("text_config")
    for values in (config, inner if isinstance(inner, dict) else {}):
        if method := values.get("quantization_config") or values.get("compression_config"):
            return method
    return None


def check_method(method: Any) -> None:
    """Raises CheckpointError for an unsupported `quantization_config`, naming the supported ones."""
    given = method if isinstance(method, dict) else {}
    if (problem := next(_problems(_name(given) if given else method, given), None)) is not None:
        raise CheckpointError(
            f"config.json: quantization_config: {problem}; or convert the BF16, F16 or F32 checkpoint that "
            "this one was made from"
        )


def _name(method: Mapping[str, Any]) -> Any:
    name = method.get("quant_method")
    return "auto-round" if name in ("auto_round", "intel/auto-round") else name


def _problems(name: Any, given: Mapping[str, Any]) -> Iterator[str]:
    bits = given.get("bits", given.get("w_bit", 4))
    if name not in METHODS:
        yield f"quant_method is {name!r}; {', '.join(METHODS)} are known"
    block = given.get("weight_block_size")
    if name == "fp8" and block is not None and not _is_block(block):
        yield f"weight_block_size is {block!r}; want two lengths, such as [128, 128]"
    if name == "gptq" and bits not in (4, 8):
        yield f"bits is {bits!r}; 4 and 8 are known"
    if name == "gptq" and (form := given.get("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
        yield f"checkpoint_format is {form!r}; gptq and gptq_v2 are known"
    if name == "awq" and bits != 4:
        yield f"bits is {bits!r}; 4 is known"
    if name == "awq" and str(version := given.get("version", "gemm")).lower() != "gemm":
        yield f"version is {version!r}; gemm is known"
    if name == "auto-round":
        if bits not in BITS:
            yield f"bits is {bits!r}; {', '.join(map(str, BITS))} are known"
        form = str(given.get("packing_format", given.get("backend", "auto_round:auto_gptq")))
        if not form.startswith("auto_round"):
            yield f"packing_format is {form!r}; auto_round, auto_round:auto_gptq and the like are known"
    if name == "modelopt" and (algorithm := given.get("quant_algo", "FP8")) not in ALGORITHMS:
        yield f"quant_algo is {algorithm!r}; {', '.join(ALGORITHMS)} are known"
    if name == "compressed-tensors":
        yield from _compressed_problems(given)


def _compressed_problems(given: Mapping[str, Any]) -> Iterator[str]:
    if (status := given.get("quantization_status", "compressed")) != "compressed":
        yield f"quantization_status is {status!r}; compressed is known"
    sparse = given.get("sparsity_config") or {}
    if not isinstance(sparse, dict) or sparse.get("format", "dense") != "dense":
        yield "sparsity_config is set; sparse weights are not known"
    if given.get("transform_config"):
        yield "transform_config is set: the model transforms activations, which llama.cpp does not"
    groups = given.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        yield f"config_groups is {groups!r:.80}; want an object of objects"
        return
    for form in (given.get("format"), *(group.get("format") for group in groups.values())):
        if form is not None and form not in FORMATS:
            yield f"format is {form!r}; {', '.join(FORMATS)} are known"
    for weights in _weights_of(given):
        if (bits := weights.get("num_bits", 8)) not in BITS:
            yield f"config_groups: num_bits is {bits!r}; {', '.join(map(str, BITS))} are known"
        if (block := weights.get("block_structure")) is not None and not _is_block(block):
            yield f"config_groups: block_structure is {block!r}; want two lengths, such as [128, 128]"


def _is_block(block: Any) -> TypeGuard[list[int]]:
    return isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)


def _weights_of(method: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """How each of compressed-tensors' groups quantizes weights."""
    groups = (method.get("config_groups") or {}).values()
    return [group["weights"] for group in groups if isinstance(group.get("weights"), dict)]


def with_weights(tensors: Mapping[str, StoredTensor], method: Any) -> Mapping[str, StoredTensor]:
    """The tensors, with weights in place of their quantized parts. `method` is a checked
    `quantization_config`; without one the tensors are unchanged.

    Raises:
        CheckpointError: a part is missing, or parts do not fit together.
    """
    if not method:
        return tensors
    if _name(method) == "bitsandbytes":
        return bitsandbytes.with_weights(tensors)
    made: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        stem, _, end = name.rpartition(".")
        if end == "qweight":
            made[f"{stem}.weight"] = _words(f"{stem}.weight", stem, tensors, method)
        elif (end in ("qzeros", "scales", "g_idx") and f"{stem}.qweight" in tensors) or name.endswith(
            ABOUT_ACTIVATIONS
        ):
            continue
        elif end == "bias" and f"{stem}.qweight" in tensors and not tensor.read().any():
            continue  # AutoGPTQ adds biases of zero
        elif name.endswith("_packed"):
            base = name.removesuffix("_packed")
            made[base] = _packed(base, tensor, tensors, method)
        elif _is_auxiliary(name, tensors):
            continue
        elif tensor.dtype in CODES or (tensor.dtype == "U8" and f"{name}_scale" in tensors):
            made[name] = _scaled(name, tensor, tensors, method)
        else:
            made[name] = tensor
    return made


def _is_auxiliary(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether it belongs to a quantized weight. Raises CheckpointError: to one that is not quantized."""
    for end in AUXILIARY:
        base = name.removesuffix(end)
        if base == name:
            continue
        if f"{base}_packed" in tensors:
            return True
        if (weight := tensors.get(base)) is not None:
            if weight.dtype in WEIGHT_TYPES:
                raise CheckpointError(
                    f"{weight.path}: tensor {weight.name} is {weight.dtype} and has {name}: its weights are "
                    f"not stored as codes ({', '.join(CODES)}); save the compressed checkpoint"
                )
            return True
    return False


def _part(tensors: Mapping[str, StoredTensor], name: str, dtypes: tuple[str, ...]) -> StoredTensor:
    """Raises CheckpointError: there is none, or it is of another type."""
    if (part := tensors.get(name)) is None:
        raise CheckpointError(f"config.json: quantization_config: the checkpoint has no tensor {name}")
    if part.dtype not in dtypes:
        raise CheckpointError(
            f"{part.path}: tensor {part.name} is {part.dtype}; it must be {' or '.join(dtypes)}"
        )
    return part


def _scaled(
    name: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor], method: Mapping[str, Any]
) -> StoredTensor:
    """FP8 and INT8, which are as large as their weight, and NVFP4 of modelopt."""
    if codes.dtype == "U8":
        return _fp4(name, codes, tensors)
    found = [f"{name}{end}" for end in SCALE_NAMES if f"{name}{end}" in tensors]
    scale = _part(tensors, found[0] if found else f"{name}{SCALE_NAMES[1]}", SCALE_TYPES)
    if len(codes.shape) < 2:
        raise CheckpointError(f"{codes.path}: tensor {codes.name} is {codes.dtype} of {list(codes.shape)}")
    if f"{name}_zero_point" in tensors:
        raise CheckpointError(
            f"{codes.path}: tensor {codes.name} has zero points; of {codes.dtype} those without are known"
        )
    is_int = codes.dtype == "I8"
    weight = RowWise(
        codes,
        prod(codes.shape[:-1]),
        codes.shape[-1],
        unsigned if is_int else signed,
        _scales(scale, codes.shape, method),
        bits=8 if is_int else None,
    )
    return Dequantized(codes.name, "F32", codes.shape, codes.path, codes.offset, weight)


def _packed(
    name: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor], method: Mapping[str, Any]
) -> StoredTensor:
    """compressed-tensors' packed integers, and its FP4."""
    if codes.dtype == "U8":
        return _fp4(name, codes, tensors)
    _part(tensors, f"{name}_packed", ("I32",))
    given = _part(tensors, f"{name}_shape", ("I64", "I32"))
    shape = tuple(int(n) for n in given.read())
    known = {int(weights.get("num_bits", 8)) for weights in _weights_of(method)}
    fitting = [bits for bits in sorted(known) if codes.shape[-1:] == (-(-shape[-1] * bits // WORD),)]
    if len(shape) < 2 or min(shape) < 1 or codes.shape[:-1] != shape[:-1] or len(fitting) != 1:
        raise CheckpointError(
            f"{codes.path}: tensor {codes.name} is {list(codes.shape)}; weights of {list(shape)} "
            f"({given.name}) in {' or '.join(map(str, sorted(known)))} bits take rows of "
            f"{', '.join(str(-(-shape[-1] * bits // WORD)) for bits in sorted(known))} words"
        )
    bits, n_rows = fitting[0], prod(shape[:-1])
    scales = _scales(_part(tensors, f"{name}_scale", SCALE_TYPES), shape, method)
    zeros = g_idx = None
    if f"{name}_zero_point" in tensors:
        zeros = _part(tensors, f"{name}_zero_point", ("I32",))
        wanted = (-(-n_rows * bits // WORD), scales.shape[1])
        if zeros.shape != wanted or len(shape) != 2:
            raise CheckpointError(
                f"{zeros.path}: tensor {zeros.name} is {list(zeros.shape)}; it must be {list(wanted)}"
            )
    if f"{name}_g_idx" in tensors:
        g_idx = _part(tensors, f"{name}_g_idx", ("I32", "I64"))
        order = g_idx.read()
        if g_idx.shape != shape[-1:] or order.min() < -1 or order.max() >= scales.shape[1]:
            raise CheckpointError(
                f"{g_idx.path}: tensor {g_idx.name} must give each of {shape[-1]} columns one of "
                f"{scales.shape[1]} groups"
            )
        if (order == -1).all():  # what AutoGPTQ calls no order
            g_idx = None
    weight = RowWise(
        codes,
        n_rows,
        shape[-1],
        partial(unpacked_rows, bits=bits),
        scales,
        bits=bits,
        zeros=zeros,
        g_idx=g_idx,
    )
    return Dequantized(codes.name, "F32", shape, codes.path, codes.offset, weight)


def _fp4(name: str, codes: StoredTensor, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    """NVFP4 (16 columns share an E4M3, the tensor a factor) and MXFP4 (32 columns share a power of two)."""
    scale = _part(tensors, f"{name}_scale", (*SCALE_TYPES, "U8"))
    if scale.dtype == "U8":  # the bits of E8M0, which torch had no type for
        scale = StoredTensor(scale.name, "F8_E8M0", scale.shape, scale.path, scale.offset)
    shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if len(codes.shape) > 1 else codes.shape
    scales = _scales(scale, shape, {})
    ends = {f"{name}_global_scale": True, f"{name}_scale_2": False}
    for other, divides in ends.items():
        if other in tensors:
            factor = decoded(_part(tensors, other, SCALE_TYPES)).reshape(-1)
            if len(factor) != 1:
                raise CheckpointError(f"{tensors[other].path}: tensor {other} must be one number")
            scales = Scales(
                scale, scales.n_rows, scales.shape, scales.height, scales.width, factor[0], divides
            )
    weight = RowWise(codes, prod(shape[:-1]), shape[-1], from_fp4, scales)
    return Dequantized(codes.name, "F32", shape, codes.path, codes.offset, weight)


def _scales(scale: StoredTensor, shape: tuple[int, ...], method: Mapping[str, Any]) -> Scales:
    """How a weight's scales lie over it: in blocks, by group of columns, by row, or one for a matrix.

    Raises:
        CheckpointError: in none of these ways.
    """
    rows, columns = shape[-2:]
    n_lead = len(shape) - 2
    blocks = _blocks(method)
    if prod(scale.shape) == 1:
        return Scales(scale, prod(shape[:-1]), (1, 1), prod(shape[:-1]), columns)
    if scale.shape[:n_lead] == shape[:-2]:
        own = scale.shape[n_lead:]
        for height, width in blocks:
            if own == (along := (-(-rows // height), -(-columns // width))):
                return Scales(scale, rows, along, height, width)
        if prod(own) == 1:
            return Scales(scale, rows, (1, 1), rows, columns)
        across = own[1] if len(own) == 2 else 1
        only_blocks = "weight_block_size" in method
        if own[:1] == (rows,) and len(own) <= 2 and columns % across == 0 and not only_blocks:
            return Scales(scale, rows, (rows, across), 1, columns // across)
    known = f" in blocks of {list(blocks[0])}" if blocks else ""
    wanted = [-(-n // size) for n, size in zip((rows, columns), blocks[0], strict=True)] if blocks else []
    raise CheckpointError(
        f"{scale.path}: {scale.name} has shape {list(scale.shape)}; {list(shape)} weights{known} want "
        f"{[*shape[:-2], *wanted] if blocks else f'[], [{rows}, 1], or [{rows}, groups]'}"
    )


def _blocks(method: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Rows and columns of the blocks that a configuration speaks of."""
    blocks = [method.get("weight_block_size"), *(w.get("block_structure") for w in _weights_of(method))]
    if _name(method) == "modelopt":  # FP8_PB_WO has these
        blocks.append([128, 128])
    return [(block[0], block[1]) for block in blocks if _is_block(block)]


def _words(
    name: str, stem: str, tensors: Mapping[str, StoredTensor], method: Mapping[str, Any]
) -> StoredTensor:
    method_name, form = _name(method), str(method.get("packing_format", method.get("backend", "gptq")))
    awq = method_name == "awq" or (method_name == "auto-round" and "awq" in form)
    extra: Mapping[str, Any] = method.get("extra_config") or {}
    own: Mapping[str, Any] = extra.get(stem) or {}
    bits = int(own.get("bits") or method.get("bits", method.get("w_bit", 4)))
    if (
        method_name == "auto-round"
    ):  # auto_round's extension for torch: only its GPTQ kind stores zeros less one
        offset = int("gptq" in form and "gptqmodel" not in form)
    else:
        offset = int(method.get("checkpoint_format", "gptq") == "gptq") if not awq else 0
    weight, zeros = (_part(tensors, f"{stem}.{part}", ("I32",)) for part in ("qweight", "qzeros"))
    scales = _part(tensors, f"{stem}.scales", SCALE_TYPES)
    per_word = WORD // bits
    groups, width = scales.shape if len(scales.shape) == 2 else (0, 0)
    rows = weight.shape[0] * (1 if awq else per_word)
    wanted = {
        weight.name: (weight.shape[0], width // per_word if awq else width),
        zeros.name: (groups, width // per_word),
    }
    for part in (weight, zeros):
        if part.shape != wanted[part.name] or not groups:
            raise CheckpointError(
                f"{part.path}: {part.name} is {part.dtype} of {list(part.shape)}; with {bits} bits and "
                f"scales of {list(scales.shape)} it must be I32 of {list(wanted[part.name])}"
            )
    g_idx = None
    if not awq and f"{stem}.g_idx" in tensors:
        g_idx = _part(tensors, f"{stem}.g_idx", ("I32", "I64"))
    if rows % groups and g_idx is None:
        raise CheckpointError(f"{scales.path}: {scales.name} has {groups} groups for {rows} rows")
    words = Words(weight, zeros, scales, g_idx, bits, offset, awq)
    return Dequantized(name, "F32", (width, rows), weight.path, weight.offset, words)
