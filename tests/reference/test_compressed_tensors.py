"""Weights that compressed-tensors' own library compresses: ours and its dequantization are equal.

The library multiplies in the scale's type, so scales are F32 here; with BF16 ones it rounds each product.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_serve.convert.prequantized import check_method, with_weights
from qwen_serve.convert.safetensors import read_header

torch = pytest.importorskip("torch", reason="the extra `reference`")
save_file = pytest.importorskip("safetensors.torch", reason="the extra `reference`").save_file
compressors = pytest.importorskip("compressed_tensors.compressors", reason="the extra `reference`")
quantization = pytest.importorskip("compressed_tensors.quantization", reason="the extra `reference`")

pytestmark = pytest.mark.reference

ROWS, COLUMNS = 192, 256
FP4_LARGEST, FP8_LARGEST = 6.0, 448.0
FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False}),
    ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 64}),
    ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}),
    ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
]


@pytest.mark.parametrize(("form", "settings"), FORMATS, ids=lambda value: str(value).replace(" ", ""))
def test_weights_equal_the_librarys(form: str, settings: dict[str, Any], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn((ROWS, COLUMNS), generator=generator) / 16
    args = quantization.QuantizationArgs(**settings)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    parts = compressor.compress({"weight": weight, **_parameters(weight, args)}, scheme)
    save_file({f"x.{name}": part.contiguous() for name, part in parts.items()}, tmp_path / "x.safetensors")
    theirs = compressor.decompress(parts, scheme)["weight"].float().numpy()
    method = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": settings}},
    }
    check_method(method)
    stored = {tensor.name: tensor for tensor in read_header(tmp_path / "x.safetensors")}
    (name, ours), *others = with_weights(stored, method).items()
    assert (name, others) == ("x.weight", [])
    read = ours.read().reshape(ours.shape)
    if form.startswith("nvfp4"):  # the library rounds to BF16 in the end
        read = torch.from_numpy(read).bfloat16().float().numpy()
    assert np.abs(read - theirs).max() == 0.0
    assert np.abs(read - weight.numpy()).max() < 0.2
    assert np.abs(read).max() > 0.1


def _parameters(weight: Any, args: Any) -> dict[str, Any]:
    """Scales and zero points, as an observer of the least and largest weight finds them."""
    kind = str(args.strategy)
    shaped = {
        "tensor": weight.reshape(1, 1, -1),
        "channel": weight.reshape(ROWS, 1, -1),
        "group": weight.reshape(ROWS, -1, args.group_size or COLUMNS),
        "tensor_group": weight.reshape(ROWS, -1, args.group_size or COLUMNS),
        "block": None,
    }[kind]
    if shaped is None:
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -ROWS % 128))
        shaped = padded.reshape(-1, 128, COLUMNS // 128, 128).transpose(1, 2).flatten(2)
    largest = shaped.abs().amax(-1)
    if kind == "tensor_group":
        whole = FP4_LARGEST * FP8_LARGEST / weight.abs().max()
        scale = (largest / FP4_LARGEST * whole).to(torch.float8_e4m3fn).float()
        return {"weight_scale": scale, "weight_global_scale": whole.reshape(1)}
    if args.type == "float":
        return {
            "weight_scale": (largest / FP8_LARGEST).squeeze() if kind == "tensor" else largest / FP8_LARGEST
        }
    if args.symmetric:
        scale = largest / (2**args.num_bits - 1) * 2
        return {"weight_scale": scale.reshape(1) if kind == "tensor" else scale}
    low, high = shaped.amin(-1).clamp(max=0), shaped.amax(-1).clamp(min=0)
    scale = (high - low) / (2**args.num_bits - 1)
    zero = (-(2 ** (args.num_bits - 1)) - torch.round(low / scale)).to(torch.int8)
    return {"weight_scale": scale, "weight_zero_point": zero}
