"""``qwen-bench build synthetic``: writes a synthetic model and texts for its prompts."""

import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal

from cyclopts import Parameter

from qwen_serve.bench.arguments import Natural, Positive, comma_separated
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.models.drafter import Drafter
from qwen_serve.bench.models.shapes import SHAPES, tower
from qwen_serve.bench.models.synthetic import Synthetic
from qwen_serve.bench.models.tower import write_tower
from qwen_serve.common.files import replacing
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.progress import duration, size
from qwen_serve.convert.recipes import load_recipe
from qwen_serve.convert.tensors import FLOAT_TYPES

CORES = os.cpu_count() or 1
WORDS = 1_200_000  # enough for `latency --protocol both --runs 50`: 106 prompts of 64, 2,048 and 8,192 tokens


def synthetic(
    *,
    out: Path,
    mtp_acceptance: Annotated[tuple[str, ...], comma_separated(str)] = ("0.7",),
    seed: Natural = 0,
    block_lengths: Annotated[tuple[float, ...], comma_separated(float)] | None = None,
    words: Natural = WORDS,
    threads: Positive = CORES,
    shape: Literal["4b", "9b", "27b", "35b-a3b", "small", "small-moe"] = "4b",
    outtype: Literal["F16", "BF16", "F32", "Q8_0", "Q6_K", "Q4_K_M"] = "F16",
    routing_zipf: float = 0.0,
    vision: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Write a synthetic Qwen3.5 for measuring speed: exact shapes, random weights, predictable answers.

    - `qwen-bench build synthetic --out F16.gguf`
    - `qwen-bench build synthetic --out Q4_K_M.gguf --shape 35b-a3b --outtype Q4_K_M --mtp-acceptance 0.7`

    It also writes a text of the model's words in random order, one token a word, for prompts of exact
    lengths (`latency --text`). With several shares for the MTP block, each applies to a region of the
    vocabulary and has a text of its own, NAME.words-SHARE.txt. The last word of a prompt decides in which
    region its answer is.

    Parameters
    ----------
    out
        The GGUF; the words go beside it as .words.txt.
    mtp_acceptance
        Share of tokens that the MTP block drafts correctly; several shares: one for each region.
    seed
        The same seed and options give the same bytes.
    block_lengths
        Also write a block drafter (DFlash), NAME-dflash.gguf, with this many right tokens a block on average:
        one number, or one for each share of the MTP block's.
    words
        Words of the text beside the GGUF; 0 for none.
    threads
        Threads that make and write tensors.
    shape
        Shapes of Qwen3.5-4B (8.7 GB in F16), -9B (19 GB) or -35B-A3B (71 GB), or a few megabytes for tests.
    outtype
        Type of matrices, or a recipe's name. Quantized experts are parts of the same few blocks, so that a
        file is written as fast as the disk takes it; a drafter and a tower are then in F16.
    routing_zipf
        Exponent by which the use of experts falls with their rank, as in trained routers; 0: uniform.
    vision
        Also write a vision tower of the model's shape: mmproj-NAME-F16.gguf for NAME-F16.gguf, which the
        server finds.
    """
    began = perf_counter()
    shares = read_shares(mtp_acceptance)
    model = Synthetic.make(
        SHAPES[shape], mtp_acceptance=list(shares.values()), seed=seed, routing_zipf=routing_zipf
    )
    recipe = None if outtype in FLOAT_TYPES else load_recipe(outtype)
    float_type = outtype if outtype in FLOAT_TYPES else "F16"
    texts = dict(enumerate(text_path(out, name, alone=len(shares) == 1) for name in shares)) if words else {}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        n_elements = model.write(out, threads, recipe or float_type)
        if block_lengths is not None:
            drafter = Drafter.make(model.config, model.vocab.vocab, model.chain, block_lengths, seed)
            drafter.write(draft_path(out), threads, float_type)
        if vision:
            path = tower_path(out, float_type)
            write_tower(path, tower(shape), model.config, seed=seed, threads=threads, outtype=float_type)
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
    if vision:
        print(f"wrote {tower_path(out, float_type)}: {size(tower_path(out, float_type).stat().st_size)}")
    for text in texts.values():
        print(f"wrote {text}: {words:,} words, one token each")
    return 0


def draft_path(out: Path) -> Path:
    return out.with_name(f"{out.stem}-dflash.gguf")


def tower_path(out: Path, outtype: str) -> Path:
    """The path where the server looks for the tower of `out`: both are named after the model, then their
    types.
    """
    name = out.stem.removesuffix(f"-{outtype}")
    return out.with_name(f"mmproj-{name}-{outtype}.gguf")


def text_path(out: Path, share: str, *, alone: bool) -> Path:
    """The path of one region's text, beside the GGUF."""
    return out.with_suffix(".words.txt" if alone else f".words-{share}.txt")


def read_shares(texts: Sequence[str]) -> dict[str, float]:
    """Shares as they are spelt (for the texts' names), with their values.

    Raises BenchError: none is given, or one twice.
    """
    try:
        found = {text: float(text) for text in texts}
    except ValueError as error:
        raise BenchError(f"--mtp-acceptance: {error}; want shares from 0 to 1") from error
    if not found or len(set(found.values())) < len(texts):
        raise BenchError(f"--mtp-acceptance {','.join(texts)}: want at least one share, none of them twice")
    return found
