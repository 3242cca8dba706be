"""The floor of every request's time on a card, from a GGUF's tensor list: what an engine can at best reach.

Bytes, operations and kernels of each prefill and decode pass follow from the tensors. A card is a bandwidth,
a compute rate and a time to launch a kernel: presets hold published datasheet figures, and --calibrate says,
from measurements of the same engine, how much of them is reached and what a launch takes. Every figure is a
prediction; --measured puts measured medians beside those of their card.

    python bench/roofline.py --model model-Q4_K_M.gguf
    python bench/roofline.py --model model-Q4_K_M.gguf --calibrate q4.json \\
        --calibrate f16.json=model-F16.gguf --draft 4 --acceptance 0.7 --drafter mtp --measured latency.json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.environment import host, versions
from bench.errors import BenchError
from bench.latency_result import CATEGORIES, LatencyResult, Summary
from bench.options import HelpFormatter, natural, positive
from bench.options import run as run_verb
from bench.peers_result import PeersResult
from bench.publish import publish
from bench.roofline_calibration import Calibration, calibrate, card_of, read_points
from bench.roofline_model import (
    CARDS,
    UBATCH,
    Card,
    Drafts,
    Geometry,
    Terms,
    Work,
    decode_terms,
    prefill_terms,
    preset_of,
)
from bench.roofline_report import (
    CASES,
    CardRecord,
    Comparison,
    Prediction,
    RooflineResult,
    StepRecord,
    Times,
    draw,
    tables,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

KV_BYTES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}  # of one element, block scales included
CACHED = 0.5  # share of the prompt from which a measured request counts as cached


def roofline(args: argparse.Namespace) -> int:
    """The verb: predict, compare, print, save."""
    began = perf_counter()
    geometry = Geometry.load(args.model, kv_bytes=KV_BYTES[args.kv])
    drafts = Drafts(args.draft, args.acceptance, args.drafter == "mtp") if args.draft else None
    calibration = _calibrate(args, geometry)
    wanted = _wanted_cards(args)
    cards = [_card(card, calibration, args) for card in wanted]
    predictions = [
        predict(card, datasheet, geometry, name, case, drafts=drafts, ubatch=args.ubatch)
        for card, datasheet in zip(cards, wanted, strict=True)
        for name in CATEGORIES
        for case in (CASES if drafts else CASES[:2])
    ]
    result = RooflineResult(
        command=args.command,
        url="",
        model=args.model.name,
        started=datetime.now(UTC).replace(microsecond=0),
        host=host(),
        card=None,
        versions=versions(),
        gguf_bytes=args.model.stat().st_size,
        settings={
            "kv": args.kv,
            "ubatch": args.ubatch,
            "draft": args.draft,
            **({"acceptance": args.acceptance, "drafter": args.drafter} if drafts else {}),
        },
        cards=[
            CardRecord(
                name=card.name,
                bandwidth=card.bandwidth,
                compute=card.compute,
                vector=card.vector,
                launch=card.launch,
                compute_shares=list(card.compute_shares),
                source=card.source,
            )
            for card in cards
        ],
        calibration=calibration,
        steps=[
            StepRecord(
                what=what,
                n_bytes=work.n_bytes,
                operations=work.operations,
                kernels=work.kernels,
                seconds={card.name: Times.of(card.terms(work)) for card in cards},
            )
            for what, work in steps(geometry, drafts, args.ubatch)
        ],
        predictions=predictions,
        comparisons=list(compare(args.measured, predictions, cards)) if args.measured else [],
        seconds=perf_counter() - began,
    )
    publish(result, args, tables, draw)
    return 0


def predict(
    card: Card,
    datasheet: Card,
    geometry: Geometry,
    category: str,
    case: str,
    *,
    drafts: Drafts | None,
    ubatch: int,
) -> Prediction:
    """One category's request on `card`, and on one that reaches its datasheet's figures."""
    shape = CATEGORIES[category]
    drafting = drafts if "drafts" in case else None

    def price(on: Card) -> tuple[Terms, Terms]:
        first = prefill_terms(on, geometry, shape.prompt_tokens, cached="cached" in case, ubatch=ubatch)
        return first, decode_terms(on, geometry, shape.prompt_tokens, shape.max_tokens, drafting)

    first, rest = price(card)
    ideal_first, ideal_rest = price(datasheet)
    return Prediction(
        card=card.name,
        category=category,
        case=case,
        first=Times.of(first),
        rest=Times.of(rest),
        total=Times.of(first + rest),
        datasheet=(ideal_first + ideal_rest).total,
    )


def steps(geometry: Geometry, drafts: Drafts | None, ubatch: int) -> Iterator[tuple[str, Work]]:
    """Single passes worth looking at."""
    yield f"prefill, {ubatch} rows from 0", next(geometry.prefill(ubatch, ubatch=ubatch))
    for category in CATEGORIES.values():
        yield f"decode at {category.prompt_tokens:,}", geometry.decode(category.prompt_tokens)
    if drafts is not None:
        rows = drafts.count + 1
        for category in CATEGORIES.values():
            at = category.prompt_tokens
            yield f"verification of {rows} rows at {at:,}", geometry.verify(rows, at)
        if drafts.mtp:
            yield "one MTP draft at 2,048", geometry.draft_step(2048)


def compare(path: Path, predictions: Sequence[Prediction], cards: Iterable[Card]) -> Iterator[Comparison]:
    """Measured medians of a latency or peers result beside the floors of the card they were measured on.

    Raises:
        BenchError: another kind of file, or of a card that nothing was predicted for.
    """
    card, measured = _measured(path)
    preset = preset_of(card or "")
    name = preset.name if preset is not None else None
    if name not in {known.name for known in cards}:
        raise BenchError(f"--measured {path}: measured on {card or 'no card'!r}: name its card with --card")
    total = {(line.category, line.case): line.total.total for line in predictions if line.card == name}
    for who, line in measured:
        if line.latency is None:
            continue
        cached = (line.cached_share or 0.0) >= CACHED
        case = CASES[1] if cached else CASES[0]
        yield Comparison(
            who=who,
            card=name,
            category=line.category,
            protocol=line.protocol,
            cached=cached,
            measured=line.latency.p50,
            predicted=total[line.category, case],
            predicted_with_drafts=total.get((line.category, f"{case}, drafts")),
        )


def _measured(path: Path) -> tuple[str | None, list[tuple[str, Summary]]]:
    try:
        kind = json.loads(path.read_bytes()).get("kind")
    except (OSError, ValueError, AttributeError) as error:
        raise BenchError(f"--measured {path}: cannot be read: {error}") from error
    if kind == "latency":
        latency = LatencyResult.load(path)
        return latency.card, [(latency.model or latency.url, line) for line in latency.summaries]
    if kind == "peers":
        peers = PeersResult.load(path)
        return peers.card, [(one.peer, line) for one in peers.measured for line in one.summaries]
    raise BenchError(f"--measured {path}: kind {kind!r}; want a result of bench.latency or bench.peers")


def _calibrate(args: argparse.Namespace, geometry: Geometry) -> Calibration | None:
    if not args.calibrate:
        return None
    points, cards = [], set()
    for path, gguf in args.calibrate:
        of = geometry if gguf is None else Geometry.load(gguf)
        points += read_points(path, of)
        cards.add(card_of(path, args.calibrate_card))
    if len(cards) > 1:
        raise BenchError(f"--calibrate: measured on {', '.join(card.name for card in cards)}: want one card")
    return calibrate(cards.pop(), points, [path.name for path, _ in args.calibrate])


def _wanted_cards(args: argparse.Namespace) -> list[Card]:
    own = [args.bandwidth, args.compute, args.vector]
    if any(own) and not all(own):
        raise BenchError("--bandwidth, --compute and --vector make a card of your own: give all three")
    wanted = [CARDS[name] for name in args.card]
    if all(own):
        rates = args.bandwidth * 1e9, args.compute * 1e12, args.vector * 1e12
        wanted.append(Card("custom", *rates, source="--bandwidth, --compute, --vector"))
    return wanted


def _card(card: Card, calibration: Calibration | None, args: argparse.Namespace) -> Card:
    reached = calibration.apply(card) if calibration is not None else card
    return reached if args.launch_us is None else replace(reached, launch=args.launch_us / 1e6)


def parse_cards(text: str) -> list[str]:
    """An argparse type: names of presets, comma-separated."""
    known = {name.upper(): name for name in CARDS}
    if unknown := [name for name in text.split(",") if name.upper() not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: want some of {', '.join(CARDS)}")
    return [known[name.upper()] for name in dict.fromkeys(text.split(","))]


def parse_calibration(text: str) -> tuple[Path, Path | None]:
    """An argparse type: RESULT.json, or RESULT.json=MODEL.gguf."""
    path, _, gguf = text.partition("=")
    return Path(path), Path(gguf) if gguf else None


def parse_share(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: want a share from 0 to 1")
    return value


def parse_rate(text: str) -> float:
    """An argparse type: a number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: want more than 0")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python bench/roofline.py", description=__doc__, formatter_class=HelpFormatter
    )
    made.add_argument("--model", type=Path, required=True, help="the GGUF whose passes are priced")
    cards = made.add_argument_group("card")
    cards.add_argument("--card", type=parse_cards, default=",".join(CARDS), help="presets to predict for")
    own = {"bandwidth": "GB/S", "compute": "TFLOPS", "vector": "TFLOPS"}
    what = ("of a card of your own", "of it: dense F16 on tensor cores", "of it: F32 outside of them")
    for (flag, unit), text in zip(own.items(), what, strict=True):
        cards.add_argument(f"--{flag}", type=parse_rate, metavar=unit, help=text)
    cards.add_argument(
        "--launch-us",
        type=parse_rate,
        metavar="US",
        help="microseconds a kernel's launch takes (0, or calibrated)",
    )
    cards.add_argument(
        "--calibrate",
        type=parse_calibration,
        action="append",
        metavar="RESULT[=GGUF]",
        help="measurements of bench.peers or bench.latency, of --model or of another GGUF; may be repeated",
    )
    cards.add_argument(
        "--calibrate-card", help="the preset they were measured on, where the file does not say"
    )
    engine = made.add_argument_group("engine")
    engine.add_argument("--kv", choices=tuple(KV_BYTES), default="f16", help="type of the KV cache")
    engine.add_argument("--ubatch", type=positive, default=UBATCH, help="rows of one prefill pass")
    engine.add_argument("--draft", type=natural, default=0, help="tokens drafted for each verification")
    engine.add_argument(
        "--acceptance", type=parse_share, default=1.0, help="probability that a draft is right"
    )
    engine.add_argument(
        "--drafter", choices=("ngram", "mtp"), default="ngram", help="who drafts; n-grams are free"
    )
    output = made.add_argument_group("output")
    output.add_argument(
        "--measured", type=Path, help="a result of bench.latency or bench.peers to set beside"
    )
    output.add_argument("--out", type=Path, help="results file (JSON); the picture goes beside it as .png")
    output.add_argument("--plot", type=Path, help="the picture's own file (.png, .svg or .pdf)")
    return made


if __name__ == "__main__":
    sys.exit(run_verb(parser(), roofline))
