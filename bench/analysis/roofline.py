"""What a request would take on a card, by a GGUF's tensors: an estimate, and a bound by the datasheet."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from cyclopts import Parameter
from cyclopts.validators import Number

from bench.analysis.calibration import Calibration, Point, calibrate, read_points
from bench.analysis.cards import (
    CARDS,
    Card,
    Drafts,
    binding,
    decode_passes,
    prefill_passes,
    preset_of,
)
from bench.analysis.geometry import UBATCH, Geometry, Work
from bench.arguments import Natural, Positive, StoreOptions, comma_separated
from bench.errors import BenchError
from bench.load.protocol import CATEGORIES, DISTINCT, OFFICIAL
from bench.report.requests import cached_share, median_of
from bench.store import load
from bench.terminal import Cell, Table

KV_BYTES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
"""Of one element of the KV cache, block scales included."""
CACHED = 0.5
"""Share of the prompt from which on a measured request counts as cached."""
CASES = ("prompt read", "prompt cached", "prompt read, drafts", "prompt cached, drafts")

PREDICTED = {
    "memory ms": "predicted_memory",
    "compute ms": "predicted_compute",
    "launches ms": "predicted_launches",
    "estimate ms": "predicted_latency",
    "never below ms": "least_latency",
}
Share = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]


def card_names(text: str) -> str:
    """A preset's name in its own spelling; ValueError names those there are."""
    card = preset_of(text)
    if card is None:
        raise ValueError(f"{text}: want some of {', '.join(CARDS)}")
    return card.name


def roofline(
    *,
    model: Path,
    cards: Annotated[tuple[str, ...], comma_separated(card_names)] = tuple(CARDS),
    calibrate_with: Annotated[tuple[str, ...], Parameter(name="--calibrate", negative=())] = (),
    calibrate_card: str | None = None,
    kv: Literal["f16", "q8_0", "q4_0"] = "f16",
    ubatch: Positive = UBATCH,
    draft: Natural = 0,
    acceptance: Share = 1.0,
    drafter: Literal["ngram", "mtp"] = "ngram",
    measured: Path | None = None,
    store: StoreOptions = StoreOptions(),
) -> int:
    """What a request would take on a card: an estimate, and what no engine can be below.

    Bytes, operations and kernels of each pass follow from the file's tensors. The bound takes the datasheet's
    bandwidth and its highest rate of operations (8-bit integers where weights are quantized) and no launches.
    The estimate adds launches and takes what a calibration reached; other cards than the calibrated one are
    assumed to reach the same share of their bandwidth, and compute in proportion to their F32 rate. It can be
    wrong either way.

    Parameters
    ----------
    model
        The GGUF whose passes are priced.
    cards
        Some of A10G, L4, H100, H200.
    calibrate_with
        A store with runs of steps, or of peers with its ceiling, of --model; STORE=GGUF for another file; may
        be repeated.
    calibrate_card
        The card they were measured on, where the manifest does not say.
    kv
        Type of the KV cache.
    ubatch
        Rows of one prefill pass.
    draft
        Tokens drafted for each verification.
    acceptance
        Probability that a drafted token is right, if those before it were.
    drafter
        Who drafts; n-grams cost nothing.
    measured
        A store with latencies to set beside.
    """
    geometry = Geometry.load(model, kv_bytes=KV_BYTES[kv])
    drafts = Drafts(draft, acceptance, drafter == "mtp") if draft else None
    calibration = _calibrate(calibrate_with, calibrate_card, geometry)
    datasheets = [CARDS[name] for name in dict.fromkeys(cards)]
    priced = [calibration.apply(card) if calibration is not None else card for card in datasheets]
    settings = {"model": model.name, "kv": kv, "ubatch": ubatch, "draft": draft}
    settings |= {"acceptance": acceptance, "drafter": drafter} if drafts is not None else {}
    with store.begin("roofline", settings, local=False) as run:
        for datasheet, card in zip(datasheets, priced, strict=True):
            found = predict(card, datasheet, geometry, drafts, ubatch)
            name = f"{card.name}, estimate"
            run.describe(name, source=card.source, launch_us=1e6 * card.launch)
            lines: list[dict[str, Cell]] = []
            for (category, case), values in found.items():
                run.add(name, case, category, 1, values)
                titled = {title: values[metric] for title, metric in PREDICTED.items()}
                lines.append({"one request": f"{category}, {case}", **titled})
            Table.of(lines, title=f"{name}: computed from the file's tensors, not measured").print()
        passes_table(model.name, geometry, drafts, ubatch, list(zip(datasheets, priced, strict=True))).print()
        for text in _notes(calibration):
            run.note(text)
        if measured is not None:
            named = dict(zip((card.name for card in datasheets), priced, strict=True))
            comparison_table(measured, named, geometry, drafts, ubatch).print()
    return 0


def predict(
    card: Card, datasheet: Card, geometry: Geometry, drafts: Drafts | None, ubatch: int
) -> dict[tuple[str, str], dict[str, float]]:
    """By category and case, the milliseconds of its request on ``card`` by metric; the bound is
    ``datasheet``'s."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for category in CATEGORIES.values():
        prompt, tokens = category.prompt_tokens, category.max_tokens
        for case in CASES if drafts is not None else CASES[:2]:
            passes = [
                *prefill_passes(geometry, prompt, cached="cached" in case, ubatch=ubatch),
                *decode_passes(geometry, prompt, tokens, drafts if "drafts" in case else None),
            ]
            terms = 1000 * np.sum([card.terms(work) * times for work, times in passes], axis=0)
            found[category.name, case] = {
                "predicted_memory": float(terms[0]),
                "predicted_compute": float(terms[1]),
                "predicted_launches": float(terms[2]),
                "predicted_latency": float(terms.sum()),
                "least_latency": 1000 * sum(datasheet.least(work) * times for work, times in passes),
            }
    return found


def passes_table(
    model: str, geometry: Geometry, drafts: Drafts | None, ubatch: int, cards: Sequence[tuple[Card, Card]]
) -> Table:
    """What single passes move and compute."""
    rows: list[list[Cell]] = []
    for what, work in passes(geometry, drafts, ubatch):
        row: list[Cell] = [what, work.n_bytes / 1e9, work.operations / 1e9, round(work.kernels)]
        for datasheet, card in cards:
            terms = card.terms(work)
            row += [1000 * float(terms.sum()), binding(terms), 1000 * datasheet.least(work)]
        rows.append(row)
    header = ["one pass", "GB", "GFLOP", "kernels"]
    for datasheet, _ in cards:
        header += [f"{datasheet.name} estimate ms", "binds", "never below"]
    return Table(header, rows, title=f"What a pass of {model} costs")


def passes(geometry: Geometry, drafts: Drafts | None, ubatch: int) -> Iterator[tuple[str, Work]]:
    """Single passes worth looking at."""
    yield f"prefill, {ubatch} rows from 0", next(geometry.prefill(ubatch, ubatch=ubatch))
    for category in CATEGORIES.values():
        yield f"decode at {category.prompt_tokens:,}", geometry.decode(category.prompt_tokens)
    for sequences in (8, 64):
        yield f"decode of {sequences} sequences at 512", geometry.decode(512, sequences=sequences)
    if drafts is not None:
        for category in CATEGORIES.values():
            at = category.prompt_tokens
            yield f"verification of {drafts.count + 1} rows at {at:,}", geometry.verify(drafts.count + 1, at)
        if drafts.mtp:
            yield "one MTP draft at 2,048", geometry.draft_step(2048)


def comparison_table(
    path: Path, cards: Mapping[str, Card], geometry: Geometry, drafts: Drafts | None, ubatch: int
) -> Table:
    """Measured medians beside the predictions for their card. Raises BenchError: another card, or none."""
    results = load([path])
    lines: list[dict[str, Cell]] = []
    requests = results.of(workload=(OFFICIAL, DISTINCT)).groupby(
        ["run", "subject", "cell", "workload"], sort=False
    )
    for (run, subject, cell, workload), rows in requests:
        recorded = results.manifests[str(run)].card or "no card"
        preset = preset_of(recorded)
        if preset is None or preset.name not in cards:
            raise BenchError(f"--measured {path}: measured on {recorded}: name its card with --cards")
        predicted = predict(cards[preset.name], preset, geometry, drafts, ubatch)
        measured = median_of(rows, "latency")
        read = CASES[1] if (cached_share(rows) or 0.0) >= CACHED else CASES[0]
        for case in (read, f"{read}, drafts"):
            found = predicted.get((str(cell), case))
            if found is None or measured is None:
                continue
            line: dict[str, Cell] = {"subject": str(subject), "category": f"{cell}, {workload}: {case}"}
            line |= {"measured ms": measured, "estimate ms": found["predicted_latency"]}
            line["measured / estimate"] = f"{measured / found['predicted_latency']:.2f}"
            lines.append({**line, "never below ms": found["least_latency"]})
    return Table.of(lines, title="Measured, beside the estimates for the same card")


def _calibrate(given: Sequence[str], named: str | None, geometry: Geometry) -> Calibration | None:
    points: list[Point] = []
    cards: dict[str, Card] = {}
    for text in given:
        path, _, gguf = text.partition("=")
        of = Geometry.load(Path(gguf)) if gguf else geometry
        card, found = read_points(Path(path), of, named)
        points += found
        cards[card.name] = card
    if len(cards) > 1:
        raise BenchError(f"--calibrate: measured on {' and '.join(cards)}: want one card")
    if not cards:
        return None
    files = [Path(text.partition("=")[0]).name for text in given]
    (card,) = cards.values()
    return calibrate(card, points, files, integer=geometry.quantized)


def _notes(fit: Calibration | None) -> list[str]:
    if fit is None:
        return [
            "not calibrated: datasheet rates and no launches, which no engine reaches (--calibrate a store)"
        ]
    shares = ", ".join(f"{100 * share:.1f}% at {rows:g} rows" for rows, share in fit.compute_shares)
    return [
        f"calibrated on the {fit.card} with {', '.join(fit.files)}: {100 * fit.bandwidth_share:.0f}% of the "
        f"bandwidth, {1e6 * fit.launch_seconds:.2f} us a launch; of the F16 rate {shares}",
        f"other cards than the {fit.card}: the same share of the bandwidth, the same launches, and the "
        "compute reached in proportion to F32 rates, which no measurement has confirmed",
    ]
