"""Makes a model of experts of a dense one, by sparse upcycling (Komatsuzaki et al., 2023), for tests.

    python -m tests.upcycling models/nano OUT

Every routed expert of a block, and the shared one, is the dense FFN and noise, at half its output: so the
model still speaks as the dense one does, while each choice of the router shows in its logits. The trunk's
experts are stored fused, those of the MTP block one by one.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qwen_serve.convert.floats import to_f32
from qwen_serve.convert.safetensors import read_header, write_file

EXPERTS, USED = 8, 2
NOISE = 0.3  # of the weights' own deviation
ROUTER = 1.0  # deviation of a router's weights: its choices are clear ones

Matrix = npt.NDArray[np.float32]


def upcycle(dense: Path, out: Path) -> Path:
    """Writes the checkpoint `out` (F32) from the dense one in `dense`; returns `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for path in dense.iterdir():
        if path.suffix in {".json", ".jinja"} and "index" not in path.name:
            shutil.copy(path, out)
    config = json.loads((dense / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"]
    width = text.pop("intermediate_size")
    text |= {"num_experts": EXPERTS, "num_experts_per_tok": USED, "moe_intermediate_size": width}
    text |= {"shared_expert_intermediate_size": width, "model_type": "qwen3_5_moe_text"}
    config |= {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")

    tensors: dict[str, Matrix] = {}
    for shard in sorted(dense.glob("*.safetensors")):
        for stored in read_header(shard):
            tensors[stored.name] = to_f32(stored.read(), stored.dtype).reshape(stored.shape)
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(".mlp.gate_proj.weight")]:
        prefix = name.removesuffix("gate_proj.weight")
        gate, up, down = (tensors.pop(f"{prefix}{role}_proj.weight") for role in ("gate", "up", "down"))
        tensors |= _block(prefix, (gate, up, np.float32(0.5) * down), rng)
    write_file(out / "model.safetensors", [(name, "F32", values) for name, values in tensors.items()], {})
    return out


def _block(prefix: str, ffn: tuple[Matrix, Matrix, Matrix], rng: np.random.Generator) -> dict[str, Matrix]:
    hidden = ffn[0].shape[1]

    def noisy(matrix: Matrix) -> Matrix:
        return matrix + np.float32(NOISE * matrix.std()) * rng.standard_normal(matrix.shape, np.float32)

    experts = [tuple(map(noisy, ffn)) for _ in range(EXPERTS)]
    roles = ("gate_proj", "up_proj", "down_proj")
    block = {
        f"{prefix}gate.weight": np.float32(ROUTER) * rng.standard_normal((EXPERTS, hidden), np.float32),
        # the sigmoid of a small number: about a half, so the shared expert's output is doubled
        f"{prefix}shared_expert_gate.weight": np.float32(0.02) * rng.standard_normal((1, hidden), np.float32),
    }
    for role, matrix in zip(roles, map(noisy, ffn), strict=True):
        block[f"{prefix}shared_expert.{role}.weight"] = 2 * matrix if role == "down_proj" else matrix
    if prefix.startswith("mtp."):
        for number, expert in enumerate(experts):
            for role, matrix in zip(roles, expert, strict=True):
                block[f"{prefix}experts.{number}.{role}.weight"] = matrix
    else:
        block[f"{prefix}experts.gate_up_proj"] = np.stack([np.concatenate(e[:2]) for e in experts])
        block[f"{prefix}experts.down_proj"] = np.stack([e[2] for e in experts])
    return block


if __name__ == "__main__":
    upcycle(Path(sys.argv[1]), Path(sys.argv[2]))
