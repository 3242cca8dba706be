"""A picture's rows by libmtmd against transformers' Qwen3.5 tower, both in F32, of the same random weights.

What differs: ggml's GELU on a CPU is a table in F16, and between the two matrices of the merger it is the
tanh approximation where transformers has the exact one. So rows agree to a thousandth of their size, not to
F32's own precision. Pictures whose sides are whole rows of tokens need no resizing, in which the two have
different bicubic filters.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.cli import main
from qwen_serve.llamacpp import Model
from qwen_serve.llamacpp.vision import VisionTower, has_vision
from tests.checkpoints import PATCH, PREPROCESSOR, vision_config, write_checkpoint

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(not has_vision(), reason="llama.cpp was built without libmtmd"),
]

TOKEN = 2 * PATCH
MEAN, STD = [0.48, 0.45, 0.40], [0.26, 0.25, 0.27]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tower")
    checkpoint = write_checkpoint(made / "Random-1B", vision=True, dtype="F32")
    text = (checkpoint / "preprocessor_config.json").read_text(encoding="utf-8")
    for name, values in (("image_mean", MEAN), ("image_std", STD)):
        assert PREPROCESSOR[name] == [0.5, 0.5, 0.5]
        text = text.replace(f'"{name}": [\n    0.5,\n    0.5,\n    0.5\n  ]', f'"{name}": {values}')
    (checkpoint / "preprocessor_config.json").write_text(text, encoding="utf-8")
    assert main(["--src", str(checkpoint), "--out", str(made), "--quant", "F32", "--outtype", "F32"]) == 0
    return made


@pytest.fixture(scope="module")
def tower(folder: Path) -> Iterator[VisionTower]:
    with (
        Model(folder / "Random-1B-F32.gguf", n_gpu_layers=0) as model,
        VisionTower(
            folder / "mmproj-Random-1B-F32.gguf", model, threads=1, flash_attn=False, warm_up=False
        ) as loaded,
    ):
        yield loaded


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """transformers' module with the checkpoint's tensors."""
    import torch
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    shape = {k: v for k, v in vision_config().items() if k not in {"model_type", "deepstack_visual_indexes"}}
    module = Qwen3_5VisionModel(Qwen3_5VisionConfig(**shape)).eval()
    prefix = "model.visual."
    weights = {
        name.removeprefix(prefix): torch.from_numpy(tensor.read().reshape(tensor.shape))
        for name, tensor in Checkpoint.open(folder / "Random-1B").tensors.items()
        if name.startswith(prefix)
    }
    module.load_state_dict(weights)
    return module


def their_rows(module: Any, rgb: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        do_resize=False, image_mean=MEAN, image_std=STD, patch_size=PATCH, temporal_patch_size=2, merge_size=2
    )
    given = processor(images=[rgb], return_tensors="pt")
    with torch.no_grad():
        rows: npt.NDArray[np.float32] = module(
            given["pixel_values"], given["image_grid_thw"]
        ).pooler_output.numpy()
    return rows


@pytest.mark.parametrize(("columns", "rows"), [(3, 3), (4, 3), (3, 5), (1, 9), (12, 10)])
def test_rows_are_those_of_transformers(tower: VisionTower, theirs: Any, columns: int, rows: int) -> None:
    rgb = np.random.default_rng([columns, rows]).integers(
        0, 256, (rows * TOKEN, columns * TOKEN, 3), np.uint8
    )
    prepared = tower.prepare(rgb)
    assert prepared.n_rows == columns * rows
    ours, expected = tower.encode(prepared), their_rows(theirs, rgb)
    difference = np.abs(ours - expected).max() / np.abs(expected).max()
    print(f"{columns} x {rows}: {difference:.2e} of the largest value")
    assert difference < 1e-3
    # what the tower makes of another picture is further away by far
    flipped = their_rows(theirs, rgb[::-1].copy())
    assert np.abs(ours - flipped).max() / np.abs(expected).max() > 0.05


def test_positions_are_those_of_transformers(tower: VisionTower) -> None:
    """Two pictures in a text: where each row and each token after them stands."""
    import torch
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

    sizes = [(4, 3), (2, 7)]
    pieces: list[npt.NDArray[np.int32]] = []
    kinds: list[int] = []
    at = 0
    for text, (columns, rows) in zip((5, 3), sizes, strict=True):
        prepared = tower.measure(columns * TOKEN, rows * TOKEN)
        pieces += [
            np.tile(np.arange(at, at + text, dtype=np.int32), (3, 1)),
            prepared.positions[:3] + at + text,
        ]
        kinds += [0] * text + [1] * prepared.n_rows
        at += text + prepared.n_pos
    pieces.append(np.tile(np.arange(at, at + 4, dtype=np.int32), (3, 1)))
    kinds += [0] * 4
    with torch.device("meta"):
        module = Qwen3_5Model(
            Qwen3_5Config(text_config={"num_hidden_layers": 4, "vocab_size": 64, "hidden_size": 64})
        )
    grid = torch.tensor([[1, 2 * rows, 2 * columns] for columns, rows in sizes])
    found, _ = module.get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.long), torch.tensor([kinds]), image_grid_thw=grid
    )
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), found[:, 0].numpy())
