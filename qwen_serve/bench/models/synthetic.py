"""A synthetic Qwen3.5 as a GGUF: exact shapes, random weights, and predictable next tokens.

From any token on, greedy decoding gives the model's words in one long order that does not repeat. After the
benchmarks' filler sentence it repeats that sentence. For a chosen share of the tokens the MTP block drafts
the token that follows, for the others a wrong one with the same probability.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import gguf
import numpy as np

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.models.chain import Chain, make_chain
from qwen_serve.bench.models.vocab import SyntheticVocab, make_vocab
from qwen_serve.bench.models.weights import Weights, planted_width
from qwen_serve.common.files import replacing
from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.gguf_file import write_file
from qwen_serve.convert.metadata import add_hyperparameters, add_tokenizer
from qwen_serve.convert.progress import size
from qwen_serve.convert.recipes import Recipe
from qwen_serve.convert.tensors import FloatType

HEADER_ROOM = 64_000_000
ANSWER = 512  # words at the end of a region that an answer may need


@dataclass(frozen=True)
class Synthetic:
    """A synthetic model, not yet written: everything follows from shapes, acceptance and seed.

    `vocab` has the words and their text, `chain` the successor of each token.
    """

    config: ModelConfig
    vocab: SyntheticVocab
    chain: Chain
    weights: Weights
    mtp_acceptance: tuple[float, ...]
    seed: int

    @classmethod
    def make(
        cls,
        config: ModelConfig,
        *,
        mtp_acceptance: float | Sequence[float],
        seed: int,
        routing_zipf: float = 0.0,
    ) -> Self:
        """`mtp_acceptance`: one share for all tokens, or one for each of as many regions of the chain.
        `routing_zipf`: exponent with which the use of experts falls with their rank; 0: all are used equally.

        Raises:
            BenchError: a share beyond 0..1, or more shares than the chain has room for; an exponent
                that is not possible.
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
        weights = Weights(config, chain, streams[2], routing_zipf)
        return cls(config, vocab, chain, weights, shares, seed)

    def write(self, path: Path, threads: int, outtype: FloatType | Recipe = "F16") -> int:
        """Writes the GGUF under a temporary name, then renames it; returns the number of weights.

        Raises:
            BenchError: the disk has too little room, or the recipe is not for this model.
        """
        recipe = outtype if isinstance(outtype, Recipe) else None
        float_type: FloatType = "F16" if isinstance(outtype, Recipe) else outtype
        plan = self.weights.plan(float_type)
        if recipe is not None:
            from qwen_serve.bench.models.quantized import quantized  # loads llama.cpp

            plan = quantized(plan, self.config, recipe, threads)
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
        add_hyperparameters(writer, self.config, plan, tuple(range(self.config.n_layers)), float_type)
        if recipe is not None:
            writer.kv_data[0].pop(gguf.Keys.General.FILE_TYPE)
            writer.add_file_type(recipe.file_type)
        add_tokenizer(writer, self.vocab.vocab)
        with replacing(path) as part:
            write_file(part, writer, plan, self.config, threads)
        return plan.n_elements

    def words_text(self, region: int, count: int) -> str:
        """`count` words of one of the chain's regions: all of them in one random order after another.

        In the chain's own order, a prompt would have the answer to another one. A region's last words are
        left out, since an answer after them would enter the next region.
        """
        rng = np.random.default_rng([self.seed, region])
        words = self.chain.regions[region]
        if len(self.chain.regions) > 1:
            words = words[:-ANSWER]
        passes = [rng.permutation(words) for _ in range(-(-count // words.size))]
        return self.vocab.text(np.concatenate(passes)[:count].tolist()) if passes else ""
