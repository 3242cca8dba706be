"""How far is a GGUF from its reference? Perplexity, KL divergence and top-1 agreement over a text.

    python bench/perplexity.py models/nano-Q4_K_M.gguf --reference models/nano-F16.gguf \\
        --text models/nano.evaluation.txt --out results.json

The text is cut into chunks of --context tokens; the second half of each is scored, so that every scored
token has at least half a chunk before it (as llama-perplexity does; --skip says otherwise). Both files are
loaded at once and their logits compared as they come, so that memory does not grow with the text.

A model of a pruned vocabulary (python -m convert --keep-vocab) reads the text in its own pieces, and so does
the reference; divergence is then over the tokens that both have, the reference's distribution normalised over
those.
"""

import argparse
import hashlib
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import llama_cpp  # noqa: F401 - before numpy: some CUDA builds crash at model load the other way round
import numpy as np
from numpy.typing import NDArray

from bench.environment import card, host, versions
from bench.errors import BenchError
from bench.options import HelpFormatter, add_output_options, natural, positive, run
from bench.perplexity_result import FEW_TOKENS, Estimate, Histogram, Kld, PerplexityResult, draw, tables
from bench.publish import publish
from convert.chunks import read_chunks
from convert.errors import ConvertError
from convert.gguf_header import read_tensors
from convert.kld import MAX_BATCH, Scores, compare, shared_tokens
from convert.llama import Model, Runtime

LOWEST, HIGHEST, BINS_A_DECADE = -8, 2, 8  # of the histogram, powers of ten in nats


@dataclass(frozen=True, slots=True)
class Settings:
    """How a text is read: ``context`` tokens a chunk, the first ``skip`` unscored, ``batch`` a call."""

    context: int = 512
    skip: int | None = None
    batch: int = MAX_BATCH
    threads: int | None = None
    gpu_layers: int = -1

    @property
    def unscored(self) -> int:
        """``skip``, or half a chunk."""
        return self.context // 2 if self.skip is None else self.skip


def perplexity(args: argparse.Namespace) -> int:
    """The verb."""
    settings = Settings(args.context, args.skip, args.batch, args.threads, args.gpu_layers)
    result = measure(
        args.gguf, args.reference, args.text, settings, command=args.command, card_name=args.card
    )
    publish(result, args, tables, draw)
    return 0


def measure(
    gguf: Path,
    reference: Path,
    text: Path,
    settings: Settings | None = None,
    *,
    command: list[str] | None = None,
    card_name: str | None = None,
) -> PerplexityResult:
    """Runs both models over the text.

    Raises:
        BenchError: a file is missing or no GGUF, the vocabularies do not fit, or the text is too short.
    """
    settings = settings or Settings()
    if settings.unscored > settings.context - 2:
        raise BenchError(f"--skip {settings.skip}: leaves nothing of a chunk of {settings.context} to score")
    started, began = datetime.now(UTC).replace(microsecond=0), perf_counter()
    runtime = Runtime(settings.threads, settings.gpu_layers)
    try:
        for path in (reference, gguf):
            read_tensors(path)
        with Model(reference, runtime) as theirs, Model(gguf, runtime) as ours:
            columns = shared_tokens(theirs, ours)
            chunks = read_chunks(ours, text, settings.context)
            content = text.read_text(encoding="utf-8")
            text_tokens, reference_text_tokens = (len(model.tokenize(content)) for model in (ours, theirs))
            scores = compare(
                theirs, ours, chunks, columns=columns, skip=settings.unscored, max_batch=settings.batch
            )
    except ConvertError as error:
        raise BenchError(str(error)) from error
    except OSError as error:
        raise BenchError(f"{error.filename}: cannot be read: {error.strerror}") from error
    figures = summarize(scores)
    few = figures["tokens"] < FEW_TOKENS
    return PerplexityResult(
        command=command or [],
        url="file:" + str(gguf),
        model=gguf.name,
        started=started,
        seconds=perf_counter() - began,
        host=host(),
        card=card("http://localhost", card_name),
        versions=versions(),
        notes=[f"only {figures['tokens']:,} tokens: the 99% quantile rests on a handful"] if few else [],
        reference=reference.name,
        text=text.name,
        text_sha256=hashlib.sha256(text.read_bytes()).hexdigest(),
        bytes=gguf.stat().st_size,
        reference_bytes=reference.stat().st_size,
        context=settings.context,
        skip=settings.unscored,
        chunks=len(chunks),
        text_tokens=text_tokens,
        reference_text_tokens=reference_text_tokens,
        **figures,
    )


def summarize(scores: Scores) -> dict[str, Any]:
    """The figures of a result, over all scored positions but each chunk's last, after which nothing comes."""
    divergence = scores.divergence[:, :-1]
    loss, reference_loss = scores.loss[:, :-1], scores.reference_loss[:, :-1]
    edges = np.logspace(LOWEST, HIGHEST, (HIGHEST - LOWEST) * BINS_A_DECADE + 1)
    counts = np.histogram(divergence.clip(max=edges[-1]), edges)[0]
    quantiles = np.quantile(divergence, (0.5, 0.9, 0.99, 0.999, 1.0)).tolist()
    return {
        "tokens": divergence.size,
        "perplexity": exponential(estimate(loss)),
        "reference_perplexity": exponential(estimate(reference_loss)),
        "log_ratio": estimate(loss - reference_loss),
        "kld": Kld(
            mean=estimate(divergence),
            **dict(zip(("median", "p90", "p99", "p999", "maximum"), quantiles, strict=True)),
        ),
        "same_top": estimate(scores.same_top[:, :-1].astype(np.float64)),
        "dropped": float(scores.dropped[:, :-1].mean()),
        "histogram": Histogram(
            edges=edges.tolist(), counts=counts.tolist(), zero=int((divergence < edges[0]).sum())
        ),
    }


def estimate(values: NDArray[np.float64]) -> Estimate:
    """The mean over [chunks, positions], its error from the spread between chunks; one chunk shows none."""
    means = values.mean(axis=1)
    error = float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None
    return Estimate(value=float(means.mean()), error=error)


def exponential(logarithm: Estimate) -> Estimate:
    """e to the power of an estimate, the error carried over to first order."""
    value = float(np.exp(logarithm.value))
    return Estimate(value=value, error=None if logarithm.error is None else value * logarithm.error)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python bench/perplexity.py", description=__doc__, formatter_class=HelpFormatter
    )
    made.add_argument("gguf", type=Path, metavar="GGUF", help="the model to judge")
    made.add_argument("--reference", type=Path, required=True, metavar="GGUF", help="what it was made from")
    made.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="UTF-8; special tokens count as such"
    )
    how = made.add_argument_group("how")
    how.add_argument("--context", type=positive, default=512, metavar="N", help="tokens a chunk")
    how.add_argument(
        "--skip", type=natural, metavar="N", help="tokens of each chunk that are not scored (half)"
    )
    how.add_argument("--batch", type=positive, default=MAX_BATCH, metavar="N", help="tokens a call, at most")
    how.add_argument("--threads", type=positive, metavar="N", help="CPU threads (every CPU there is)")
    how.add_argument("--gpu-layers", type=int, default=-1, metavar="N", help="layers on the GPU, -1 for all")
    how.add_argument("--card", help="the graphics card, for the record (nvidia-smi is asked otherwise)")
    add_output_options(made)
    return made


if __name__ == "__main__":
    sys.exit(run(parser(), perplexity))
