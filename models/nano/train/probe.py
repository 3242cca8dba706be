"""How training is going: share of held-out replies that greedy decoding would give word for word.

Teacher-forced, so one pass is enough: all of a reply's tokens are the most likely ones exactly when greedy
decoding writes that reply. It is a lower bound of the accuracy, which `evaluate` measures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.nano.train import heldout
from models.nano.train.batches import Encoded, bucket_of, collate, encode
from models.nano.train.document import Reply, Segment, chat
from models.nano.train.fusion import Fusion

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

    from models.nano.train.document import Document
    from models.nano.train.model import Trunk
    from models.nano.train.mtp import MTP

ITEMS = 256
BATCH_TOKENS = 65_536


def documents(folder: Path) -> dict[str, list[Document]]:
    """About ITEMS held-out items of each family, with reference replies; reasoning with thinking off too."""
    out: dict[str, list[Document]] = {}
    shots = heldout.read(folder, heldout.SHOTS_FILE)
    for name in heldout.FAMILIES:
        all_rows = heldout.read(folder, name)
        for row in all_rows[:: max(1, len(all_rows) // ITEMS)]:
            messages = heldout.messages(row, name, shots)
            label, thinking = name, bool(row.get("thinking"))
            if messages is None:
                document = [Segment(row["prompt"], False), Segment(row["answer"], True)]
                out.setdefault("repeat", []).append(document)
                continue
            if name == "knowledge":
                answer = row["cot_content"].split("step by step. ")[1]
                reply = Reply("", answer)
            elif name == "instructions":
                reply = Reply("", row["reference"])
            elif name == "reasoning":
                reply = Reply(row["reasoning"], f"The answer is {row['answer']}.")
                out.setdefault("reasoning, no thinking", []).append(chat(messages, reply, False))
                thinking = True
            else:
                reply = Reply(row.get("reasoning", ""), row["answer"])
                label = "arithmetic"
            out.setdefault(label, []).append(chat(messages, reply, thinking))
    return out


def load(folder: Path, tokenizer: Tokenizer) -> dict[str, list[Encoded]]:
    return {name: [encode(tokenizer, d) for d in group] for name, group in documents(folder).items()}


@torch.no_grad()
def hits(trunk: Trunk, mtp: MTP, rows: list[Encoded]) -> tuple[Tensor, Tensor]:
    """For each row: whether the whole reply is the greedy one, and what share of it the draft head names."""
    device = trunk.embed_tokens.weight.device
    length = bucket_of(max(len(row.tokens) for row in rows))
    tokens = collate(rows, length).tokens.to(device)
    learn = torch.zeros_like(tokens, dtype=torch.bool)
    for i, row in enumerate(rows):
        learn[i, : len(row.learn)] = torch.tensor(row.learn, device=device)
    with Fusion.paused(), torch.autocast(device.type, torch.bfloat16):
        hidden = trunk(tokens)
        right = trunk.logits(hidden[:, :-1]).argmax(-1) == tokens[:, 1:]
        drafted = mtp(hidden[:, :-1], trunk.embed_tokens(tokens[:, 1:]))
        named = trunk.logits(drafted[:, :-1]).argmax(-1) == tokens[:, 2:]
    exact = (right | ~learn[:, 1:]).all(1)
    share = (named & learn[:, 2:]).sum(1) / learn[:, 2:].sum(1).clamp(min=1)
    return exact, share


def report(trunk: Trunk, mtp: MTP, probes: dict[str, list[Encoded]]) -> dict[str, float]:
    """Print and return the shares by family."""
    out: dict[str, float] = {}
    for name, rows in probes.items():
        rows = sorted(rows, key=lambda row: len(row.tokens))
        exact, share = [], []
        size = max(1, BATCH_TOKENS // bucket_of(len(rows[-1].tokens)))
        for start in range(0, len(rows), size):
            one, two = hits(trunk, mtp, rows[start : start + size])
            exact.append(one)
            share.append(two)
        out[name] = torch.cat(exact).float().mean().item()
        out[f"{name}, drafts"] = torch.cat(share).mean().item()
    print("  probe: " + "  ".join(f"{name} {value:.3f}" for name, value in out.items()), flush=True)
    return out
