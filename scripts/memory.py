"""``python scripts/memory.py``: which quant and which context fit on a card, by the server's own plan.

The plan needs a GGUF's header alone, so no model is needed. Compute buffers are those that llama.cpp reserves
without a GPU, for the same passes.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

from script import run

from qwen_serve.bench.arguments import comma_separated
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.models.header import float_tensors, quantized_tensors, write_header
from qwen_serve.bench.models.shapes import SHAPES
from qwen_serve.bench.terminal import Table
from qwen_serve.convert.recipes import known_recipes, load_recipe
from qwen_serve.convert.tensors import FLOAT_TYPES
from qwen_serve.llamacpp import Device
from qwen_serve.llamacpp.gguf import read_header
from qwen_serve.server.engine.errors import DoesNotFit
from qwen_serve.server.engine.planning.contexts import CELL_PADDING, padded
from qwen_serve.server.engine.planning.fit import plan_memory
from qwen_serve.server.engine.planning.plan import MAX_CELLS, MemoryPlan
from qwen_serve.server.engine.settings import EngineSettings

QUANTS = ("Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "BF16")
GB, HOST = 10**9, 64 * 10**9
NOTE = (
    "The largest --ctx-size: tokens of all requests and the prefix cache together, F16, at most 262,144. A "
    "GB is 10^9 bytes; the driver's margin is taken off. Other settings are the server's defaults, with the "
    "MTP head, without a vision tower and FP16 copies; the embedding is in host memory."
)


def memory(
    *,
    shape: Literal["4b", "9b", "27b", "35b-a3b"] = "27b",
    quants: Annotated[tuple[str, ...], comma_separated(str)] = QUANTS,
    cards: Annotated[tuple[int, ...], comma_separated(int)] = (24, 40, 48, 80),
    parallel: Annotated[tuple[int, ...], comma_separated(int)] = (1, 8),
) -> None:
    """Which quant and which context fit on a card of so many GB, by the server's own plan.

    - `python scripts/memory.py --shape 27b`
    - `python scripts/memory.py --shape 35b-a3b --cards 24,32 --parallel 1,4`

    Parameters
    ----------
    shape
        Shapes of Qwen3.5-4B, -9B, -35B-A3B, or of the 27B (Qwen3.5 to 3.8).
    quants
        Recipes, or F16, BF16, F32.
    cards
        Memory of the card, in GB.
    parallel
        Requests at once.
    """
    if wrong := [name for name in quants if name not in (*known_recipes(), *FLOAT_TYPES)]:
        known = ", ".join((*known_recipes(), *FLOAT_TYPES))
        raise BenchError(f"--quants {wrong[0]}: known are {known}")
    fits_table(shape, quants, cards, parallel).print()


def fits_table(shape: str, quants: Sequence[str], cards: Sequence[int], parallel: Sequence[int]) -> Table:
    """The largest context by quant, and by card and number of requests; empty where nothing fits."""
    rows: list[list[str | float]] = []
    for quant, path in _headers(shape, quants):
        plans = [_plan(path, card * GB, n) for card in cards for n in parallel]
        weights = max((plan.usages[0].weights / GB for plan in plans if plan), default=0.0)
        tokens = [f"{plan.settings.ctx_size:,}" if plan else "" for plan in plans]
        rows.append([quant, f"{weights:.1f}" if weights else "", *tokens])
    columns = [f"{card} GB, {n} at once" for card in cards for n in parallel]
    return Table(["quant", "weights, GB", *columns], rows, f"Largest context: {shape}", (NOTE,))


def _headers(shape: str, quants: Sequence[str]) -> Iterator[tuple[str, Path]]:
    config = SHAPES[shape]
    for quant in quants:
        floats = [name for name in FLOAT_TYPES if name == quant]
        tensors = (
            float_tensors(config, floats[0]) if floats else quantized_tensors(config, load_recipe(quant))
        )
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"{shape}-{quant}.gguf"
            write_header(path, config, tensors)
            yield quant, path


def _plan(path: Path, n_bytes: int, parallel: int) -> MemoryPlan | None:
    """The server's plan with the largest context that fits; None if nothing does. The device has llama.cpp's
    name of the one that computes here."""
    places = [
        Device("CPU", f"a card of {n_bytes / GB:g} GB", True, n_bytes, n_bytes),
        Device("CPU", "the host", False, HOST, HOST),
    ]
    wanted = EngineSettings(model=path, parallel=parallel, speculation="both", remember=False)
    try:
        plan = plan_memory(wanted.replace(f16_copies="off", repack="off"), read_header(path), places)
    except DoesNotFit:
        return None
    least, sizes = plan.settings.ctx_size, range(plan.settings.ctx_size, MAX_CELLS + 1, CELL_PADDING)
    count = bisect_left(
        sizes, True, key=lambda n: not plan.rearranged(plan.settings.replace(ctx_size=n)).fits
    )
    cells = sizes[max(count - 1, 0)]
    while cells > least:
        wide = plan.profiled(plan.settings.replace(ctx_size=cells))  # buffers grow with the context
        if wide.fits:
            return wide
        cells = max(least, padded(cells * 31 // 32) - CELL_PADDING)
    return plan


if __name__ == "__main__":
    run(memory)
