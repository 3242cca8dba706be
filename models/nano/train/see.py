"""Greedy answers to the held-out questions about pictures from the reference implementation, in float32."""

from __future__ import annotations

import json
from base64 import b64decode
from importlib.metadata import version
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen3_5ForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from models.nano.train import heldout
from models.nano.train.fit_vision import AFTER, BEFORE, START

if TYPE_CHECKING:
    from pathlib import Path

NEW_TOKENS = 16
PART = "pictures"


class Reader:
    """transformers' whole model, its tokenizer and its preparation of pictures."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.pad = self.model.config.image_token_id

    def inputs(self, images: list[Any], behind: str) -> dict[str, Any]:
        """Pictures that a user shows, and the text behind them; what the model is called with."""
        given = self.processor(images=images, return_tensors="pt")
        ids: list[int] = []
        for image, grid in enumerate(given["image_grid_thw"]):
            tokens = int(grid.prod()) // self.processor.merge_size**2
            start = BEFORE if image == 0 else AFTER + START
            ids += self.tokenizer(start).input_ids + [self.pad] * tokens
        row = torch.tensor([ids + self.tokenizer(AFTER + behind).input_ids])
        return {
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            "mm_token_type_ids": (row == self.pad).long(),
            **given,
        }

    @torch.no_grad()
    def answer(self, image: Image.Image, question: str) -> str:
        inputs = self.inputs([image], f"{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
        stop = [self.tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")]
        out = self.model.generate(
            **inputs, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=stop, pad_token_id=stop[1]
        )
        answer: str = self.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return answer.strip()


def shown(row: heldout.Row) -> Image.Image:
    """The picture of a held-out row."""
    return Image.open(BytesIO(b64decode(row["picture"].partition(",")[2]))).convert("RGB")


def see(model: Path, folder: Path, out: Path) -> None:
    """Ask all of the held-out questions, print accuracies, and put the outcomes into the reference `out`."""
    reader = Reader(model)
    outcomes: dict[str, bool] = {}
    kinds: dict[str, list[bool]] = {}
    for row in heldout.read(folder, heldout.PICTURES_FILE):
        right = reader.answer(shown(row), row["question"]) == row["answer"]
        outcomes[str(row["id"])] = right
        kinds.setdefault(row["kind"], []).append(right)
    for kind, found in [*sorted(kinds.items()), ("all", list(outcomes.values()))]:
        print(f"{kind}: {sum(found) / len(found):.3f} of {len(found)}")
    content = json.loads(out.read_text(encoding="utf-8"))
    content[PART] = {
        "implementation": f"transformers {version('transformers')}, float32, greedy",
        "max_tokens": NEW_TOKENS,
        "items": outcomes,
    }
    lines = [f'"{name}": {json.dumps(value)}' for name, value in content.items()]
    part = out.with_name(out.name + ".part")
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    part.replace(out)
