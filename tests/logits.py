"""Next-token distributions of a GGUF, and their divergence."""

from qwen_serve.llamacpp.evaluation import Batch, EvalContext, Runtime

import numpy as np  # isort: skip  (after llama_cpp: see llamacpp/__init__.py)

from pathlib import Path

from numpy.typing import NDArray


def gguf_log_probabilities(
    gguf: Path, sequences: NDArray[np.int32], positions: NDArray[np.int64]
) -> NDArray[np.float32]:
    """[sequences, positions, vocabulary] log probabilities; F32 KV, no flash attention, a sequence a call."""
    n_sequences, length = sequences.shape
    wanted = set(positions.tolist())
    rows = []
    with (
        Runtime(threads=1, n_gpu_layers=0).load(gguf) as model,
        EvalContext(model, n_ctx=length, n_batch=length, precise=True) as context,
    ):
        for sequence in sequences:
            context.clear()
            batch = Batch(context)
            for position, token in enumerate(sequence.tolist()):
                batch.add(token, position, output=position in wanted)
            context.decode(batch)
            rows.append(log_softmax(context.logits()))
    return np.stack(rows).reshape(n_sequences, len(wanted), -1)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    normalised: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised


def mean_kl_divergence(reference: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """KL(reference || other) in nats, averaged over all positions, in double precision."""
    p, q = reference.astype(np.float64), other.astype(np.float64)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())
