"""``qwen-bench engine kv-cache``: compares types of the KV cache with f16.

The same model reads the same tokens with each type, so only the storage of keys and values differs.
"""

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated

import numpy as np
from cyclopts import Parameter
from numpy.typing import NDArray
from scipy.special import log_softmax

from qwen_serve.bench.arguments import Positive, StoreOptions, comma_separated
from qwen_serve.bench.engine.recording import UNTIMED, Recorder, recorded
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.report.kv_cache import WORKLOAD
from qwen_serve.bench.terminal import Bar
from qwen_serve.llamacpp import CACHE_TYPES, Context, ContextOptions, Model
from qwen_serve.llamacpp.gguf import read_header
from qwen_serve.server.engine.planning.spec import ModelSpec
from qwen_serve.server.engine.settings import EngineSettings

VERB = "kv-cache"
PLAIN = "plain"
ROTATION = "LLAMA_ATTN_ROT_DISABLE"
"""Environment variable that disables llama.cpp's rotation of heads by a Hadamard matrix before
quantization."""

LOGIT_BYTES = 64 * 2**20
"""Memory for the logits of one cache, in bytes."""

MARGIN = 64
"""KV cells beyond the text, for the timed steps."""

Rows = NDArray[np.float32]
Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KvType:
    """Types of keys and values. ``rotated``: with llama.cpp's rotation of quantized heads."""

    keys: str
    values: str
    rotated: bool = True

    @property
    def name(self) -> str:
        """The text that `read_kv_type` parses."""
        both = self.keys if self.keys == self.values else f"{self.keys}/{self.values}"
        return both if self.rotated else f"{both}:{PLAIN}"


def read_kv_type(text: str) -> KvType:
    """Parse TYPE or KEYS/VALUES, with :plain for no rotation. Raises ValueError."""
    types, colon, rotation = text.partition(":")
    keys, _, values = types.partition("/")
    if {keys, values or keys} - set(CACHE_TYPES) or (colon and rotation != PLAIN):
        raise ValueError(
            f"{text}: want TYPE or KEYS/VALUES of {', '.join(CACHE_TYPES)}, or one with :{PLAIN}"
        )
    return KvType(keys, values or keys, rotated=not colon)


WHOLE = KvType("f16", "f16")
COMMON = tuple(
    read_kv_type(text)
    for text in ("q8_0", "q8_0:plain", "q8_0/q5_1", "q5_1", "q8_0/q4_0", "q4_0/q8_0", "q4_0", "q4_0:plain")
)
KvTypes = Annotated[tuple[KvType, ...], comma_separated(read_kv_type)]


def kv_cache(
    gguf: Path,
    /,
    *,
    text: Path,
    types: KvTypes = COMMON,
    context: Positive = 2048,
    chunks: Positive = 8,
    passages: Positive = 4,
    times: Positive = 20,
    threads: Annotated[int | None, Parameter(name="--threads")] = None,
    store: StoreOptions = StoreOptions(),
) -> int:
    """Compare types of the KV cache with f16: divergence, retrieval from far back, bytes and time.

    - `qwen-bench engine kv-cache model-F16.gguf --text model.evaluation.txt --types q8_0,q5_1,q4_0`

    Divergence: KL divergence of the next token's distribution from that with f16 keys and values, over the
    second halves of a text's chunks. Retrieval: a list of random numbers is read twice, and a token counts as
    retrieved if the model predicts it the second time, --context / 2 tokens later. Time: a step of one
    sequence with --context tokens. Flash attention is on, since quantized values need it.

    Parameters
    ----------
    gguf
        The model's GGUF.
    text
        Text in UTF-8, preferably written by the model itself, such as qwen-convert's NAME.evaluation.txt.
    types
        Types to compare, as TYPE or KEYS/VALUES, separated by commas; with :plain, heads are not rotated.
    context
        Tokens of a chunk, and of a list with its repetition.
    chunks
        Maximum number of chunks to compare.
    passages
        Number of lists of random numbers.
    times
        Timed steps of each type.
    threads
        CPU threads (default: all CPUs).
    """
    settings = {
        "types": [one.name for one in types],
        "context": context,
        "chunks": chunks,
        "passages": passages,
        "text": text.name,
    }
    n_threads = threads or len(os.sched_getaffinity(0))
    with recorded(gguf, VERB, WORKLOAD, store, settings) as (model, recorder):
        spec = ModelSpec.from_header(read_header(gguf))
        read, repeated = read_text(model, text, context, chunks, passages)
        caches = [Cache(model, kv_type, context, n_threads) for kv_type in dict.fromkeys((WHOLE, *types))]
        try:
            for cache in caches:
                recorder.add(cache.kv_type.name, 1, "kv_bytes", spec.cell(settings_of(gguf, cache.kv_type)))
            diverge(caches, read, recorder)
            retrieve(caches, repeated, recorder)
            for cache in caches:
                cache.time(recorder, times)
        finally:
            for cache in caches:
                cache.context.close()
    return 0


def settings_of(gguf: Path, kv_type: KvType) -> EngineSettings:
    return EngineSettings.model_validate(
        {"model": gguf, "cache_type_k": kv_type.keys, "cache_type_v": kv_type.values}
    )


def read_text(
    model: Model, text: Path, context: int, chunks: int, passages: int
) -> tuple[list[Tokens], list[Tokens]]:
    """Chunks of the text, and lists of random numbers, each twice in a row. Raises BenchError if the text is
    too short."""
    try:
        content = text.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{text}: cannot be read: {error.strerror}") from error
    tokens = np.array(model.tokenize(content.encode(), special=True), np.int32)
    count = min(chunks, len(tokens) // context)
    if not count:
        raise BenchError(f"{text}: {len(tokens):,} tokens; --context {context} wants one chunk at least")
    read = [tokens[at * context : (at + 1) * context] for at in range(count)]
    rng = random.Random(0)
    drawn: list[Tokens] = []
    for _ in range(passages):
        numbers = " ".join(str(rng.randint(0, 999)) for _ in range(context))
        drawn.append(np.array(model.tokenize(numbers.encode(), special=False)[: context // 2], np.int32))
    return read, [np.concatenate([passage, passage]) for passage in drawn]


class Cache:
    """A context with one type of cache; computes logits of the tokens that it reads."""

    def __init__(self, model: Model, kv_type: KvType, n_ctx: int, threads: int) -> None:
        self.kv_type = kv_type
        self._read = 0
        self.rows = max(16, min(512, LOGIT_BYTES // (4 * model.n_vocab)))
        with rotation(kv_type.rotated):
            self.context = Context(
                model,
                ContextOptions(
                    n_ctx=n_ctx + MARGIN,
                    n_seq=1,
                    n_batch=512,
                    n_ubatch=512,
                    n_outputs=self.rows,
                    threads=threads,
                    threads_batch=threads,
                    flash_attn="on",
                    type_k=kv_type.keys,
                    type_v=kv_type.values,
                ),
            )

    def read(self, tokens: Tokens, start: int, *, scored: bool) -> Rows:
        """Read tokens from position ``start`` on. Returns their logits [tokens, n_vocab], no rows unless
        ``scored``."""
        context, n = self.context, len(tokens)
        context.tokens[:n] = tokens
        context.positions[:n] = range(start, start + n)
        context.sequences[:n] = 0
        context.outputs[:n] = scored
        context.decode(n)
        self._read = start + n
        return context.logits(n) if scored else np.zeros((0, 0), np.float32)

    def forget(self) -> None:
        self.context.remove(0)

    def time(self, recorder: Recorder, times: int) -> None:
        """Time steps of one token, after the text that was read last."""
        token = np.zeros(1, np.int32)
        for at in range(-UNTIMED, min(times, MARGIN - UNTIMED)):
            began = perf_counter()
            self.read(token, self._read, scored=True)
            if at >= 0:
                recorder.add(self.kv_type.name, at + 1, "step_time", 1000 * (perf_counter() - began))


@contextmanager
def rotation(wanted: bool) -> Iterator[None]:
    """In this block new contexts rotate the heads of quantized caches, or do not."""
    before = os.environ.get(ROTATION)
    os.environ[ROTATION] = "0" if wanted else "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ROTATION]
        else:
            os.environ[ROTATION] = before


def second_halves(caches: Sequence[Cache], tokens: Tokens) -> Iterator[list[Rows]]:
    """The logits of the second half of ``tokens``, in pieces: for each piece a list of rows by cache."""
    middle, size = len(tokens) // 2, caches[0].rows
    for cache in caches:
        cache.forget()
        for start in range(0, middle, size):
            cache.read(tokens[start : min(middle, start + size)], start, scored=False)
    for start in range(middle, len(tokens), size):
        piece = tokens[start : start + size]
        yield [cache.read(piece, start, scored=True) for cache in caches]


def score(
    caches: Sequence[Cache], chunks: Sequence[Tokens], what: str
) -> list[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """For each cache, two arrays [chunks, tokens] over the second halves: KL divergence of the next token's
    distribution from the first cache's, and most likely token.
    """
    found: list[tuple[list[Rows], list[NDArray[np.int64]]]] = [([], []) for _ in caches]
    with Bar(what, total=len(chunks), unit="chunks") as bar:
        for chunk in chunks:
            for logits in second_halves(caches, chunk):
                reference = log_softmax(logits[0], axis=1)
                for (divergence, choices), rows in zip(found, logits, strict=True):
                    difference = reference - log_softmax(rows, axis=1)
                    divergence.append((np.exp(reference) * difference).sum(axis=1).clip(min=0))
                    choices.append(rows.argmax(axis=1))
            bar.advance()
    shape = len(chunks), -1
    return [(np.concatenate(one).reshape(shape), np.concatenate(two).reshape(shape)) for one, two in found]


def diverge(caches: Sequence[Cache], chunks: Sequence[Tokens], recorder: Recorder) -> None:
    """Record KL divergence from the first cache's distributions, and the share of equal most likely
    tokens."""
    found = score(caches, chunks, "divergence")
    for cache, (divergence, choices) in zip(caches, found, strict=True):
        name = cache.kv_type.name
        recorder.add(name, 1, "scored_tokens", divergence.size)
        recorder.add(name, 1, "kld_mean", float(divergence.mean()))
        recorder.add(name, 1, "kld_p99", float(np.quantile(divergence, 0.99)))
        recorder.add(name, 1, "same_top", 100 * float((choices == found[0][1]).mean()))


def retrieve(caches: Sequence[Cache], passages: Sequence[Tokens], recorder: Recorder) -> None:
    """Record the share of tokens that were predicted when a list was read again, without its first token."""
    following = np.stack([passage[len(passage) // 2 + 1 :] for passage in passages])
    right = [choices[:, :-1] == following for _, choices in score(caches, passages, "retrieval")]
    for cache, found in zip(caches, right, strict=True):
        name = cache.kv_type.name
        recorder.add(name, 1, "retrieved", 100 * float(found.mean()))
        recorder.add(name, 1, "lost_items", int((right[0] & ~found).sum()))
        recorder.add(name, 1, "gained_items", int((~right[0] & found).sum()))
