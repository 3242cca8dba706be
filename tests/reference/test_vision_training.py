"""The modules that trained nano's vision tower against transformers' Qwen3.5, with the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.reference


@pytest.mark.parametrize(("columns", "rows"), [(3, 3), (4, 3), (5, 9)])
def test_rows_and_logits_are_those_of_transformers(
    reader: Any, checkpoint: Path, columns: int, rows: int
) -> None:
    """Of the tower, and of the text model behind it with positions in rows and columns."""
    import torch
    from PIL import Image

    from models.nano.train.checkpoint import SHARDS, load_checkpoint, load_tower
    from models.nano.train.fit_vision import AFTER, BEFORE, TOKEN, turns

    tower, (trunk, _) = load_tower(checkpoint / SHARDS[1]), load_checkpoint(checkpoint)
    pixels = np.random.default_rng([columns, rows]).integers(0, 256, (rows, columns, 3), np.uint8)
    image = Image.fromarray(pixels).resize((columns * TOKEN, rows * TOKEN), Image.Resampling.BICUBIC)
    inputs = reader.inputs([image], "Which shape is it?")
    with torch.no_grad():
        given = torch.from_numpy(np.array(image))[None].permute(0, 3, 1, 2).float() / 127.5 - 1
        seen = tower(given)
        expected = reader.model.model.visual(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        assert (seen[0] - expected).abs().max() < 1e-4 * expected.abs().max()
        before, after = (
            torch.tensor(reader.tokenizer(text).input_ids) for text in (BEFORE, AFTER + "Which shape is it?")
        )
        x = torch.cat([trunk.embed_tokens(before), seen[0], trunk.embed_tokens(after)])[None]
        cos, sin = turns(trunk, len(before), columns, rows, len(after))
        for layer in trunk.layers:
            x = layer(x, cos, sin)
        logits = trunk.logits(trunk.norm(x))
        theirs = reader.model(**inputs).logits
    assert (logits - theirs).abs().max() < 1e-3 * theirs.abs().max()
