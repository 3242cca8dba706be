"""Logs throughput, load and cache every ten seconds of work."""

import asyncio
import logging
from time import perf_counter

from qwen_serve.server.api.service import Service
from qwen_serve.server.engine import EngineStats

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


async def report_throughput(service: Service, interval: float = INTERVAL_S) -> None:
    """Logs until cancelled; writes no line for an interval without work."""
    before: EngineStats | None = None
    loads = 0
    last = perf_counter()
    while True:
        await asyncio.sleep(interval)
        if service.loaded is None:
            continue
        stats, now = service.loaded.engine.stats(), perf_counter()
        if before is not None and stats.steps > before.steps and loads == service.loads:
            logger.info("%s", throughput_line(before, stats, now - last))
        before, last, loads = stats, now, service.loads


def throughput_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """What happened between two snapshots, and the state at the second."""
    prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
    generated = (now.generated_tokens - before.generated_tokens) / seconds
    parts = [
        f"prompt {prompt:.1f} tok/s",
        f"generation {generated:.1f} tok/s",
        f"running {now.running}",
        f"waiting {now.waiting}",
        f"KV cache {now.kv_cells_used / max(1, now.kv_cells):.0%}",
    ]
    hits, misses = now.prefix.hits - before.prefix.hits, now.prefix.misses - before.prefix.misses
    if hits + misses:
        parts.append(f"prefix cache hits {hits / (hits + misses):.0%}")
    drafted = sum(d.drafted for d in now.drafts.values()) - sum(d.drafted for d in before.drafts.values())
    accepted = sum(d.accepted for d in now.drafts.values()) - sum(d.accepted for d in before.drafts.values())
    if drafted:
        parts.append(f"drafts accepted {accepted / drafted:.0%}")
    return ", ".join(parts)
