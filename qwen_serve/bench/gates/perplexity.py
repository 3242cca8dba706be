"""``qwen-bench quality perplexity``: perplexity, KL divergence and top-1 agreement with a reference."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp  # noqa: F401 - before numpy: some CUDA builds crash at model load the other way round
import numpy as np
from cyclopts import Parameter
from numpy.typing import NDArray
from scipy.stats import sem

from qwen_serve.bench.arguments import Natural, Positive, StoreOptions
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.report.perplexity import FEW_TOKENS, WORKLOAD, positions
from qwen_serve.bench.report.views import show
from qwen_serve.bench.store import Run
from qwen_serve.convert.chunks import read_chunks
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.kld import MAX_BATCH, Scores, compare, shared_tokens
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.evaluation import Runtime
from qwen_serve.llamacpp.gguf import read_header

QUANTILES = {"kld_median": 0.5, "kld_p90": 0.9, "kld_p99": 0.99, "kld_p999": 0.999, "kld_max": 1.0}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Reading:
    """Settings for reading the text."""

    context: Positive = 512
    """Tokens of each chunk."""
    skip: Natural | None = None
    """Tokens at the start of each chunk that are not scored (default: half of the chunk)."""
    batch: Positive = MAX_BATCH
    """Maximum tokens of a batch."""
    threads: Positive | None = None
    """CPU threads (default: all CPUs)."""
    gpu_layers: int = -1
    """Number of layers on the GPU; -1: all."""

    @property
    def unscored(self) -> int:
        """Tokens at the start of each chunk that are not scored."""
        return self.context // 2 if self.skip is None else self.skip

    @property
    def cell(self) -> str:
        """The store's cell: the range of scored positions. A chunk's last position has no next token."""
        return positions(self.unscored, self.context - 2, self.context)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its standard error. The error is computed over chunks, since tokens of one text are
    correlated."""

    value: float
    error: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """``values``: by metric (`bench.metrics`); ``about``: other facts about the comparison."""

    values: dict[str, float]
    about: dict[str, Any]


def perplexity(
    gguf: Path,
    /,
    *,
    reference: Path,
    text: Path,
    store: StoreOptions = StoreOptions(),
    reading: Reading = Reading(),
) -> int:
    """Compare a GGUF with its reference: perplexity, KL divergence and top-1 agreement over a text.

    - `qwen-bench quality perplexity model-Q4_K_M.gguf --reference model-F16.gguf --text model.evaluation.txt`

    The text is cut into chunks of --context tokens. As in llama-perplexity, the second half of each chunk is
    scored, so that every scored token has at least half a chunk before it; --skip changes that. Both files
    are loaded at once, and logits are compared batch by batch, so memory does not grow with the text.

    If the model has a pruned vocabulary (qwen-convert --keep-vocab), the text is tokenized with that
    vocabulary, and the reference reads the same tokens. Divergence then covers the tokens that both have,
    with the reference's distribution normalized over them.

    Parameters
    ----------
    gguf
        The model's GGUF.
    reference
        The reference's GGUF, such as the F16 file that the model was made from.
    text
        Text in UTF-8; special tokens in it are parsed.
    """
    measured = measure(gguf, reference, text, reading)
    settings = {"context": reading.context, "skip": reading.unscored, "text": text.name}
    with Run.begin(
        store.out, "perplexity", settings=settings, card=store.card, local=True, notes=store.note
    ) as run:
        run.describe(gguf.name, **measured.about)
        if measured.values["scored_tokens"] < FEW_TOKENS:
            tokens = measured.values["scored_tokens"]
            run.note(f"only {tokens:,.0f} tokens: the 99% quantile rests on a handful")
        run.add(gguf.name, WORKLOAD, reading.cell, 1, measured.values)
        show(run)
    return 0


def measure(gguf: Path, reference: Path, text: Path, reading: Reading | None = None) -> Measured:
    """Run both models over the text.

    Raises:
        BenchError: a file is missing or not a GGUF, the vocabularies do not match, or the text is too short.
    """
    reading = reading or Reading()
    if reading.unscored > reading.context - 2:
        raise BenchError(f"--skip {reading.skip}: leaves nothing of a chunk of {reading.context} to score")
    runtime = Runtime(reading.threads, reading.gpu_layers)
    try:
        for path in (reference, gguf):
            read_header(path)
        with runtime.load(reference) as theirs, runtime.load(gguf) as ours:
            columns = shared_tokens(theirs, ours)
            chunks = read_chunks(ours, text, reading.context)
            content = text.read_text(encoding="utf-8")
            text_tokens, reference_text_tokens = (
                len(model.tokenize(content.encode(), special=True)) for model in (ours, theirs)
            )
            scores = compare(
                theirs,
                ours,
                chunks,
                columns=columns,
                skip=reading.unscored,
                max_batch=reading.batch,
                threads=runtime.n_threads,
            )
    except (ConvertError, LlamaError) as error:
        raise BenchError(str(error)) from error
    except OSError as error:
        raise BenchError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return Measured(
        {"size": gguf.stat().st_size / 1e6, **summarize(scores)},
        {
            "reference": reference.name,
            "reference_bytes": reference.stat().st_size,
            "text_sha256": hashlib.sha256(text.read_bytes()).hexdigest(),
            "text_tokens": text_tokens,
            "reference_text_tokens": reference_text_tokens,
            "chunks": len(chunks),
        },
    )


def summarize(scores: Scores) -> dict[str, float]:
    """Values by metric, over all scored positions except each chunk's last, which has no next token."""
    divergence = scores.divergence[:, :-1]
    loss, reference_loss = scores.loss[:, :-1], scores.reference_loss[:, :-1]
    same_top = estimate(scores.same_top[:, :-1].astype(np.float64))
    estimates = {
        "perplexity": exponential(estimate(loss)),
        "reference_perplexity": exponential(estimate(reference_loss)),
        "log_ratio": estimate(loss - reference_loss),
        "kld_mean": estimate(divergence),
        "same_top": Estimate(100 * same_top.value, None if same_top.error is None else 100 * same_top.error),
    }
    quantiles = np.quantile(divergence, list(QUANTILES.values())).tolist()
    return {
        "scored_tokens": divergence.size,
        **{name: one.value for name, one in estimates.items()},
        **{f"{name}_error": one.error for name, one in estimates.items() if one.error is not None},
        **dict(zip(QUANTILES, quantiles, strict=True)),
        "dropped": 100 * float(scores.dropped[:, :-1].mean()),
    }


def estimate(values: NDArray[np.float64]) -> Estimate:
    """The mean of values [chunks, positions], with the standard error between chunks (None for a single
    chunk)."""
    means = values.mean(axis=1)
    error = float(sem(means)) if len(means) > 1 else None
    return Estimate(value=float(means.mean()), error=error)


def exponential(logarithm: Estimate) -> Estimate:
    """The exponential of an estimate, with its error to first order."""
    value = float(np.exp(logarithm.value))
    return Estimate(value=value, error=None if logarithm.error is None else value * logarithm.error)
