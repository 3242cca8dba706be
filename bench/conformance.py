"""The server's contract as a checker of any server: pass or fail, a line each; exit status 1 on any failure.

Every check sends real requests and reads the answers; none looks at how the server is made. Checks that need
an independent tokenizer are skipped where there is none.
"""

import argparse
import asyncio
import json
import sys
from fnmatch import fnmatch
from pathlib import Path
from time import perf_counter
from typing import Literal

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.checks import CHECKS, Check, FailedError, SkippedError, Target
from bench.environment import header
from bench.errors import BenchError, UnreachableError
from bench.load.client import Client
from bench.load.vocabulary import find_vocabulary
from bench.options import base_parser, positive, run
from bench.plot import PALETTE, figure
from bench.publish import publish
from bench.results import Record, ResultFile
from bench.table import Table

Status = Literal["pass", "FAIL", "skip"]
COLOURS: dict[Status, str] = {"pass": PALETTE[2], "FAIL": PALETTE[3], "skip": PALETTE[6]}


class Outcome(Record):
    """One check: ``detail`` says what was wrong, or why it was skipped."""

    name: str
    what: str
    status: Status
    detail: str
    seconds: float


class ConformanceResult(ResultFile):
    """The result file of ``bench.conformance``."""

    kind: Literal["conformance"] = "conformance"
    outcomes: list[Outcome]


async def run_check(check: Check, target: Target, limit: float) -> Outcome:
    """Run one check; a broken connection or more than ``limit`` seconds fail it, too."""
    began = perf_counter()
    status: Status = "pass"
    detail = ""
    try:
        await asyncio.wait_for(check.run(target), limit)
    except SkippedError as reason:
        status, detail = "skip", str(reason)
    except (FailedError, BenchError) as error:
        status, detail = "FAIL", str(error)
    except TimeoutError:
        status, detail = "FAIL", f"not done within {limit:g} s (--timeout)"
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        status, detail = "FAIL", f"malformed answer: {type(error).__name__}: {error}"
    return Outcome(
        name=check.name, what=check.what, status=status, detail=detail, seconds=perf_counter() - began
    )


def selected(args: argparse.Namespace) -> list[Check]:
    """The checks that --only and --skip leave. Raises BenchError for a pattern that fits none."""
    for pattern in (*args.only, *args.skip):
        if not any(fnmatch(check.name, pattern) for check in CHECKS):
            raise BenchError(f"no check is named {pattern!r}: see --list")
    return [
        check
        for check in CHECKS
        if (not args.only or any(fnmatch(check.name, pattern) for pattern in args.only))
        and not any(fnmatch(check.name, pattern) for pattern in args.skip)
    ]


async def context_of(client: Client) -> int | None:
    """The tokens that one sequence may have, as vLLM's or llama-server's model card says."""
    reply = await client.request("GET", "/v1/models")
    try:
        card = json.loads(reply.text)["data"][0]
        return int(card.get("max_model_len") or card["meta"]["n_ctx"])
    except (ValueError, LookupError, TypeError):
        return None


async def conformance(args: argparse.Namespace) -> int:
    """The verb: run, print a line each, save. Exit status 1 when a check failed."""
    checks = selected(args)
    if args.list:
        print("\n".join(f"{check.name:36} {check.what}" for check in checks))
        return 0
    began = perf_counter()
    outcomes: list[Outcome] = []
    async with Client(args.url, timeout=args.timeout, api_key=args.api_key) as client:
        model = args.model or await client.model()
        head = await header(args, client, model)
        target = Target(
            client=client,
            vocabulary=await find_vocabulary(args.tokenizer, client, model),
            context=await context_of(client),
            thinking_tokens=args.thinking_tokens,
            oversized_bytes=args.oversized_mib * 2**20,
        )
        for number, check in enumerate(checks, 1):
            outcome = await run_check(check, target, args.timeout)
            outcomes.append(outcome)
            print(f"{number:3}/{len(checks)} {outcome.status}  {check.name:36} {check.what}", flush=True)
            if outcome.detail:
                print(f"              {outcome.detail}", flush=True)
            if outcome.status == "FAIL" and not await _is_up(client):
                raise UnreachableError(f"{args.url} is gone after {check.name}")
    result = ConformanceResult(**head, seconds=perf_counter() - began, outcomes=outcomes)
    print()
    publish(result, args, lambda result: [summary(result)], draw)
    return 1 if any(outcome.status == "FAIL" for outcome in outcomes) else 0


def summary(result: ConformanceResult) -> Table:
    """Counts by theme."""
    themes = _by_theme(result)
    rows = [
        [
            theme,
            *(sum(o.status == status for o in outcomes) for status in COLOURS),
            sum(o.seconds for o in outcomes),
        ]
        for theme, outcomes in themes.items()
    ]
    rows.append(
        ["all", *(sum(o.status == status for o in result.outcomes) for status in COLOURS), result.seconds]
    )
    title = f"Conformance of {result.model or 'the model'} at {result.url}"
    return Table(["theme", *COLOURS, "seconds"], rows, title=title)


def draw(result: ConformanceResult, path: Path) -> None:
    """A bar for each theme: passed, failed, skipped."""
    themes = _by_theme(result)
    with figure(path, title=f"{result.model or result.url}: conformance", width=7, height=3.6) as axes:
        left = [0] * len(themes)
        for status, colour in COLOURS.items():
            counts = [sum(o.status == status for o in outcomes) for outcomes in themes.values()]
            bars = axes[0].barh(
                list(themes), counts, left=left, color=colour, label=f"{status} {sum(counts)}"
            )
            labels = [str(count) if count else "" for count in counts]
            axes[0].bar_label(bars, labels, label_type="center", color="white", fontsize=8)
            left = [a + b for a, b in zip(left, counts, strict=True)]
        axes[0].invert_yaxis()
        axes[0].grid(axis="y", visible=False)
        axes[0].set_xlabel("checks")
        axes[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = base_parser(__doc__ or "")
    made.prog = "python bench/conformance.py"
    group = made.add_argument_group("checks")
    group.add_argument("--list", action="store_true", help="print the checks and stop")
    group.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="such as 'errors.*'; repeatable"
    )
    group.add_argument(
        "--skip", action="append", default=[], metavar="NAME", help="such as thinking.on; repeatable"
    )
    group.add_argument("--thinking-tokens", type=positive, default=1024, help="enough to think and to answer")
    group.add_argument("--oversized-mib", type=positive, default=64, help="MiB of the oversized body")
    group.add_argument(
        "--tokenizer", help="a .gguf, a folder with tokenizer.json, or a hub id (else /tokenize)"
    )
    made.set_defaults(timeout=120.0)
    return made


def _by_theme(result: ConformanceResult) -> dict[str, list[Outcome]]:
    themes: dict[str, list[Outcome]] = {}
    for outcome in result.outcomes:
        themes.setdefault(outcome.name.partition(".")[0], []).append(outcome)
    return themes


async def _is_up(client: Client) -> bool:
    try:
        await client.request("GET", "/ping")
    except UnreachableError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(run(parser(), conformance))
