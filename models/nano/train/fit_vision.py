"""Training of the vision tower: the text model stays as it is, bit for bit.

What the tower learns is to make rows that have the text model answer: the loss is that of the answers' tokens
alone, through all of its layers. At first the loss of a small head that answers from the rows alone is added,
which shows the tower sooner what there is to see.
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
START, AFTER = "<|vision_start|>", "<|vision_end|>"
BEFORE = f"<|im_start|>user\n{START}"
THOUGHT = "I will look at the picture."
MULTI = 3
"""Questions in a row about one picture, at most."""
HEAD_SHARE, HEAD_UNTIL = 1.0, 0.7
"""Weight of the head's loss at the start, and the share of the time after which it is none."""
LOOK, EVERY = 25.0, 200
"""Seconds between looks at the held-out questions, and steps between lines of the log."""


class Kind(NamedTuple):
    """Texts of a batch: tokens, how many of these are learnt, questions about each picture, all at most;
    the share of last answers with a thought; the share of batches."""

    length: int
    learnt: int
    questions: int
    thought: float
    share: float


KINDS = {
    "plain": Kind(28, 6, 1, 0.0, 0.40),
    "several": Kind(92, 30, MULTI, 0.4, 0.30),
    "thought": Kind(38, 18, 1, 1.0, 0.15),
    "large": Kind(38, 18, 1, 0.3, 0.15),
}
SMALL = [(columns, rows) for columns in range(3, 8) for rows in range(3, 8)]
GRIDS = {
    "plain": SMALL,
    "several": SMALL[::2],
    "thought": SMALL[1::2],
    "large": [(9, 9), (12, 8), (8, 12), (13, 5), (5, 13), (14, 11)],
}
"""Tokens across and down of pictures. They are few sizes, each of which has a CUDA graph of its own."""


@dataclass(frozen=True)
class VisionSettings:
    """minutes: time for the steps; batch_tokens: of a batch, pictures and text."""

    tokenizer: Path
    model: Path
    out: Path
    minutes: float
    batch_tokens: int = 8_192
    workers: int = 1
    rate: float = 1.0
    seed: int = 1
    start_from: Path | None = None
    graphs: bool = True


class Batch(NamedTuple):
    """Pictures of one size, bytes (batch, height, width, 3). The tokens of the questions and answers behind
    each (batch, length), padded on the right. The places in them of those that are learnt, these tokens, and
    1 for each, 0 where a text has fewer (batch, learnt). Questions and answers by their places in
    pictures.QUESTIONS and ANSWERS (batch, questions), -1 where a picture has fewer."""

    pixels: Tensor
    tokens: Tensor
    at: Tensor
    wanted: Tensor
    learnt: Tensor
    asked: Tensor
    answers: Tensor


class Head(nn.Module):
    """Answers from a picture's rows alone: a question attends to them. Needed in training only."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(len(pictures.QUESTIONS), width)
        self.norm = nn.LayerNorm(width)
        self.kv = nn.Linear(width, 2 * width)
        self.inner = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, len(pictures.ANSWERS))

    def forward(self, rows: Tensor, asked: Tensor) -> Tensor:
        """Rows (batch, tokens, width) and questions (batch, questions) to logits of the answers."""
        # by a product: the gradient of a lookup sorts, which a CUDA graph may not hold
        question = (asked[..., None] == torch.arange(len(pictures.QUESTIONS), device=asked.device)).float()
        question = question @ self.embed.weight
        key, value = self.kv(self.norm(rows)).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query = question.unflatten(-1, (self.heads, -1)).transpose(1, 2).to(key.dtype)
        found = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return self.out(F.gelu(self.inner(torch.cat([found, question.to(found.dtype)], -1))))

    def loss(self, rows: Tensor, batch: Batch) -> Tensor:
        logits = self(rows, batch.asked.clamp(min=0))
        return F.cross_entropy(logits.flatten(0, 1).float(), batch.answers.flatten(), ignore_index=-1)


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


def texts(talks: list[tuple[list[int], list[bool]]], kind: Kind) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `talk` returns, as `tokens`, `at`, `wanted` and `learnt` of a Batch."""
    tokens = torch.zeros(len(talks), kind.length, dtype=torch.int64)
    at, wanted = (torch.zeros(len(talks), kind.learnt, dtype=torch.int64) for _ in range(2))
    learnt = torch.zeros(len(talks), kind.learnt)
    for i, (ids, learn) in enumerate(talks):
        tokens[i, : len(ids)] = torch.tensor(ids)
        places = [place for place, one in enumerate(learn) if one]
        at[i, : len(places)] = torch.tensor(places)
        wanted[i, : len(places)] = torch.tensor([ids[place] for place in places])
        learnt[i, : len(places)] = 1
    return tokens, at, wanted, learnt


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
        shares = [kind.share for kind in KINDS.values()]
        while True:
            name = rng.choices(list(KINDS), shares)[0]
            yield self.batch(tokenizer, rng, name, *rng.choice(GRIDS[name]))

    def batch(self, tokenizer: Tokenizer, rng: random.Random, name: str, columns: int, rows: int) -> Batch:
        kind, size = KINDS[name], (columns * TOKEN, rows * TOKEN)
        number = max(1, self.batch_tokens // (columns * rows + kind.length))
        images, talks = [], []
        asked, answers = (torch.full((number, MULTI), -1) for _ in range(2))
        for i in range(number):
            # drawn a little larger or smaller, as pictures are that are resized to whole tokens
            width, height = (side + rng.choice((0, rng.randint(-8, 8))) for side in size)
            _, scene, questions = pictures.scene(rng, width, height)
            image = scene.drawn()
            if image.size != size:
                image = image.resize(size, Image.Resampling.BICUBIC)
            images.append(np.array(image))
            thinking = rng.random() < kind.thought
            talks.append(talk(tokenizer, questions[: kind.questions], thinking))
            for j, (question, answer) in enumerate(questions[:MULTI]):
                asked[i, j] = pictures.QUESTIONS.index(question)
                answers[i, j] = pictures.ANSWERS.index(answer)
        return Batch(torch.from_numpy(np.stack(images)), *texts(talks, kind), asked, answers)


def turns(trunk: Trunk, before: int, columns: int, rows: int, after: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (time, rotary dim / 2) of a text with a picture in it: in turn, a pair of a head is
    rotated by time, by row and by column, of which the last has the fewest."""
    device = trunk.rotary.frequency.device
    pairs = len(trunk.rotary.frequency)
    behind = before + max(columns, rows)
    row, column = torch.meshgrid(
        torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
    )
    grid = torch.stack([torch.zeros_like(row), row, column]).flatten(1) + before
    text = [
        torch.arange(*ends, device=device).expand(3, -1) for ends in ((0, before), (behind, behind + after))
    ]
    place = torch.cat([text[0], grid, text[1]], 1)
    plane = torch.arange(pairs, device=device) % 3
    angle = place[plane].T * trunk.rotary.frequency
    return angle.cos(), angle.sin()


def scaled(pixels: Tensor) -> Tensor:
    """Bytes of a Batch as the tower reads them."""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


class Seer:
    """A tower with the text model behind it, which is not trained."""

    def __init__(self, tower: Tower, trunk: Trunk, tokenizer: Tokenizer, device: torch.device) -> None:
        self.tower, self.trunk = tower, trunk
        self.before = torch.tensor(tokenizer.encode(BEFORE).ids, device=device)
        self._turned: dict[tuple[int, ...], tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = {}

    def turned(self, batch: Batch) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Cosines and sines for the tower, and for the text model."""
        size = (*(side // TOKEN for side in batch.pixels.shape[1:3]), batch.tokens.shape[1])
        if size not in self._turned:
            rows, columns, after = size
            patches = self.tower.turns(2 * rows, 2 * columns, self.before.device)
            self._turned[size] = (patches, turns(self.trunk, len(self.before), columns, rows, after))
        return self._turned[size]

    def rows(self, batch: Batch) -> Tensor:
        """Of the pictures, (batch, tokens, width)."""
        return self.tower(scaled(batch.pixels), self.turned(batch)[0])

    def loss_and_right(self, seen: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy of what is learnt of a batch whose pictures' rows are `seen`, and which of its
        conversations are all right."""
        trunk, (cos, sin) = self.trunk, self.turned(batch)[1]
        head = trunk.embed_tokens(self.before).expand(len(seen), -1, -1)
        x = torch.cat([head, seen.to(head.dtype), trunk.embed_tokens(batch.tokens)], 1)
        for layer in trunk.layers:
            x = layer(x, cos, sin)
        at = batch.at + (x.shape[1] - batch.tokens.shape[1] - 1)  # the token before says it
        hidden = trunk.norm(x.gather(1, at[..., None].expand(-1, -1, x.shape[-1])))
        logits = trunk.logits(hidden).float()
        each = F.cross_entropy(logits.flatten(0, 1), batch.wanted.flatten(), reduction="none")
        learnt = batch.learnt.flatten()
        right = ((logits.argmax(-1) == batch.wanted) | (batch.learnt == 0)).all(1)
        return (each * learnt).sum() / learnt.sum(), right


class HeldOut:
    """The held-out questions, those of one size of picture together."""

    def __init__(self, tokenizer: Tokenizer, device: torch.device) -> None:
        sized: dict[tuple[int, int], list[tuple[str, Tensor, tuple[list[int], list[bool]]]]] = {}
        for item in pictures.held_out_items(COUNT):
            image = item.scene.drawn()
            size = (max(3, round(image.width / TOKEN)) * TOKEN, max(3, round(image.height / TOKEN)) * TOKEN)
            pixels = torch.from_numpy(np.array(image.resize(size, Image.Resampling.BICUBIC)))
            words = talk(tokenizer, [(item.question, item.answer)], thinking=False)
            sized.setdefault(size, []).append((item.kind, pixels, words))
        self.batches = []
        for same in sized.values():
            kinds, images, talks = zip(*same, strict=True)
            none = torch.empty(0)
            batch = Batch(torch.stack(images), *texts(list(talks), KINDS["plain"]), none, none)
            self.batches.append((kinds, Batch(*(t.to(device) for t in batch))))

    @torch.no_grad()
    def right(self, seer: Seer) -> dict[str, float]:
        """Share of the questions, by kind of picture, whose answer greedy decoding would give."""
        found: dict[str, list[bool]] = {}
        for kinds, batch in self.batches:
            with torch.autocast(batch.pixels.device.type, torch.bfloat16, enabled=batch.pixels.is_cuda):
                _, right = seer.loss_and_right(seer.rows(batch), batch)
            for kind, one in zip(kinds, right.tolist(), strict=True):
                found.setdefault(kind, []).append(one)
                found.setdefault("all", []).append(one)
        return {kind: sum(right) / len(right) for kind, right in sorted(found.items())}


class Trainer:
    """Steps of the tower. On a GPU with `graphs` a step of each size of batch is recorded once, and replayed:
    thousands of small kernels take longer to launch than to run."""

    def __init__(self, seer: Seer, rate: float, device: torch.device, graphs: bool) -> None:
        self.seer, self.device = seer, device
        self.head = Head(seer.trunk.shape.hidden).to(device)
        self.steppers = optimizers([seer.tower, self.head], rate)
        self.parameters = [*seer.tower.parameters(), *self.head.parameters()]
        self.groups = [group for stepper in self.steppers for group in stepper.param_groups]
        self.full = [group["lr"] for group in self.groups]
        self.share = torch.zeros((), device=device)
        self.sums = torch.zeros(4, device=device)
        self.graphs: dict[tuple[torch.Size, torch.Size], tuple[torch.cuda.CUDAGraph, Batch]] | None = None
        if graphs and device.type == "cuda":
            self.graphs = {}
            for group in self.groups:
                group["lr"] = torch.tensor(group["lr"], device=device)
                group["capturable"] = True

    def schedule(self, progress: float) -> None:
        for group, rate in zip(self.groups, self.full, strict=True):
            now = rate * rate_at(max(progress, 1e-3))
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(now)
            else:
                group["lr"] = now
        self.share.fill_(HEAD_SHARE * max(0.0, 1 - progress / HEAD_UNTIL))

    def take(self, batch: Batch) -> None:
        """A step of learning, which adds losses and the share of right conversations to `sums`."""
        for parameter in self.parameters:
            parameter.grad = None
        cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=cuda, cache_enabled=False):
            seen = self.seer.rows(batch)
            loss, right = self.seer.loss_and_right(seen, batch)
            shown = self.head.loss(seen, batch)
        (loss + self.share * shown).backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for stepper in self.steppers:
            stepper.step()
        self.sums += torch.stack([loss.detach(), shown.detach(), right.float().mean(), torch.ones_like(loss)])

    def record(self, batches: list[Batch]) -> None:
        """Graphs of a step, for batches of these sizes; a step is taken with each, three with the first."""
        assert self.graphs is not None
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for number, batch in enumerate(batches):
                fixed = Batch(*(t.to(self.device) for t in batch))
                self.seer.turned(fixed)
                for _ in range(1 if number else 3):
                    self.take(fixed)
                torch.cuda.synchronize()
                for parameter in self.parameters:
                    parameter.grad = None
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                self.take(fixed)
                graph.capture_end()
                self.graphs[batch.pixels.shape, batch.tokens.shape] = (graph, fixed)
        torch.cuda.current_stream().wait_stream(stream)

    def step(self, batch: Batch) -> None:
        """`take`, by the graph of its size where there is one."""
        known = self.graphs and self.graphs.get((batch.pixels.shape, batch.tokens.shape))
        if not known:
            self.take(Batch(*(t.to(self.device, non_blocking=True) for t in batch)))
            return
        graph, fixed = known
        for there, given in zip(fixed, batch, strict=True):
            there.copy_(given, non_blocking=True)
        graph.replay()


def fit_vision(settings: VisionSettings) -> None:
    """Train for a time, and leave the tower's tensors and log.json in `settings.out`."""
    began, limit = time.monotonic(), settings.minutes * 60
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(settings.seed)
    trunk, _ = load_checkpoint(settings.model)
    trunk.requires_grad_(False).to(device)
    if device.type == "cuda":  # as they are stored; the products are in bfloat16 there anyway
        for module in trunk.modules():
            if isinstance(module, nn.Linear):
                module.to(torch.bfloat16)
    if settings.start_from is None:
        tower = Tower(VisionShape(), trunk.shape.hidden)
        initialise_tower(tower, trunk.embed_tokens.weight.std().item())
    else:
        tower = load_tower(settings.start_from)
    tower.to(device)
    tokenizer = Tokenizer.from_file(str(settings.tokenizer))
    seer, held_out = Seer(tower, trunk, tokenizer, device), HeldOut(tokenizer, device)
    trainer = Trainer(seer, settings.rate, device, settings.graphs)
    stream = Stream(settings.tokenizer, settings.batch_tokens, settings.seed)
    log: list[dict[str, float]] = []
    settings.out.mkdir(parents=True, exist_ok=True)

    def look() -> None:
        """Held-out shares; what there is so far is saved."""
        shares = held_out.right(seer)
        print(f"step {step}; held out: " + "  ".join(f"{k} {v:.3f}" for k, v in shares.items()), flush=True)
        save_tower(settings.out / "tower.safetensors", tower)
        write_log(settings, log, held_out=shares)

    step = 0
    look()
    trainer.schedule(0.0)
    if trainer.graphs is not None:
        rng = random.Random(settings.seed)
        sizes = [(name, *grid) for name, grids in GRIDS.items() for grid in grids]
        trainer.record([stream.batch(tokenizer, rng, *size) for size in sizes])
    start = time.monotonic() - began
    print(f"{start:.1f} s until the first step", flush=True)
    next_look = start + LOOK
    for step, batch in enumerate(loader(stream, settings.workers, device), 1):
        elapsed = time.monotonic() - began
        if elapsed >= limit:
            break
        trainer.schedule((elapsed - start) / (limit - start))
        trainer.step(batch)
        if step % EVERY == 0 or step <= 3:
            value, shown, share = (trainer.sums[:3] / trainer.sums[3]).tolist()
            trainer.sums.zero_()
            if not math.isfinite(value):
                raise RuntimeError(f"the loss is {value} at step {step}: lower --rate")
            print(
                f"step {step}  {elapsed:.0f} s  loss {value:.4f}  head {shown:.4f}  right {share:.3f}",
                flush=True,
            )
            log.append({"step": step, "seconds": elapsed, "loss": value, "head": shown, "right": share})
        if elapsed >= next_look:
            next_look = elapsed + LOOK
            look()
    look()
