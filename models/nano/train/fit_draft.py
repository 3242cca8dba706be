"""Training of the block drafter: the trunk stays as it is, the documents are those that it learnt from.

Blocks begin at tokens of replies. What is learnt of a block are the trunk's own greedy tokens, up to the
first one that is not the document's: from there on greedy decoding would have gone another way. Later
positions count less, exp(-i / DECAY), as in the paper: a draft is of use up to its first wrong token.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from models.nano.train.batches import Stream
from models.nano.train.checkpoint import load_checkpoint
from models.nano.train.dflash import DFlash, DraftShape, features, save
from models.nano.train.fit import loader, optimizers, rate_at, write_log
from models.nano.train.model import initialise

if TYPE_CHECKING:
    from pathlib import Path

    from models.nano.train.batches import Batch
    from models.nano.train.model import Trunk

DECAY = 7.0
BLOCKS = (8, 16)
"""Tokens of a block: one of these for each batch."""
LONGEST = 1_024
"""Tokens of the longest documents: attention holds a mask of blocks by tokens."""


@dataclass(frozen=True)
class DraftSettings:
    """minutes: time for the steps; rows: of blocks in a batch, all documents together."""

    tokenizer: Path
    target: Path
    out: Path
    minutes: float
    rows: int = 32_768
    batch_tokens: int = 32_768
    workers: int = 14
    rate: float = 1.0
    seed: int = 1


class Blocks(NamedTuple):
    """Blocks in a batch of documents: position and token of the first of each (documents, blocks), what the
    others should be (documents, blocks, block - 1), and which of them count."""

    at: Tensor
    newest: Tensor
    wanted: Tensor
    counts: Tensor


def choose(tokens: Tensor, learns: Tensor, greedy: Tensor, blocks: int, block: int) -> Blocks:
    """Blocks at random tokens of replies; all arguments are (documents, length).

    `learns` marks the tokens of replies, `greedy` what the trunk gives after each token.
    """
    length = tokens.shape[1]
    starts = learns.float() + 1e-9  # a document without a reply: any token, none of which count
    at = torch.multinomial(starts, blocks, replacement=True)
    places = at[..., None] + torch.arange(1, block, device=at.device)
    inside = places < length
    places = places.clamp(max=length - 1).flatten(1)
    wanted = greedy.gather(1, places - 1).unflatten(1, (blocks, block - 1))
    same = wanted == tokens.gather(1, places).unflatten(1, (blocks, block - 1))
    reply = learns.gather(1, places).unflatten(1, (blocks, block - 1)) & inside
    before = torch.cat([torch.ones_like(same[..., :1]), same[..., :-1]], -1).cumprod(-1).bool()
    return Blocks(at, tokens.gather(1, at), wanted, reply & before & learns.gather(1, at)[..., None])


def loss_and_length(
    drafter: DFlash, trunk: Trunk, batch: Batch, rows: int, block: int
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of a batch's blocks, and the tokens of a block that are right on average."""
    tokens = batch.tokens
    learns = torch.zeros_like(tokens[:, 1:], dtype=torch.bool)
    learns.view(-1)[batch.next_at] = True
    learns = F.pad(learns, (1, 0))
    with torch.no_grad():
        given, hidden = features(trunk, tokens, drafter.shape.target_layers)
        greedy = trunk.logits(hidden).argmax(-1)
    blocks = choose(tokens, learns, greedy, max(1, rows // (block * len(tokens))), block)
    drafted = drafter(given.detach(), blocks.newest, blocks.at, trunk, block)[:, :, 1:]
    counted = blocks.counts.flatten().nonzero().squeeze(1)
    logits = trunk.logits(drafted.flatten(0, 2)[counted]).float()
    wanted = blocks.wanted.flatten()[counted]
    weights = torch.exp(-torch.arange(block - 1, device=tokens.device) / DECAY)
    weights = weights.expand(blocks.counts.shape).flatten()[counted]
    loss = (F.cross_entropy(logits, wanted, reduction="none") * weights).sum() / weights.sum().clamp(min=1e-6)
    hits = torch.zeros_like(blocks.counts).flatten()
    hits[counted] = logits.argmax(-1) == wanted
    whole = blocks.counts[..., 0]
    right = hits.view(blocks.counts.shape).cumprod(-1).sum(-1)[whole].float().mean()
    return loss, right


def fit_draft(settings: DraftSettings) -> None:
    """Train for a time, and leave the drafter's checkpoint and log.json in `settings.out`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed)
    trunk, _ = load_checkpoint(settings.target)
    trunk.requires_grad_(False).to(device)
    drafter = DFlash(DraftShape())
    initialise(drafter, drafter.shape.layers)
    drafter.to(device)
    steppers = optimizers([drafter], settings.rate)
    groups = [group for stepper in steppers for group in stepper.param_groups]
    full = [group["lr"] for group in groups]
    stream = Stream(settings.tokenizer, settings.batch_tokens, settings.seed)
    log: list[dict[str, float]] = []
    began, limit, step = time.monotonic(), settings.minutes * 60, 0
    for batch in loader(stream, settings.workers, device):
        elapsed = time.monotonic() - began
        if elapsed >= limit:
            break
        if batch.tokens.shape[1] > LONGEST:
            continue
        for group, rate in zip(groups, full, strict=True):
            group["lr"] = rate * rate_at(max(elapsed / limit, 1e-3))
        on_device = type(batch)(*(t.to(device, non_blocking=True) for t in batch))
        block = rng.choice(BLOCKS)
        with torch.autocast(device.type, torch.bfloat16):
            loss, right = loss_and_length(drafter, trunk, on_device, settings.rows, block)
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0 or step <= 3:
            value, length = loss.item(), right.item()
            if not math.isfinite(value):
                raise RuntimeError(f"the loss is {value} at step {step}: lower --rate")
            print(
                f"step {step}  {elapsed:.0f} s  block {block}  loss {value:.4f}  right {length:.2f}",
                flush=True,
            )
            log.append({"step": step, "seconds": elapsed, "block": block, "loss": value, "right": length})
    save(settings.out, drafter)
    write_log(settings, log)
