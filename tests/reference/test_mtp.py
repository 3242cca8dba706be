"""The MTP head: drafts of llama.cpp's MTP context against the module that the head was trained with."""

import pytest

from qwen_serve.convert.chunks import decode_chunks, decode_drafts
from qwen_serve.llamacpp.evaluation import EvalContext, Runtime
from tests.logits import log_softmax, mean_kl_divergence
from tests.reference.golden import CHECKPOINT, GOLDEN

import numpy as np  # isort: skip

from pathlib import Path

from numpy.typing import NDArray

pytestmark = pytest.mark.reference

SEQUENCES = slice(36, 60)  # sampled and random ones


def test_drafts_equal_those_of_the_training_module(nano_f32: Path) -> None:
    """Every draft of 24 sequences of 256 tokens; position p sees h(p - 1) and token p, and drafts p + 1."""
    sequences = np.load(GOLDEN)["sequences"][SEQUENCES]
    assert mean_kl_divergence(reference_drafts(sequences), gguf_drafts(nano_f32, sequences)) < 1e-5


def gguf_drafts(gguf: Path, sequences: NDArray[np.int32]) -> NDArray[np.float32]:
    """[sequences, length - 1, vocabulary] log probabilities."""
    length, rows = sequences.shape[1], []
    with (
        Runtime(threads=1, n_gpu_layers=0).load(gguf) as model,
        EvalContext(model, n_ctx=length, n_batch=length, precise=True) as trunk,
        EvalContext(model, n_ctx=length, n_batch=length, precise=True, kind="mtp") as mtp,
    ):
        trunk.keep_hidden()
        for sequence in sequences:
            trunk.clear()
            mtp.clear()
            decode_chunks(trunk, sequence[None])
            decode_drafts(mtp, sequence[None], trunk.hidden(), output=True)
            rows.append(log_softmax(mtp.logits()))
    return np.stack(rows)


def reference_drafts(sequences: NDArray[np.int32]) -> NDArray[np.float32]:
    import torch

    from models.nano.train.checkpoint import load_checkpoint

    trunk, mtp = load_checkpoint(CHECKPOINT)
    tokens = torch.from_numpy(sequences.astype(np.int64))
    with torch.inference_mode():
        hidden = trunk(tokens)
        drafted = mtp(hidden[:, :-1], trunk.embed_tokens(tokens[:, 1:]))
        logits: NDArray[np.float32] = trunk.logits(drafted).numpy()
    return log_softmax(logits)
