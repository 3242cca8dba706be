"""``qwen-bench engine roofline``: estimates a request's time on a GPU from a GGUF's tensors, with a lower
bound."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from cyclopts import Parameter
from cyclopts.validators import Number

from qwen_serve.bench.analysis.block_drafter import BlockDrafter
from qwen_serve.bench.analysis.cards import CARDS, Card, Drafts, Reached, decode_passes, prefill_passes
from qwen_serve.bench.analysis.geometry import UBATCH, Geometry, Work
from qwen_serve.bench.arguments import Natural, Positive, comma_separated
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.protocol import CATEGORIES
from qwen_serve.bench.terminal import Cell, Table

KV_BYTES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
"""Type -> bytes of an element of the KV cache, with block scales."""
CASES = ("prompt read", "prompt cached", "prompt read, drafts", "prompt cached, drafts")

Share = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]
Reach = Annotated[float, Parameter(validator=Number(gt=0, lte=1))]


def card_named(text: str) -> Card:
    """The GPU of that name, in upper or lower case. Raises ValueError, which lists the known ones."""
    if (name := text.upper()) not in CARDS:
        raise ValueError(f"{text}: want some of {', '.join(CARDS)}")
    return CARDS[name]


def roofline(
    *,
    model: Path,
    cards: Annotated[tuple[Card, ...], comma_separated(card_named)] = tuple(CARDS.values()),
    bandwidth_share: Reach = 1.0,
    compute_share: Reach = 1.0,
    launch_us: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0,
    kv: Literal["f16", "q8_0", "q4_0"] = "f16",
    ubatch: Positive = UBATCH,
    draft: Natural = 0,
    acceptance: Share = 1.0,
    drafter: Literal["ngram", "mtp", "dflash"] = "ngram",
    draft_model: Path | None = None,
) -> int:
    """Estimate a request's time on a GPU, with a lower bound for any engine.

    - `qwen-bench engine roofline --model model.gguf --cards A10G`
    - `qwen-bench engine roofline --model model.gguf --cards H100 --bandwidth-share 0.8 --launch-us 2`

    Bytes, operations and kernels of each pass are computed from the file's tensors. The bound uses the
    datasheet's bandwidth and its highest rate of operations (8-bit integers if weights are quantized),
    without launches. The estimate uses the given shares of the datasheet's figures and adds launches; it may
    be too high or too low.

    Parameters
    ----------
    model
        The model's GGUF.
    cards
        GPUs: one or more of A10G, L4, H100, H200, separated by commas.
    bandwidth_share
        Share of the GPU's bandwidth that kernels reach: the bytes of a pass over its time in
        llama-batched-bench, relative to the datasheet's bandwidth.
    compute_share
        Share of the GPU's F16 rate that a prompt reaches.
    launch_us
        Time of a kernel's launch, in microseconds.
    kv
        Type of the KV cache.
    ubatch
        Tokens of a prefill pass.
    draft
        Tokens drafted for each verification; for dflash, all of a block but the first.
    acceptance
        Probability that a drafted token is right if those before it are.
    drafter
        Source of drafts; n-grams cost nothing.
    draft_model
        GGUF of the block drafter, for --drafter dflash.
    """
    geometry = Geometry.load(model, kv_bytes=KV_BYTES[kv])
    if (drafter == "dflash") != (draft_model is not None):
        raise BenchError(
            "--drafter dflash needs --draft-model, the file of the block drafter, and no other does"
        )
    block = BlockDrafter(draft_model, geometry) if draft_model is not None else None
    drafts = Drafts(draft, acceptance, drafter == "mtp", block) if draft else None
    reached = Reached(bandwidth_share, compute_share, launch_us / 1e6)
    for card in cards:
        lines: list[dict[str, Cell]] = [
            {"one request": f"{category}, {case}", **values}
            for (category, case), values in predict(card, reached, geometry, drafts, ubatch).items()
        ]
        Table.of(lines, title=f"{card.name}: computed from the tensors of {model.name}, not measured").print()
    passes_table(model.name, geometry, drafts, ubatch, cards, reached).print()
    if reached == Reached():
        print("The estimates have the datasheet's rates and no launches, which no engine reaches.")
    return 0


def predict(
    card: Card, reached: Reached, geometry: Geometry, drafts: Drafts | None, ubatch: int
) -> dict[tuple[str, str], dict[str, float]]:
    """(category, case) -> milliseconds of a request on ``card``, by part."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for category in CATEGORIES.values():
        prompt, tokens = category.prompt_tokens, category.max_tokens
        for case in CASES if drafts is not None else CASES[:2]:
            drafting = drafts if "drafts" in case else None
            passes = [
                *prefill_passes(geometry, prompt, drafting, cached="cached" in case, ubatch=ubatch),
                *decode_passes(geometry, prompt, tokens, drafting),
            ]
            terms = 1000 * np.sum([reached.terms(card, work) * times for work, times in passes], axis=0)
            found[category.name, case] = {
                "memory ms": float(terms[0]),
                "compute ms": float(terms[1]),
                "launches ms": float(terms[2]),
                "estimate ms": float(terms.sum()),
                "never below ms": 1000 * sum(card.least(work) * times for work, times in passes),
            }
    return found


def passes_table(
    model: str,
    geometry: Geometry,
    drafts: Drafts | None,
    ubatch: int,
    cards: Sequence[Card],
    reached: Reached,
) -> Table:
    """A table of the bytes, operations and kernels of single passes."""
    rows: list[list[Cell]] = []
    for what, work in passes(geometry, drafts, ubatch):
        row: list[Cell] = [what, work.n_bytes / 1e9, work.operations / 1e9, round(work.kernels)]
        for card in cards:
            row += [1000 * float(reached.terms(card, work).sum()), 1000 * card.least(work)]
        rows.append(row)
    header = ["one pass", "GB", "GFLOP", "kernels"]
    for card in cards:
        header += [f"{card.name} estimate ms", "never below"]
    return Table(header, rows, title=f"What a pass of {model} costs")


def passes(geometry: Geometry, drafts: Drafts | None, ubatch: int) -> Iterator[tuple[str, Work]]:
    """(name, work) of the passes in the table."""
    yield f"prefill, {ubatch} rows from 0", next(geometry.prefill(ubatch, ubatch=ubatch))
    for category in CATEGORIES.values():
        yield f"decode at {category.prompt_tokens:,}", geometry.decode(category.prompt_tokens)
    for sequences in (8, 64):
        yield f"decode of {sequences} sequences at 512", geometry.decode(512, sequences=sequences)
    if drafts is not None:
        for category in CATEGORIES.values():
            at, rows = category.prompt_tokens, drafts.count + 1
            work = geometry.verify(rows, at, snapshots=drafts.snapshots(geometry))
            yield f"verification of {rows} rows at {at:,}", work
        if drafts.mtp:
            yield "one MTP draft at 2,048", geometry.draft_step(2048)
        if drafts.block is not None:
            yield "one block at 2,048", drafts.block.draft(drafts.count + 1, 2048)
            yield "features of 512 tokens kept", drafts.block.keep(512)
            yield "and injected", drafts.block.inject(512)
