"""The held-out items that gates ask: as many a level, each with its right answer in it."""

from __future__ import annotations

import random
from base64 import b64decode
from collections import Counter
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from models.nano.train import pictures
from tests import heldout


def test_each_family_has_as_many_items_of_any_level() -> None:
    for family in heldout.FAMILIES[:3]:
        found = Counter(row["level"] for row in heldout.read(family))
        assert found.total() >= 300
        assert len(set(found.values())) == 1, found


def test_knowledge_items_name_the_right_option() -> None:
    for row in heldout.read("knowledge") + heldout.read(heldout.SHOTS):
        assert len(set(row["options"])) == len(row["options"]) == 10
        assert heldout.LETTERS[row["answer_index"]] == row["answer"]
        assert row["options"][row["answer_index"]] in row["cot_content"]
        assert row["cot_content"].endswith(f"The answer is ({row['answer']}).")


def test_reasoning_items_have_four_choices_and_end_in_the_right_one() -> None:
    for row in heldout.read("reasoning"):
        choices = [row[f"choice{n}"] for n in range(1, 5)]
        right = choices["ABCD".index(row["answer"][1])]
        assert len(set(choices)) == 4
        assert row["reasoning"].endswith(f"The result is {right}. That is choice {row['answer'][1]}.")


def test_instructions_have_arguments_for_each_of_a_dozen_ids() -> None:
    rows = heldout.read("instructions")
    assert len({name for row in rows for name in row["instruction_id_list"]}) >= 12
    assert all(len(row["instruction_id_list"]) == len(row["kwargs"]) for row in rows)


def test_pictures_are_those_of_the_generator_and_none_that_training_draws() -> None:
    rows, made = heldout.read("pictures"), list(pictures.held_out_items(300))
    assert len(rows) == len({item.key for item in made}) == 300
    for row, item in zip(rows, made, strict=True):
        assert (row["kind"], row["question"], row["answer"]) == (item.kind, item.question, item.answer)
        stored = Image.open(BytesIO(b64decode(row["picture"].partition(",")[2]))).convert("RGB")
        drawn = np.asarray(item.scene.drawn(), np.int16)
        assert np.abs(np.asarray(stored, np.int16) - drawn).mean() < 3, "but for rounding to 32 colours"
    held_out, rng = {item.key for item in made}, random.Random(1)
    for _ in range(300):
        kind, scene, questions = pictures.scene(rng, 80, 64)
        assert pictures.Item(kind, scene, "", "").key not in held_out
        assert questions


@pytest.mark.parametrize("kind", pictures.KINDS)
def test_every_mark_is_inside_its_picture(kind: str) -> None:
    rng = random.Random(0)
    for _ in range(200):
        width, height = rng.randint(*pictures.SIDES), rng.randint(*pictures.SIDES)
        scene, _ = pictures.KINDS[kind](rng, width, height)
        for mark in scene.marks:
            assert 0 <= mark.x < width and 0 <= mark.y < height
            assert mark.side <= min(width, height)
