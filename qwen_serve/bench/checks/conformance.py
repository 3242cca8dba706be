"""``qwen-bench conformance``: runs the checks, prints a line for each and records the outcomes."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from time import perf_counter
from typing import Annotated, Literal

from cyclopts import Parameter

from qwen_serve.bench import provenance
from qwen_serve.bench.arguments import SERVER_GROUP, Positive, ServerOptions, StoreOptions
from qwen_serve.bench.checks.base import CHECKS, Check, FailedError, SkippedError, Target
from qwen_serve.bench.errors import BenchError, UnreachableError
from qwen_serve.bench.load.client import Client
from qwen_serve.bench.load.vocabulary import find_vocabulary
from qwen_serve.bench.report.views import show
from qwen_serve.bench.store import Results
from qwen_serve.bench.terminal import Cell, Table

ALIVE = "/ping"
WORKLOAD = "conformance"

Status = Literal["pass", "FAIL", "skip"]
VALUES: Mapping[Status, dict[str, float]] = {
    "pass": {"passed": 1},
    "FAIL": {"passed": 0},
    "skip": {"skipped": 1},
}
"""Outcome -> the metric that records it."""


@Parameter(name="*", group=SERVER_GROUP)
@dataclass(frozen=True, kw_only=True)
class CheckedServer(ServerOptions):
    """The server to check."""

    timeout: float = 120.0
    """Time limit of a check, in seconds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A check's outcome. ``detail``: what was wrong, or why the check was skipped."""

    status: Status
    detail: str
    seconds: float


async def conformance(
    *,
    server: CheckedServer = CheckedServer(),
    store: StoreOptions = StoreOptions(),
    only: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    skip: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    list_: Annotated[bool, Parameter(name="--list", negative=())] = False,
    thinking_tokens: Positive = 1024,
    oversized_mib: Positive = 64,
    tokenizer: str | None = None,
) -> int:
    """Check a server's API, with a line for each check. The exit status is 1 if a check failed.

    - `qwen-bench conformance --url http://127.0.0.1:8080`
    - `qwen-bench conformance --only 'errors.*' --skip thinking.on`

    Checks send requests and read the answers, so any server can be checked. Those that need an independent
    tokenizer are skipped without one.

    Parameters
    ----------
    only
        Run only the checks whose names match this pattern, such as 'errors.*'; may be repeated.
    skip
        Leave out the checks whose names match this pattern, such as thinking.on; may be repeated.
    list_
        Print the names of the checks, and exit.
    thinking_tokens
        Maximum tokens of an answer with thinking.
    oversized_mib
        Size of the request body that must be refused, in MiB.
    tokenizer
        Tokenizer: a GGUF, a folder with tokenizer.json, or a hub id (default: the server's /tokenize).
    """
    checks = selected(only, skip)
    if list_:
        print("\n".join(f"{check.name:36} {check.what}" for check in checks))
        return 0
    settings = {"only": list(only), "skip": list(skip), "thinking_tokens": thinking_tokens}
    async with Client(server.url, timeout=server.timeout, api_key=server.api_key) as client:
        model = server.model or await client.model()
        name = server.name or client.url
        target = Target(
            client=client,
            vocabulary=await find_vocabulary(tokenizer, client, model),
            context=await context_of(client),
            thinking_tokens=thinking_tokens,
            oversized_bytes=oversized_mib * 2**20,
        )
        with store.begin("conformance", settings, local=provenance.is_local(server.url)) as run:
            run.describe(name, **await provenance.about_server(client))
            failed = 0
            details: dict[str, str] = {}
            for number, check in enumerate(checks, 1):
                outcome = await run_check(check, target, server.timeout)
                values = {**VALUES[outcome.status], "seconds": outcome.seconds}
                run.add(name, WORKLOAD, check.name, 1, values)
                print(f"{number:3}/{len(checks)} {outcome.status}  {check.name:36} {check.what}", flush=True)
                if outcome.detail:
                    print(f"              {outcome.detail}", flush=True)
                    details[check.name] = outcome.detail
                    run.describe(name, details=details)
                if outcome.status == "FAIL":
                    failed += 1
                    if not await _is_up(client):
                        raise UnreachableError(f"{server.url} is gone after {check.name}")
            print()
            show(run)
    return 1 if failed else 0


async def run_check(check: Check, target: Target, limit: float) -> Outcome:
    """Run one check. A broken connection, or more than ``limit`` seconds, is a failure."""
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
    return Outcome(status, detail, perf_counter() - began)


def selected(only: tuple[str, ...], skip: tuple[str, ...]) -> list[Check]:
    """The checks that --only and --skip select. Raises BenchError for a pattern that matches no check."""
    for pattern in (*only, *skip):
        if not any(fnmatch(check.name, pattern) for check in CHECKS):
            raise BenchError(f"no check is named {pattern!r}: see --list")
    return [
        check
        for check in CHECKS
        if (not only or any(fnmatch(check.name, pattern) for pattern in only))
        and not any(fnmatch(check.name, pattern) for pattern in skip)
    ]


async def context_of(client: Client) -> int | None:
    """Maximum tokens of a sequence, from the fields of vLLM's or llama-server's /v1/models; None without
    them."""
    reply = await client.request("GET", "/v1/models")
    try:
        card = json.loads(reply.text)["data"][0]
        return int(card.get("max_model_len") or card["meta"]["n_ctx"])
    except (ValueError, LookupError, TypeError):
        return None


async def _is_up(client: Client) -> bool:
    try:
        await client.request("GET", ALIVE)
    except UnreachableError:
        return False
    return True


def conformance_tables(results: Results) -> list[Table]:
    """A table for each run and server: counts by theme, with the failures and their reasons as notes."""
    made: list[Table] = []
    for (run, subject), rows in results.of(workload=WORKLOAD).groupby(["run", "subject"], sort=False):
        manifest = results.manifests[str(run)]
        about = manifest.subjects.get(str(subject), {})
        checks = rows.pivot(index="cell", columns="metric", values="value").reindex(
            index=list(dict.fromkeys(rows["cell"])), columns=["passed", "skipped", "seconds"]
        )
        checks["failed"] = checks["passed"] == 0
        counts = checks.assign(passed=checks["passed"].fillna(0), skipped=checks["skipped"].fillna(0))
        themes = counts.groupby(lambda name: str(name).partition(".")[0], sort=False).sum()
        themes.loc["all"] = themes.sum()
        lines: list[list[Cell]] = [
            [
                str(theme),
                *(int(line[name]) for name in ("passed", "failed", "skipped")),
                float(line["seconds"]),
            ]
            for theme, line in themes.iterrows()
        ]
        details = about.get("details", {})
        failed = [f"FAILED {name}: {details.get(name, '')}" for name in checks.index[checks["failed"]]]
        made.append(
            Table(
                ["theme", "passed", "failed", "skipped", "seconds"],
                lines,
                title=f"Conformance of {subject} ({about.get('model') or 'its model'})",
                notes=[*failed, *manifest.notes],
            )
        )
    return made
