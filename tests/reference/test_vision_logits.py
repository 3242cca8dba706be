"""What nano makes of pictures, by libmtmd and llama.cpp against transformers' Qwen3.5, both in F32.

Pictures are of whole tokens: no resizing, in which the two have different filters. What differs in the tower
is in test_vision_tower.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_serve.llamacpp.vision import VisionTower
from qwen_serve.server.engine.pictures import Picture, row_ids
from tests.reference.seeing import write_tower
from tests.server.engine.test_pictures import Bare, Part
from tests.server.seeing import needs_vision

pytestmark = [pytest.mark.reference, needs_vision]

QUESTION = "Which shape is it?"


@pytest.fixture(scope="module")
def bare(nano_f32: Path) -> Iterator[Bare]:
    made = Bare(nano_f32)
    yield made
    made.close()


@pytest.fixture(scope="module")
def tower(bare: Bare, checkpoint: Path) -> Iterator[VisionTower]:
    path = write_tower(checkpoint)
    with VisionTower(path, bare.model, threads=1, flash_attn=False, warm_up=False) as loaded:
        yield loaded


@pytest.mark.parametrize(
    "sizes",
    [[(3, 3)], [(4, 3)], [(5, 9)], [(12, 10)], [(4, 3), (2, 7)]],
    ids=["3 x 3", "4 x 3", "5 x 9", "12 x 10", "two"],
)
def test_logits_are_those_of_transformers(
    reader: Any, bare: Bare, tower: VisionTower, sizes: list[tuple[int, int]]
) -> None:
    import torch

    pictures = [
        np.kron(
            np.random.default_rng([columns, rows]).integers(0, 256, (rows, columns, 3), np.uint8),
            np.ones((16, 16, 1), np.uint8),
        )
        for columns, rows in sizes
    ]
    inputs = reader.inputs(pictures, QUESTION)
    with torch.no_grad():
        expected = reader.model(**inputs).logits[0, -1].numpy()
    left = list(pictures)
    prompt: list[Part] = [[]]
    for token in inputs["input_ids"][0].tolist():
        last = prompt[-1]
        if token != reader.pad:
            assert isinstance(last, list)
            last.append(token)
        elif isinstance(last, list) and last:
            prepared = tower.prepare(left.pop(0))
            rows = tower.encode(prepared)
            ids = row_ids(b"any", len(rows))
            prompt += [Picture(ids, rows, prepared.positions, prepared.n_pos), []]
    assert not left
    _, logits = bare.read(prompt)
    bare.context.clear()
    n = bare.model.n_real
    difference = np.abs(logits[:n] - expected[:n]).max() / np.abs(expected[:n]).max()
    print(f"{sizes}: {difference:.1e} of the largest logit")
    assert difference < 5e-3
    assert logits[:n].argmax() == expected[:n].argmax()
