"""Cuts text into chunks of equal length, as llama.cpp's imatrix and perplexity tools do."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qwen_serve.convert.errors import ConvertError
from qwen_serve.llamacpp.evaluation import Batch, EvalContext
from qwen_serve.llamacpp.model import Model
from qwen_serve.llamacpp.probe import Floats

CHUNK_SIZE = 512


def read_chunks(model: Model, text: Path, size: int = CHUNK_SIZE) -> NDArray[np.int32]:
    """[chunks, size] token ids of a text file; an incomplete last chunk is dropped.

    If the vocabulary requires BOS, it replaces every chunk's first token.

    Raises:
        ConvertError: the file is missing, not UTF-8, or shorter than one chunk.
    """
    try:
        ids = model.tokenize(text.read_text(encoding="utf-8"), ends=True)
    except FileNotFoundError:
        raise ConvertError(f"{text}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConvertError(f"{text}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    n_chunks = len(ids) // size
    if n_chunks == 0:
        raise ConvertError(f"{text}: {len(ids)} tokens; at least one chunk of {size} is needed")
    chunks = np.array(ids[: n_chunks * size], np.int32).reshape(n_chunks, size)
    if model.bos is not None:
        chunks[:, 0] = model.bos
    return chunks


def decode_chunks(
    context: EvalContext, chunks: NDArray[np.int32], *, start: int = 0, output: bool = False
) -> None:
    """Decodes chunk `i` as sequence `i`, with positions from `start` on. With `output`, keeps the logits of
    all tokens."""
    batch = Batch(context)
    for sequence, tokens in enumerate(chunks.tolist()):
        for position, token in enumerate(tokens, start):
            batch.add(token, position, sequence, output=output)
    context.decode(batch)


def decode_drafts(
    context: EvalContext, chunks: NDArray[np.int32], hidden: Floats, *, output: bool = False
) -> None:
    """Runs the MTP context over chunks that the trunk has just decoded, from their second token on.

    The input is token x[p] with the trunk's hidden row of x[p-1]. The logits are for x[p+1]. A chunk's first
    token has no such row (llama.cpp's server uses zeros for it), so it is left out.

    Args:
        hidden: [chunks * size, n_embd], the trunk context's `hidden()`.
    """
    batch = Batch(context)
    rows = hidden.reshape(*chunks.shape, -1)
    for sequence, tokens in enumerate(chunks.tolist()):
        for position in range(1, len(tokens)):
            row = rows[sequence, position - 1]
            batch.add(tokens[position], position, sequence, output=output, hidden=row)
    context.decode(batch)
