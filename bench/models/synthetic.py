"""A made-up Qwen3.5 as a GGUF: exact shapes, random weights, and a next token that can be foretold.

From any token on, greedy decoding goes through the model's words in one long order that never repeats; from
the benchmarks' filler sentence on, through that sentence. The MTP block drafts the token that follows for a
chosen share of the tokens, and a wrong one, as surely, for the others.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal, Self

import gguf
import numpy as np
from cyclopts import Parameter

from bench.arguments import Natural, Positive, comma_separated
from bench.errors import BenchError
from bench.models.chain import Chain, make_chain
from bench.models.checkpoint import qwen35_4b, qwen35_35b_a3b
from bench.models.drafter import Drafter
from bench.models.vocab import SyntheticVocab, make_vocab
from bench.models.weights import Weights, planted_width
from convert.config import FULL, LINEAR, ModelConfig
from convert.errors import ConvertError
from convert.gguf_file import write_file
from convert.metadata import add_hyperparameters, add_tokenizer
from convert.progress import duration, size
from convert.stages import replacing
from convert.tensors import FloatType

INTERVAL = 4  # every 4th layer is full attention
K_QUANT_ROW = 256  # k-quants need rows of a multiple of this
HEADER_ROOM = 64_000_000
ANSWER = 512  # words at the end of a region that an answer may need
CORES = os.cpu_count() or 1
WORDS = 1_200_000  # enough for `latency --protocol both --runs 50`: 106 prompts of 64, 2,048 and 8,192 tokens

SMALL = {
    "layers": 4,
    "hidden": 256,
    "ffn": 768,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "linear_key_heads": 2,
    "linear_value_heads": 4,
    "linear_head_dim": 64,
    "vocab": 4096,
    "experts": 0,
    "experts_used": 0,
    "expert_ffn": 0,
}
SMALL_MOE = {**SMALL, "experts": 8, "experts_used": 2, "expert_ffn": 256}
FIELDS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",  # with experts, that of the shared one
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads",
    "linear_head_dim": "linear_key_head_dim",
    "vocab": "vocab_size",
    "experts": "num_experts",
    "experts_used": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
}
SHARED_FFN = "shared_expert_intermediate_size"


def _shape_of(config: Mapping[str, Any]) -> dict[str, int]:
    """The keys of `FIELDS`; 0 for what a dense model has none of."""
    text = config["text_config"]
    text = {**text, FIELDS["ffn"]: text.get(SHARED_FFN) or text["intermediate_size"]}
    return {flag: text.get(field, 0) for flag, field in FIELDS.items()}


SHAPES = {
    "4b": _shape_of(qwen35_4b()),
    "35b-a3b": _shape_of(qwen35_35b_a3b()),
    "small": SMALL,
    "small-moe": SMALL_MOE,
}


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
    def make(cls, shape: Mapping[str, int], *, mtp_acceptance: float | Sequence[float], seed: int) -> Self:
        """`mtp_acceptance`: one share for all tokens, or one for each of as many regions of the chain.

        Raises:
            BenchError: a shape that the architecture or k-quants cannot have, a share beyond 0..1, or more
                shares than the chain has room for.
        """
        shares = (mtp_acceptance,) if isinstance(mtp_acceptance, int | float) else tuple(mtp_acceptance)
        if wrong := [share for share in shares if not 0 <= share <= 1]:
            raise BenchError(f"--mtp-acceptance {wrong[0]}: want a share from 0 to 1")
        config = model_config(shape)
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
                f"{room} words to each; want at least {2 * ANSWER}: fewer shares, or more layers"
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


def model_config(shape: Mapping[str, int]) -> ModelConfig:
    """The configuration of a model of this shape (the keys of `FIELDS`), checked."""
    if shape["layers"] % INTERVAL:
        raise BenchError(
            f"--layers {shape['layers']}: want a multiple of {INTERVAL}, the attention's interval"
        )
    widths = {
        "--hidden": shape["hidden"],
        "--ffn": shape["ffn"],
        "--heads times --head-dim": shape["heads"] * shape["head_dim"],
        "--linear-value-heads times --linear-head-dim": shape["linear_value_heads"]
        * shape["linear_head_dim"],
        "--expert-ffn": shape["expert_ffn"],
    }
    for flag, width in widths.items():
        if width % K_QUANT_ROW:
            raise BenchError(f"{flag}: {width}: want a multiple of {K_QUANT_ROW}, as k-quants need it")
    for many, few in (("heads", "kv_heads"), ("linear_value_heads", "linear_key_heads")):
        if shape[many] % shape[few]:
            flags = [f"--{name.replace('_', '-')}" for name in (many, few)]
            raise BenchError(f"{flags[0]} {shape[many]}: want a multiple of {flags[1]}, {shape[few]}")
    if not 0 <= shape["experts_used"] <= shape["experts"] or bool(shape["experts"]) != all(
        (shape["experts_used"], shape["expert_ffn"])
    ):
        raise BenchError(
            f"--experts {shape['experts']}: want some of them used for a token (--experts-used, here "
            f"{shape['experts_used']}) and a width (--expert-ffn, here {shape['expert_ffn']}), or none"
        )
    if shape["head_dim"] % 32:
        raise BenchError(f"--head-dim {shape['head_dim']}: want a multiple of 32")
    config: dict[str, Any] = qwen35_35b_a3b() if shape["experts"] else qwen35_4b()
    text = config["text_config"]
    text.update({field: shape[flag] for flag, field in FIELDS.items()})
    if shape["experts"]:
        text[SHARED_FFN] = text.pop(FIELDS["ffn"])
    text["linear_value_head_dim"] = shape["linear_head_dim"]
    text["layer_types"] = [LINEAR if (i + 1) % INTERVAL else FULL for i in range(shape["layers"])]
    pairs = shape["head_dim"] // 8  # a quarter of the head is rotated, in pairs
    first = -(-pairs * 11 // 32)
    text["rope_parameters"]["mrope_section"] = [first, first, pairs - 2 * first]
    return ModelConfig.from_json(config)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """Each of them, where it is given, in place of what --shape says."""

    layers: Positive | None = None
    """Blocks, every fourth of them full attention."""
    hidden: Positive | None = None
    """Width of the residual stream."""
    ffn: Positive | None = None
    """Width of the feed-forward network; with experts, of the shared one."""
    heads: Positive | None = None
    """Query heads."""
    kv_heads: Positive | None = None
    """Key and value heads."""
    head_dim: Positive | None = None
    """Width of one of them."""
    linear_key_heads: Positive | None = None
    """Key heads of the gated delta net."""
    linear_value_heads: Positive | None = None
    """Value heads of it."""
    linear_head_dim: Positive | None = None
    """Width of one of them."""
    vocab: Positive | None = None
    """Tokens."""
    experts: Natural | None = None
    """Routed experts; 0 for a dense model."""
    experts_used: Natural | None = None
    """Of them, those that the router chooses for a token."""
    expert_ffn: Natural | None = None
    """Width of a routed expert."""


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
    sizes: ShapeOptions = ShapeOptions(),
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
    named = {flag: count for flag, count in asdict(sizes).items() if count is not None}
    model = Synthetic.make({**SHAPES[shape], **named}, mtp_acceptance=list(shares.values()), seed=seed)
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
    """Where the block drafter goes."""
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
