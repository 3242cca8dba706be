"""From documents to batches: tokenised, grouped with others of about their length, padded on the right.

The model is causal and its loss masked, so padding on the right needs no attention mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from models.nano.train.mixture import documents

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from models.nano.train.document import Document

LENGTHS = (64, 128, 192, 256, 384, 512, 640, 768, 1_024, 2_048, 4_096, 8_192, 16_384)


class Batch(NamedTuple):
    """Tokens (rows, length), and which positions learn.

    `next_at` and `after_at` index the flattened (rows, length - 1) and (rows, length - 2) positions whose
    next token, and token after next, is learnt; `next_token` and `after_token` are those tokens.
    """

    tokens: Tensor
    next_at: Tensor
    next_token: Tensor
    after_at: Tensor
    after_token: Tensor


class Encoded(NamedTuple):
    tokens: list[int]
    learn: list[bool]


def encode(tokenizer: Tokenizer, document: Document) -> Encoded:
    """Each segment on its own, so that a prompt's tokens never depend on its reply."""
    tokens: list[int] = []
    learn: list[bool] = []
    for segment in document:
        ids = tokenizer.encode(segment.text).ids
        tokens += ids
        learn += [segment.learn] * len(ids)
    return Encoded(tokens[: LENGTHS[-1]], learn[: LENGTHS[-1]])


def bucket_of(length: int) -> int:
    return next(size for size in LENGTHS if length <= size)


def collate(rows: list[Encoded], length: int) -> Batch:
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    learn = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = torch.tensor(row.tokens)
        learn[i, : len(row.learn)] = torch.tensor(row.learn)
    return Batch(
        tokens,
        learn[:, 1:].flatten().nonzero().squeeze(1),
        tokens[:, 1:][learn[:, 1:]],
        learn[:, 2:].flatten().nonzero().squeeze(1),
        tokens[:, 2:][learn[:, 2:]],
    )


class Stream(IterableDataset[Batch]):
    """Training batches of about `batch_tokens` tokens without end; each worker draws its own documents."""

    def __init__(self, tokenizer_file: Path, batch_tokens: int, seed: int) -> None:
        self.tokenizer_file = tokenizer_file
        self.batch_tokens = batch_tokens
        self.seed = seed

    def __iter__(self) -> Iterator[Batch]:
        torch.set_num_threads(1)
        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        worker = get_worker_info()
        waiting: dict[int, list[Encoded]] = {length: [] for length in LENGTHS}
        for document in documents(self.seed * 1_000 + (worker.id if worker else 0)):
            row = encode(tokenizer, document)
            length = bucket_of(len(row.tokens))
            waiting[length].append(row)
            if len(waiting[length]) * length >= self.batch_tokens:
                yield collate(waiting[length], length)
                waiting[length] = []
