"""Greedy replies to the held-out items from the reference implementation, in float32.

The trunk is transformers' own; the draft head, which transformers ignores, is the training module. A reply's
line in the output also says how many of its tokens the draft head named one step ahead.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from models.nano.train import heldout
from models.nano.train.checkpoint import load_checkpoint
from models.nano.train.document import prompt_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from models.nano.train.model import Trunk
    from models.nano.train.mtp import MTP

# attention in float32 holds all scores of these rows at once
DRAFT_ROWS = 16
NEW_TOKENS = {"knowledge": 48, "instructions": 256, "reasoning": 256, "continuation": 96}


@dataclass(frozen=True)
class Prompt:
    """One run of one held-out item."""

    family: str
    index: int
    thinking: bool
    tokens: list[int]


def prompts(folder: Path, tokenizer: Any, families: Sequence[str], limit: int) -> list[Prompt]:
    """Every item once; the reasoning items with thinking."""
    shots = heldout.read(folder, heldout.SHOTS_FILE)
    out = []
    for family in families:
        rows = heldout.read(folder, family)
        step = max(1, len(rows) // limit) if limit else 1
        for index in range(0, len(rows), step):
            row = rows[index]
            messages = heldout.messages(row, family, shots)
            thinking = family == "reasoning" or bool(row.get("thinking"))
            text = row["prompt"] if messages is None else prompt_text(messages, thinking)
            out.append(Prompt(family, index, thinking, tokenizer(text).input_ids))
    return out


@torch.no_grad()
def complete(model: Any, batch: list[Prompt], stop: list[int], pad: int) -> list[list[int]]:
    """Greedy continuations, the stop token included where one came."""
    device = model.device
    width = max(len(p.tokens) for p in batch)
    tokens = torch.full((len(batch), width), pad, device=device)
    mask = torch.zeros_like(tokens)
    for i, prompt in enumerate(batch):
        tokens[i, width - len(prompt.tokens) :] = torch.tensor(prompt.tokens, device=device)
        mask[i, width - len(prompt.tokens) :] = 1
    out = model.generate(
        input_ids=tokens,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NEW_TOKENS[batch[0].family],
        eos_token_id=stop,
        pad_token_id=pad,
    )
    replies = []
    for row in out[:, width:].tolist():
        ends = [i for i, token in enumerate(row) if token in stop]
        replies.append(row[: ends[0] + 1] if ends else row)
    return replies


@torch.no_grad()
def drafts_accepted(
    trunk: Trunk, mtp: MTP, batch: list[Prompt], replies: list[list[int]]
) -> list[tuple[int, int]]:
    """For each reply: how many of its tokens, from the second on, the draft head names, of how many.

    The head has then seen the token before, and the trunk's hidden row of the one before that.
    """
    device = trunk.embed_tokens.weight.device
    rows = [prompt.tokens + reply for prompt, reply in zip(batch, replies, strict=True)]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64, device=device)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row, device=device)
    hidden = trunk(tokens)
    drafted = mtp(hidden[:, :-1], trunk.embed_tokens(tokens[:, 1:]))[:, :-1]
    right = trunk.logits(drafted).argmax(-1) == tokens[:, 2:]
    counts = []
    for i, (prompt, row) in enumerate(zip(batch, rows, strict=True)):
        first = len(prompt.tokens) - 1  # column c of `right` judges the token at c + 2
        counts.append((int(right[i, first : len(row) - 2].sum()), max(0, len(row) - 2 - first)))
    return counts


def generate(
    model_folder: Path, folder: Path, replies: Path, families: Sequence[str], limit: int, batch_tokens: int
) -> None:
    """Run the held-out items of `folder` and write one JSON object a reply to `replies`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = Qwen3_5ForCausalLM.from_pretrained(model_folder, dtype=torch.float32).to(device).eval()
    trunk, mtp = (module.to(device) for module in load_checkpoint(model_folder))
    stop = [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")]
    todo = prompts(folder, tokenizer, families, limit)
    began = time.monotonic()
    with replies.open("w", encoding="utf-8") as file:
        for family in families:
            mine = sorted((p for p in todo if p.family == family), key=lambda p: (p.thinking, len(p.tokens)))
            while mine:
                size = max(1, batch_tokens // len(mine[min(len(mine), 512) - 1].tokens))
                batch, mine = mine[: min(size, 512)], mine[min(size, 512) :]
                done = complete(model, batch, stop, stop[1])
                counts = []
                for at in range(0, len(batch), DRAFT_ROWS):
                    rows = slice(at, at + DRAFT_ROWS)
                    counts += drafts_accepted(trunk, mtp, batch[rows], done[rows])
                for prompt, reply, (accepted, drafted) in zip(batch, done, counts, strict=True):
                    line = {
                        "family": family,
                        "index": prompt.index,
                        "thinking": prompt.thinking,
                        "text": tokenizer.decode(reply).removesuffix("<|im_end|>"),
                        "ended": reply[-1] in stop,
                        "tokens": len(reply),
                        "accepted": accepted,
                        "drafted": drafted,
                    }
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
            print(f"{family}: {time.monotonic() - began:.0f} s", flush=True)
