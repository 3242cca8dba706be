"""Reduces the vocabulary to the first regular tokens, all special ones, and the tokens that both depend on.

The embedding and the output head have a row for each token, and every step reads the head. Byte-level BPE can
spell any text without its rarer tokens: without the result of a merge its parts remain, down to single bytes.
A text whose tokens are all kept is tokenized identically, since all intermediate results of its merges are
kept, too.
"""

from dataclasses import replace

import gguf
import numpy as np
from numpy.typing import NDArray

from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.safetensors import Joined, Piece, TensorSource
from qwen_serve.convert.vocab import Vocab

REGULAR = int(gguf.TokenType.NORMAL)
SPECIAL = (int(gguf.TokenType.CONTROL), int(gguf.TokenType.USER_DEFINED))
SOURCE_TOKENS = "convert.vocab.source_tokens"
"""Key of a pruned GGUF: how many tokens the whole vocabulary has."""


def kept_tokens(vocab: Vocab, regular: int) -> NDArray[np.int64]:
    """The ids that stay, ascending: the first `regular` regular tokens, all special ones, all single bytes,
    the ids that metadata names, and every intermediate result of their merges.

    Rows that only pad the embedding are dropped.

    Raises:
        ConvertError: the vocabulary has no more regular tokens than that.
    """
    normal = [id_ for id_, kind in enumerate(vocab.types) if kind == REGULAR]
    if regular >= len(normal):
        raise ConvertError(
            f"--keep-vocab {regular}: the vocabulary has {len(normal)} regular tokens; "
            "give fewer than that, or leave it out to keep them all"
        )
    kept = set(normal[:regular])
    kept |= {id_ for id_ in normal if len(vocab.tokens[id_]) == 1}
    kept |= {id_ for id_, kind in enumerate(vocab.types) if kind in SPECIAL}
    kept |= set(vocab.special_ids.values())
    id_of = {token: id_ for id_, token in enumerate(vocab.tokens)}
    changed = True
    while changed:
        changed = False
        for merge in reversed(
            vocab.merges
        ):  # results come before parts, so one round is enough for most vocabularies
            left, right = merge.split(" ")
            if id_of.get(left + right) in kept:
                missing = {id_of[part] for part in (left, right) if part in id_of} - kept
                kept |= missing
                changed |= bool(missing)
    return np.array(sorted(kept), np.int64)


def prune(vocab: Vocab, kept: NDArray[np.int64]) -> Vocab:
    """`vocab` with only the tokens `kept`, renumbered in order, and the merges among them."""
    new_id = {int(old): new for new, old in enumerate(kept)}
    tokens = [vocab.tokens[old] for old in new_id]
    known = set(tokens)
    return replace(
        vocab,
        tokens=tokens,
        types=[vocab.types[old] for old in new_id],
        merges=[
            merge
            for merge, (left, right) in zip(vocab.merges, map(str.split, vocab.merges), strict=True)
            if {left, right, left + right} <= known
        ],
        special_ids={kind: new_id[old] for kind, old in vocab.special_ids.items()},
    )


def label(regular: int | None) -> str:
    """A short name for file names: v131072; empty when every token is kept."""
    return "" if regular is None else f"v{regular}"


def kept_rows(source: TensorSource, kept: NDArray[np.int64]) -> Joined:
    """The rows `kept`, ascending, of a matrix [tokens, width]."""
    width = source.shape[1]
    # the beginnings of runs of adjacent rows
    begins = np.flatnonzero(np.diff(kept, prepend=kept[0] - 2) != 1)
    lengths = np.diff(begins, append=len(kept))
    runs = zip(kept[begins].tolist(), lengths.tolist(), strict=True)
    pieces = [Piece(source, first * width, rows * width) for first, rows in runs]
    return Joined(source.name, (len(kept), width), pieces)
