"""Which quant to ship: convert, serve and measure every variant of a model, and rank them.

    python bench/sweep.py --src models/nano --quants Q8_0,Q4_K_M,Q2_K
    python bench/sweep.py --src Qwen/Qwen3.5-4B --variants plain.toml draft4-kv8.toml --limit all

Each variant is converted if it is not there yet, served by our server, put through the quality gates and
timed under both latency protocols; its divergence from the whole model is the converter's. --out gets one
JSON a variant, sweep.json, sweep.csv, sweep.md, the pictures, and report.html, which needs nothing beside it.

The recommended variant is the fastest that passes every gate. A finished variant is not measured again as
long as its weights, settings and this command's are the same (changes of the server's code do not count:
--force); an interrupted or failed one is, by the same command, from the stage it had reached.
A variant file (TOML) holds name, about, quant or recipe, and a table [server] of settings.
"""

import argparse
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import environment
from bench.errors import BenchError
from bench.gates.gate import NANO_NAMES, OFFICIAL
from bench.latency import parse_categories
from bench.latency_result import CATEGORIES, PROTOCOLS, Baseline, read_baseline
from bench.options import HelpFormatter, natural, positive, run
from bench.quality import gate_folder, share_or_count
from bench.variants.measure import failure, finished, forget, gather, is_finished, measure, stages
from bench.variants.page import markdown, page
from bench.variants.pictures import draw
from bench.variants.plan import FULL, LIGHT, SOME, Effort, Plan, default_tasks, model_name
from bench.variants.result import SweepResult, VariantResult, Weights
from bench.variants.standing import advise, baseline_of, rank
from bench.variants.tables import csv_text, tables
from bench.variants.variant import (
    Setting,
    Variant,
    check_distinct,
    check_settings,
    of_quants,
    read_setting,
    read_variant,
)
from bench.variants.weights import make_weights

FIRST, ALL = "first", "all"
ENV_PREFIX = "QWEN_"


def sweep(args: argparse.Namespace) -> int:
    """The verb. Exit status 1 when a variant failed."""
    started, began = datetime.now(UTC).replace(microsecond=0), perf_counter()
    variants = choose_variants(args)
    plan = make_plan(args)
    named = args.baseline or (FIRST if default_tasks(plan.source)[0] == "nano" else "official")
    fixed = None if named == FIRST else read_baseline(named)
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        say(f"{name} is left out: a variant's settings are in its file")
        del os.environ[name]
    plan.out.mkdir(parents=True, exist_ok=True)
    try:
        say(f"weights of {len(variants)} variants in {plan.models}")
        weights = make_weights(plan, variants)
        results = measure_all(plan, variants, weights, force=args.force)
    except KeyboardInterrupt:
        say("the same command goes on from here")
        raise
    result = conclude(plan, results, fixed, started, perf_counter() - began)
    write(plan, result, results)
    usable = [one for one in results if one.error is None]
    failed = [one.variant.name for one in results if one.error is not None]
    if failed:
        print(f"error: {len(failed)} of {len(results)} variants failed: {', '.join(failed)}", file=sys.stderr)
    return 0 if usable and not failed else 1


def choose_variants(args: argparse.Namespace) -> list[Variant]:
    """--quants, then --variants, under the settings of --set. Raises BenchError for what can not be."""
    common: dict[str, Setting] = dict(args.set or ())
    check_settings(common, Path(__file__), "--set")
    variants = [
        *of_quants((args.quants or "").split(",")),
        *(read_variant(path) for path in args.variants or ()),
    ]
    if not variants:
        raise BenchError("nothing to measure: want --quants Q8_0,Q4_K_M,... or --variants FILE...")
    variants = [variant.with_settings(common) for variant in variants]
    check_distinct(variants)
    return variants


def make_plan(args: argparse.Namespace) -> Plan:
    """What is the same for all variants."""
    suited, nano = default_tasks(args.src)
    tasks = args.tasks or suited
    usual = LIGHT if suited == "nano" else FULL
    runs = usual.runs if args.runs is None else args.runs
    now = datetime.now(UTC)
    return Plan(
        command=args.command,
        source=args.src,
        model=args.name or model_name(args.src),
        models=args.models,
        out=args.out or Path("results") / f"{now:%Y-%m-%d}",
        tasks=tasks,
        limit=None if args.limit == ALL else args.limit,
        seed=args.seed,
        concurrency=args.concurrency,
        data=tuple(args.data or ()),
        nano=nano,
        protocol=args.protocol,
        categories=",".join(category.name for category in args.categories),
        effort=Effort(
            runs=runs,
            warmup=usual.warmup if args.warmup is None else args.warmup,
            stream_runs=usual.stream_runs if args.stream_runs is None else args.stream_runs,
            rounds=min(runs, usual.rounds if args.rounds is None else args.rounds),
        ),
        threads=args.threads,
        convert_options=tuple(shlex.split(args.convert_options or "")),
        start_timeout=args.start_timeout,
        timeout=args.timeout,
        card=args.card,
        notes=tuple(args.note or ()),
    )


def measure_all(
    plan: Plan, variants: Sequence[Variant], weights: dict[str, Weights | BenchError], *, force: bool
) -> list[VariantResult]:
    """Every variant's result, stage by stage; one's failure ends up in its result, and the rest go on."""
    results: dict[str, VariantResult] = {}
    ready: dict[str, Weights] = {}
    for variant in variants:
        have = weights[variant.name]
        if isinstance(have, BenchError):
            say(f"{variant.name}: FAILED: {have}")
            results[variant.name] = failure(plan, variant, None, have)
            continue
        if force:
            forget(plan, variant)
        known = finished(plan, variant, plan.fingerprint(variant, have.sha256))
        if known is not None:
            say(f"{variant.name}: finished before")
            results[variant.name] = known
        else:
            ready[variant.name] = have
    for turn, stage in enumerate(stages(plan)):
        spent: list[float] = []
        first = turn * len(variants) // len(stages(plan))  # each time another one: a round drifts, too
        left = [
            variant
            for variant in (*variants[first:], *variants[:first])
            if variant.name in ready and not is_finished(plan, variant, ready[variant.name], stage)
        ]
        for number, variant in enumerate(left, 1):
            say(f"{stage} [{number}/{len(left)}] {variant.name}")
            began = perf_counter()
            error = attempt(plan, variant, ready[variant.name], stage)
            spent.append(perf_counter() - began)
            if error is not None:
                say(f"{variant.name}: FAILED: {error}")
                results[variant.name] = failure(plan, variant, ready.pop(variant.name), error)
            elif number < len(left):
                minutes = (len(left) - number) * sum(spent) / len(spent) / 60
                say(f"  done in {spent[-1]:.0f} s, about {minutes:.1f} min left of {stage}")
    for variant in variants:
        if variant.name not in results:
            results[variant.name] = gather(plan, variant, ready[variant.name])
    return [results[variant.name] for variant in variants]


def attempt(plan: Plan, variant: Variant, weights: Weights, stage: str) -> BenchError | None:
    """One stage of one variant; why it failed, or None."""
    try:
        measure(plan, variant, weights, stage)
    except BenchError as error:
        return error
    except Exception as error:  # whatever lm-eval or a dataset throws is not the others' matter
        path = plan.raw(variant) / "error.txt"
        path.write_text(traceback.format_exc(), encoding="utf-8")
        return BenchError(f"{type(error).__name__}: {error} ({path})")
    return None


def conclude(
    plan: Plan, results: Sequence[VariantResult], fixed: Baseline | None, started: datetime, seconds: float
) -> SweepResult:
    """Ranks what was measured."""
    good = [result for result in results if result.error is None]
    baseline = fixed if fixed is not None or not good else baseline_of(good[0])
    standings = rank(results, baseline)
    recommended, advice = advise(results, standings)
    latest = good[-1] if good else None
    return SweepResult(
        command=plan.command,
        url="",
        model=plan.model,
        started=started,
        seconds=seconds,
        host=environment.host(),
        card=latest.card if latest else plan.card,
        versions=environment.versions(),
        server=latest.server if latest else {},
        notes=list(plan.notes),
        source=plan.source,
        baseline=baseline,
        settings={**plan.latency_settings(), **plan.quality_settings()},
        standings=standings,
        recommended=recommended,
        advice=advice,
    )


def write(plan: Plan, result: SweepResult, results: Sequence[VariantResult]) -> None:
    """Every file of the sweep, and its tables on the terminal."""
    result.save(plan.out / "sweep.json")
    print("\n\n".join(str(table) for table in tables(result, results)), end="\n\n")
    print("\n".join(result.advice))
    pictures = draw(result, results, plan.out)
    texts = {
        "sweep.csv": csv_text(result, results),
        "sweep.md": markdown(result, results, pictures),
        "report.html": page(result, results, pictures),
    }
    for name, text in texts.items():
        part = plan.out / f".{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(plan.out / name)
    print(f"wrote {plan.out}/: report.html, {', '.join([*texts][:-1])}, sweep.json, and one JSON a variant")


def say(*parts: str) -> None:
    """Progress over variants and stages, on stderr; a stage's own bar comes below it."""
    print(": ".join(parts), file=sys.stderr, flush=True)


def limit(text: str) -> float | str:
    """An argparse type: a share, a number of items, or all."""
    return ALL if text == ALL else share_or_count(text)


def setting(text: str) -> tuple[str, Setting]:
    """An argparse type: NAME=VALUE."""
    try:
        return read_setting(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python bench/sweep.py", description=__doc__, formatter_class=HelpFormatter
    )
    what = made.add_argument_group("variants")
    what.add_argument("--src", required=True, help="the checkpoint, a folder or a hub id")
    what.add_argument("--quants", metavar="A,B", help="levels of quant_recipes/ (or F16, BF16, F32)")
    what.add_argument(
        "--variants", metavar="FILE", nargs="+", type=Path, help="variant files (see bench/variants/examples)"
    )
    what.add_argument(
        "--set",
        metavar="NAME=VALUE",
        type=setting,
        action="append",
        help="a server setting for every variant that does not set it itself; may be repeated",
    )
    what.add_argument("--models", type=Path, default=Path("models"), help="where the GGUFs are or go")
    what.add_argument("--name", help="first part of the GGUFs' names (else the source's)")
    what.add_argument(
        "--convert-options",
        metavar="TEXT",
        help="further options of python -m convert: --convert-options='--no-kld'",
    )
    what.add_argument(
        "--threads", type=positive, help="CPU threads of converter and server (their own choice)"
    )
    gates = made.add_argument_group("quality gates")
    names = ", ".join([*(gate.name for gate in OFFICIAL), *NANO_NAMES])
    gates.add_argument(
        "--tasks",
        help=f"nano, official, none, or names ({names}); else nano for a source with held-out items of "
        "its own, official for any other",
    )
    gates.add_argument(
        "--limit", type=limit, default=SOME, help="items of each subtask: a share, a number, all"
    )
    gates.add_argument("--concurrency", type=positive, default=8, help="requests under way at once")
    gates.add_argument(
        "--data", metavar="GATE=FOLDER", type=gate_folder, action="append", help="as bench/quality.py"
    )
    timing = made.add_argument_group("latency")
    for option, kind, key in (("--runs", positive, "runs"), ("--warmup", natural, "warmup"),
                              ("--stream-runs", natural, "stream_runs")):  # fmt: skip
        usual = f"{getattr(FULL, key)}; {getattr(LIGHT, key)} for nano"
        timing.add_argument(option, type=kind, help=f"as bench/latency.py ({usual})")
    timing.add_argument(
        "--rounds",
        type=positive,
        help="visit all variants so many times, a part of the runs each time, so that drift of the machine "
        f"hits all alike ({FULL.rounds}; {LIGHT.rounds} for nano)",
    )
    timing.add_argument("--protocol", choices=("both", *PROTOCOLS), default="both")
    timing.add_argument("--categories", type=parse_categories, default=",".join(CATEGORIES))
    timing.add_argument(
        "--baseline",
        help="what speed is relative to: first (the first variant; for nano), official (for others), "
        "short=MS,..., or a latency result file",
    )
    rest = made.add_argument_group("run and output")
    rest.add_argument("--out", type=Path, help="results folder (results/<today>)")
    rest.add_argument("--force", action="store_true", help="measure finished variants again")
    rest.add_argument("--seed", type=int, default=0, help="of the drawn items and the random prompts")
    rest.add_argument("--start-timeout", type=float, default=900.0, help="seconds a server may take to start")
    rest.add_argument("--timeout", type=float, default=3600.0, help="seconds a request may take")
    rest.add_argument("--card", help="the graphics card, for the record (else nvidia-smi's)")
    rest.add_argument(
        "--note", action="append", help="kept in the results, such as what else ran on the machine"
    )
    return made


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no server is left behind
    sys.exit(run(parser(), sweep))
