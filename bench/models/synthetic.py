"""A made-up Qwen3.5 as a GGUF: exact shapes, random weights, and a next token that can be foretold.

From any token on, greedy decoding goes through the model's words in one long order that never repeats; from
the benchmarks' filler sentence on, through that sentence. The MTP block drafts the token that follows for a
chosen share of the tokens, and a wrong one, as surely, for the others.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal, Self

import gguf
import numpy as np

from qwen_serve.bench.arguments import Natural, Positive, comma_separated
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.models.chain import Chain, make_chain
from qwen_serve.bench.models.drafter import Drafter
from qwen_serve.bench.models.shapes import SHAPES
from qwen_serve.bench.models.vocab import SyntheticVocab, make_vocab
from qwen_serve.bench.models.weights import Weights, planted_width
from qwen_serve.common.files import replacing
from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.gguf_file import write_file
from qwen_serve.convert.metadata import add_hyperparameters, add_tokenizer
from qwen_serve.convert.progress import duration, size
from qwen_serve.convert.tensors import FloatType

HEADER_ROOM = 64_000_000
ANSWER = 512  # words at the end of a region that an answer may need
CORES = os.cpu_count() or 1
WORDS = 1_200_000  # enough for `latency --protocol both --runs 50`: 106 prompts of 64, 2,048 and 8,192 tokens


@dataclass(frozen=True)
class Synthetic:
    """A synthetic model, not yet written: everything follows from shapes, acceptance and seed.

    `vocab` tells the words and their text, `chain` which token follows which.
    """

    config: ModelConfig
    vocab: SyntheticVocab
    chain: Chain
    weights: Weights
    mtp_acceptance: tuple[float, ...]
    seed: int

    @classmethod
    def make(cls, config: ModelConfig, *, mtp_acceptance: float | Sequence[float], seed: int) -> Self:
        """`mtp_acceptance`: one share for all tokens, or one for each of as many regions of the chain.

        Raises:
            BenchError: a share beyond 0..1, or more shares than the chain has room for.
        """
        shares = (mtp_acceptance,) if isinstance(mtp_acceptance, int | float) else tuple(mtp_acceptance)
        if wrong := [share for share in shares if not 0 <= share <= 1]:
            raise BenchError(f"--mtp-acceptance {wrong[0]}: want a share from 0 to 1")
        streams = [
            np.random.Generator(np.random.SFC64(part)) for part in np.random.SeedSequence(seed).spawn(3)
        ]
        vocab = make_vocab(config.vocab_size, streams[0])
        chain = make_chain(
            vocab.filler,
            vocab.words,
            config.vocab_size,
            n_layers=config.n_layers,
            ffn=planted_width(config),
            mtp_acceptance=shares,
            rng=streams[1],
        )
        if len(shares) > 1 and (room := chain.regions[-1].size) < 2 * ANSWER:
            raise BenchError(
                f"--mtp-acceptance: {len(shares)} shares of a chain of {chain.tokens.size:,} tokens leave "
                f"{room} words to each; want at least {2 * ANSWER}: fewer shares"
            )
        return cls(config, vocab, chain, Weights(config, chain, streams[2]), shares, seed)

    def write(self, path: Path, threads: int, outtype: FloatType = "F16") -> int:
        """Writes the GGUF under a temporary name, then renames it; returns the number of weights.

        Raises:
            BenchError: the disk has too little room.
        """
        plan = self.weights.plan(outtype)
        free = shutil.disk_usage(path.parent).free
        if (needed := plan.nbytes + HEADER_ROOM) > free:
            raise BenchError(f"--out {path}: {size(needed)} will be written, {size(free)} are free")
        writer = gguf.GGUFWriter(path=None, arch=self.config.arch)
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(f"Synthetic Qwen3.5, {plan.n_elements / 1e9:.3g}B weights, seed {self.seed}")
        shares = ", ".join(f"{share:.0%}" for share in self.mtp_acceptance)
        writer.add_description(
            "Random weights with a planted chain of tokens, for measuring speed; "
            f"the MTP block is right on {shares} of tokens."
        )
        add_hyperparameters(writer, self.config, plan, tuple(range(self.config.n_layers)), outtype)
        add_tokenizer(writer, self.vocab.vocab)
        with replacing(path) as part:
            write_file(part, writer, plan, self.config, threads)
        return plan.n_elements

    def words_text(self, region: int, count: int) -> str:
        """`count` words of one of the chain's regions, all of them in one random order after the other.

        In the chain's own order, a prompt would hold what the model answers to another one. A region's last
        words, from which an answer would run into the next region, are left out.
        """
        rng = np.random.default_rng([self.seed, region])
        words = self.chain.regions[region]
        if len(self.chain.regions) > 1:
            words = words[:-ANSWER]
        passes = [rng.permutation(words) for _ in range(-(-count // words.size))]
        return self.vocab.text(np.concatenate(passes)[:count].tolist()) if passes else ""


def synthetic(
    *,
    out: Path,
    mtp_acceptance: Annotated[tuple[str, ...], comma_separated(str)] = ("0.7",),
    seed: Natural = 0,
    block_lengths: Annotated[tuple[float, ...], comma_separated(float)] | None = None,
    words: Natural = WORDS,
    threads: Positive = CORES,
    shape: Literal["4b", "35b-a3b", "small", "small-moe"] = "4b",
    outtype: Literal["F16", "BF16", "F32"] = "F16",
) -> int:
    """Write a made-up Qwen3.5 for measuring speed: exact shapes, random weights, a foretold next token.

    Beside the GGUF comes a text of its words in random order, one token a word, for prompts of exact lengths
    (`latency --text`). With several shares for the MTP block, each holds for a region of the vocabulary and
    has a text of its own, NAME.words-SHARE.txt: the last word of a prompt decides which region its answer
    goes through.

    Parameters
    ----------
    out
        The GGUF; the words go beside it as .words.txt.
    mtp_acceptance
        Share of tokens that the MTP block drafts rightly; several shares: one for each region.
    seed
        The same seed and options give the same bytes.
    block_lengths
        Write a block drafter (DFlash) too, NAME-dflash.gguf, that is right on so many tokens of a block on
        average: one number, or one for each share of the MTP block's.
    words
        Of the text beside the GGUF; 0 for none.
    threads
        That make and write tensors.
    shape
        Those of Qwen3.5-4B (8.7 GB in F16) or of Qwen3.5-35B-A3B (71 GB), or a few megabytes for tests.
    outtype
        Type of matrices.
    """
    began = perf_counter()
    shares = read_shares(mtp_acceptance)
    model = Synthetic.make(SHAPES[shape], mtp_acceptance=list(shares.values()), seed=seed)
    texts = dict(enumerate(text_path(out, name, alone=len(shares) == 1) for name in shares)) if words else {}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        n_elements = model.write(out, threads, outtype)
        if block_lengths is not None:
            drafter = Drafter.make(model.config, model.vocab.vocab, model.chain, block_lengths, seed)
            drafter.write(draft_path(out), threads, outtype)
        for region, text in texts.items():
            with replacing(text) as part:
                part.write_text(model.words_text(region, words), encoding="utf-8")
    except (ConvertError, OSError) as error:
        raise BenchError(f"--out {out}: {error}") from error
    took = duration(perf_counter() - began)
    print(f"wrote {out}: {n_elements / 1e9:.3g} B weights, {size(out.stat().st_size)}, in {took}")
    chain = model.chain.tokens.size - len(model.vocab.filler)
    print(f"  its filler has {len(model.vocab.filler)} tokens, its chain {chain:,} words")
    if block_lengths is not None:
        print(f"wrote {draft_path(out)}: {size(draft_path(out).stat().st_size)}")
    for text in texts.values():
        print(f"wrote {text}: {words:,} words, one token each")
    return 0


def draft_path(out: Path) -> Path:
    return out.with_name(f"{out.stem}-dflash.gguf")


def text_path(out: Path, share: str, *, alone: bool) -> Path:
    """Where the text of one region goes: beside the GGUF."""
    return out.with_suffix(".words.txt" if alone else f".words-{share}.txt")


def read_shares(texts: Sequence[str]) -> dict[str, float]:
    """Shares as they are spelt (the texts' names), and their values.

    Raises BenchError: none is given, or one twice.
    """
    try:
        found = {text: float(text) for text in texts}
    except ValueError as error:
        raise BenchError(f"--mtp-acceptance: {error}; want shares from 0 to 1") from error
    if not found or len(set(found.values())) < len(texts):
        raise BenchError(f"--mtp-acceptance {','.join(texts)}: want at least one share, none of them twice")
    return found
