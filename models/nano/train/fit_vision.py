"""Training of the vision tower: the text model stays as it is, bit for bit.

What the tower learns is to make rows that have the text model answer: the loss is that of the answers' tokens
alone, through all of its layers.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

from models.nano.train import pictures
from models.nano.train.checkpoint import load_checkpoint, load_tower, save_tower
from models.nano.train.fit import loader, optimizers, rate_at, write_log
from models.nano.train.heldout import COUNT
from models.nano.train.shape import VisionShape
from models.nano.train.vision import Tower, initialise_tower

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from models.nano.train.model import Trunk

TOKEN = 16
"""Pixels along either side of a token."""
GRIDS = ((3, 7), (3, 14))
SHARES = (0.85, 0.15)
"""Tokens along either side of pictures, at least and at most, and the shares of batches with such ones."""
START, AFTER = "<|vision_start|>", "<|vision_end|>"
BEFORE = f"<|im_start|>user\n{START}"
THOUGHT = "I will look at the picture."
THINKING = 0.25
"""Share of the answers that begin with a thought."""
TEXT = 26
"""Tokens of a question and its answer, about."""
MULTI = 3
"""Questions in a row about one picture, at most."""


@dataclass(frozen=True)
class VisionSettings:
    """minutes: time for the steps; batch_tokens: of a batch, pictures and text."""

    tokenizer: Path
    model: Path
    out: Path
    minutes: float
    batch_tokens: int = 2_048
    workers: int = 1
    rate: float = 1.0
    seed: int = 1
    start_from: Path | None = None


class Batch(NamedTuple):
    """Pictures of one size, bytes (batch, height, width, 3); the tokens of the questions and answers behind
    each (batch, length), padded on the right, and which of them are learnt."""

    pixels: Tensor
    tokens: Tensor
    learn: Tensor


def talk(
    tokenizer: Tokenizer, questions: list[tuple[str, str]], thinking: bool
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation behind its picture, and which are learnt."""
    tokens: list[int] = []
    learn: list[bool] = []

    def add(text: str, learnt: bool) -> None:
        ids = tokenizer.encode(text).ids
        tokens.extend(ids)
        learn.extend([learnt] * len(ids))

    for number, (question, answer) in enumerate(questions):
        start = AFTER if number == 0 else "\n<|im_start|>user\n"
        last = number == len(questions) - 1
        head = f"{start}{question}<|im_end|>\n<|im_start|>assistant\n"
        if not last:  # as the template shows earlier answers
            add(head, False)
            add(f"{answer}<|im_end|>", True)
        elif thinking:
            add(f"{head}<think>\n", False)
            add(f"{THOUGHT}\n</think>\n\n{answer}<|im_end|>", True)
        else:
            add(f"{head}<think>\n\n</think>\n\n", False)
            add(f"{answer}<|im_end|>", True)
    return tokens, learn


class Stream(IterableDataset[Batch]):
    """Batches without end; each worker draws its own."""

    def __init__(self, tokenizer_file: Path, batch_tokens: int, seed: int) -> None:
        self.tokenizer_file = tokenizer_file
        self.batch_tokens = batch_tokens
        self.seed = seed

    def __iter__(self) -> Iterator[Batch]:
        torch.set_num_threads(1)
        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        worker = get_worker_info()
        rng = random.Random(self.seed * 1_000 + (worker.id if worker else 0))
        while True:
            yield self.batch(tokenizer, rng)

    def batch(self, tokenizer: Tokenizer, rng: random.Random) -> Batch:
        grid = rng.choices(GRIDS, SHARES)[0]
        columns, rows = rng.randint(*grid), rng.randint(*grid)
        size, multi = (columns * TOKEN, rows * TOKEN), rng.randint(1, MULTI)
        number = max(1, self.batch_tokens // (columns * rows + TEXT * multi))
        images, talks = [], []
        for _ in range(number):
            # drawn a little larger or smaller, as pictures are that are resized to whole tokens
            width, height = (side + rng.choice((0, rng.randint(-8, 8))) for side in size)
            _, scene, questions = pictures.scene(rng, width, height)
            image = scene.drawn()
            if image.size != size:
                image = image.resize(size, Image.Resampling.BICUBIC)
            images.append(torch.from_numpy(np.array(image)))
            talks.append(talk(tokenizer, questions[:multi], rng.random() < THINKING))
        length = max(len(tokens) for tokens, _ in talks)
        tokens = torch.zeros(number, length, dtype=torch.int64)
        learn = torch.zeros(number, length, dtype=torch.bool)
        for i, (ids, learnt) in enumerate(talks):
            tokens[i, : len(ids)] = torch.tensor(ids)
            learn[i, : len(ids)] = torch.tensor(learnt)
        return Batch(torch.stack(images), tokens, learn)


def turns(trunk: Trunk, before: int, columns: int, rows: int, after: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (time, rotary dim / 2) of a text with a picture in it: in turn, a pair of a head is
    rotated by time, by row and by column, of which the last has the fewest."""
    device = trunk.rotary.frequency.device
    pairs = len(trunk.rotary.frequency)
    behind = before + max(columns, rows)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    grid = torch.stack([torch.zeros_like(row), row, column]).flatten(1) + before
    place = torch.cat(
        [torch.arange(before).expand(3, -1), grid, torch.arange(behind, behind + after).expand(3, -1)], 1
    ).to(device)
    plane = torch.arange(pairs, device=device) % 3
    angle = place[plane].T * trunk.rotary.frequency
    return angle.cos(), angle.sin()


def loss_and_right(tower: Tower, trunk: Trunk, batch: Batch, before: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of what is learnt of a batch, and the share of conversations that are all right."""
    rows, columns = (side // TOKEN for side in batch.pixels.shape[1:3])
    seen = tower(batch.pixels.permute(0, 3, 1, 2).float() / 127.5 - 1)
    head = trunk.embed_tokens(before).expand(len(seen), -1, -1)
    x = torch.cat([head, seen.to(head.dtype), trunk.embed_tokens(batch.tokens)], 1)
    cos, sin = turns(trunk, len(before), columns, rows, batch.tokens.shape[1])
    for layer in trunk.layers:
        x = layer(x, cos, sin)
    start = len(before) + columns * rows
    hidden = trunk.norm(x[:, start - 1 : -1])[batch.learn]
    logits = trunk.logits(hidden).float()
    wanted = batch.tokens[batch.learn]
    wrong = torch.zeros_like(batch.learn)
    wrong[batch.learn] = logits.argmax(-1) != wanted
    return F.cross_entropy(logits, wanted), (~wrong.any(1)).float().mean()


@torch.no_grad()
def held_out_right(tower: Tower, trunk: Trunk, tokenizer: Tokenizer, before: Tensor) -> dict[str, float]:
    """Share of the held-out questions, by kind of picture, whose answer greedy decoding would give."""
    found: dict[str, list[float]] = {}
    for item in pictures.held_out_items(COUNT):
        size = [max(3, round(side / TOKEN)) * TOKEN for side in item.scene.drawn().size]
        image = item.scene.drawn().resize((size[0], size[1]), Image.Resampling.BICUBIC)
        tokens, learn = talk(tokenizer, [(item.question, item.answer)], thinking=False)
        batch = Batch(torch.from_numpy(np.array(image))[None], torch.tensor([tokens]), torch.tensor([learn]))
        _, right = loss_and_right(tower, trunk, Batch(*(t.to(before.device) for t in batch)), before)
        found.setdefault(item.kind, []).append(right.item())
    return {kind: sum(right) / len(right) for kind, right in sorted(found.items())}


def fit_vision(settings: VisionSettings) -> None:
    """Train for a time, and leave the tower's tensors and log.json in `settings.out`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(settings.seed)
    trunk, _ = load_checkpoint(settings.model)
    trunk.requires_grad_(False).to(device)
    if settings.start_from is None:
        tower = Tower(VisionShape(), trunk.shape.hidden)
        initialise_tower(tower, trunk.embed_tokens.weight.std().item())
    else:
        tower = load_tower(settings.start_from)
    tower.to(device)
    tokenizer = Tokenizer.from_file(str(settings.tokenizer))
    before = torch.tensor(tokenizer.encode(BEFORE).ids, device=device)
    steppers = optimizers([tower], settings.rate)
    groups = [group for stepper in steppers for group in stepper.param_groups]
    full = [group["lr"] for group in groups]
    stream = Stream(settings.tokenizer, settings.batch_tokens, settings.seed)
    log: list[dict[str, float]] = []
    began, limit, step = time.monotonic(), settings.minutes * 60, 0
    sums = torch.zeros(3, device=device)
    for batch in loader(stream, settings.workers, device):
        elapsed = time.monotonic() - began
        if elapsed >= limit:
            break
        for group, rate in zip(groups, full, strict=True):
            group["lr"] = rate * rate_at(max(elapsed / limit, 1e-3))
        on_device = Batch(*(t.to(device, non_blocking=True) for t in batch))
        with torch.autocast(device.type, torch.bfloat16):
            loss, right = loss_and_right(tower, trunk, on_device, before)
        loss.backward()
        nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        step += 1
        sums += torch.stack([loss.detach(), right, torch.ones_like(right)])
        if step % 50 == 0 or step <= 3:
            value, share = (sums[:2] / sums[2]).tolist()
            sums.zero_()
            if not math.isfinite(value):
                raise RuntimeError(f"the loss is {value} at step {step}: lower --rate")
            print(f"step {step}  {elapsed:.0f} s  loss {value:.4f}  right {share:.3f}", flush=True)
            log.append({"step": step, "seconds": elapsed, "loss": value, "right": share})
    held_out = held_out_right(tower, trunk, tokenizer, before)
    print(f"{step} steps; held out: {held_out}", flush=True)
    settings.out.mkdir(parents=True, exist_ok=True)
    save_tower(settings.out / "tower.safetensors", tower)
    write_log(settings, log, held_out=held_out)
