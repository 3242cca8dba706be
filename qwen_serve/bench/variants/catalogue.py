"""``qwen-bench sweep variants``: the package's variants, as a table and in docs/variants.md.

Predictions are computed from the variants' files. Scores of gates are recorded ones. They are shown only if
they were measured with the weights and settings that the file has now.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pandas as pd
from cyclopts import Parameter

from qwen_serve.bench.analysis.cards import CARDS, Card, Reached
from qwen_serve.bench.analysis.geometry import UBATCH, Geometry
from qwen_serve.bench.analysis.roofline import CASES, KV_BYTES, card_named, predict
from qwen_serve.bench.arguments import parsed_by
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.gates.estimate import Paired
from qwen_serve.bench.gates.score import GateScore, gate_scores
from qwen_serve.bench.load.protocol import CATEGORIES
from qwen_serve.bench.models.header import float_tensors, quantized_tensors
from qwen_serve.bench.models.shapes import SHAPES
from qwen_serve.bench.report.publish import with_headline
from qwen_serve.bench.store import COLUMNS, Manifest, Results, load, write_atomically
from qwen_serve.bench.terminal import Cell, Table
from qwen_serve.bench.variants.plan import recipe_of
from qwen_serve.bench.variants.stages import GATES as ASKED
from qwen_serve.bench.variants.variant import of_quants, read_variant
from qwen_serve.convert.recipes import known_recipes
from qwen_serve.convert.tensors import FLOAT_TYPES
from qwen_serve.llamacpp.gguf import TensorInfo
from qwen_serve.server.variant import Variant, known_variants

RECORDED = Path(__file__).resolve().parents[3] / "docs" / "results"
SHAPE = "4b"
ELSEWHERE = {"threads", "threads_batch"}
"""Settings that depend on the machine. Scores do not depend on them."""
TITLE = "Qwen3.5-4B by {what}: predicted on {card}, gates recorded on nano"
PREDICTED = (
    "Predicted: milliseconds of one request alone, in the official categories (64, 2,048 and 8,192 tokens "
    "in; 128, 256 and 256 out), without cached prefix and without drafts. `qwen-bench engine roofline` "
    "calculates them from the sizes of the tensors and the datasheet's rates. They are lower bounds that no "
    "engine reaches; none was measured."
)
GATES = (
    "Gates: share of nano's held-out items answered correctly with exactly these weights and settings, and "
    "whether all gates pass. Lost: items of all gates that only full precision answered correctly; gained: "
    "items that only the variant did; p: McNemar's exact test; -: not measured. Nano is tiny, and loses more "
    "quality at few bits than a large model."
)
LEVELS = """\
## What `fast` was chosen from

`fast` has the least predicted latency of the levels that pass every gate, do not lose more items than they
gain with p < 0.05, and have multi-row kernels in the patches (Q4_K, Q5_K, Q6_K), which verify drafts.
"""
NO_GATES = "Gates: none was recorded with these weights and settings."


def variants(
    *,
    card: Annotated[Card, parsed_by(card_named)] = CARDS["A10G"],
    recorded: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative=())] = (),
    page: Path | None = None,
) -> int:
    """List the package's variants: weights, predicted latency, recorded gates.

    - `qwen-bench sweep variants --card H100`
    - `qwen-bench sweep variants --page docs/variants.md`

    Parameters
    ----------
    card
        GPU of the prediction: A10G, L4, H100 or H200.
    recorded
        Stores with recorded gates, or folders written by `qwen-bench report --publish` (default: those in
        docs/results).
    page
        Markdown file to write the table and the variants' files into, between its marks.
    """
    shipped = [read_variant(name) for name in known_variants()]
    results = [read_recorded(path) for path in recorded or published()]
    levels = [level for level in of_quants(known_recipes()) if recorded_gates(level, results)]
    table = catalogue(shipped, card, results)
    parts = [table.markdown(), files(shipped)]
    table.print()
    if levels:
        beside = replace(catalogue(levels, card, results, "level, with default settings"), notes=())
        beside.print()
        parts += [LEVELS, beside.markdown()]
    if page is not None:
        write_atomically(page, with_headline(page, "\n".join(parts)))
    return 0


def catalogue(
    shipped: Sequence[Variant], card: Card, results: Sequence[Results], what: str = "variant"
) -> Table:
    """A table with a row for each variant, ordered by predicted latency, the lowest first."""
    gates = {variant.name: recorded_gates(variant, results) for variant in shipped}
    names = list(dict.fromkeys(gate.gate for scores in gates.values() for gate in scores))
    lines: list[tuple[float, dict[str, Cell]]] = []
    for variant in shipped:
        geometry = Geometry(tensors_of(variant), kv_bytes=kv_bytes(variant))
        times = predicted(geometry, card)
        scores = {gate.gate: gate for gate in gates[variant.name]}
        line: dict[str, Cell] = {"variant": variant.name, "weights": variant.level}
        line |= {"GB": geometry.n_bytes / 1e9, **{f"{name}, ms": ms for name, ms in times.items()}}
        if names:
            line |= {_column(name): _percent(scores.get(name)) for name in names}
            line |= {
                "gates": _verdicts(gates[variant.name]),
                "items": sum(gate.items for gate in scores.values()),
            }
            line |= _losses(paired(gates[variant.name]))
        lines.append((sum(times.values()), line))
    lines.sort(key=lambda one: one[0])
    notes = (PREDICTED, GATES if names else NO_GATES)
    return Table.of([line for _, line in lines], title=TITLE.format(what=what, card=card.name), notes=notes)


def tensors_of(variant: Variant) -> list[TensorInfo]:
    """The tensors of Qwen3.5-4B with the variant's types. Raises BenchError for a recipe that prunes."""
    config = SHAPES[SHAPE]
    recipe = recipe_of(variant)
    if recipe is not None:
        return quantized_tensors(config, recipe)
    (outtype,) = [kind for kind in FLOAT_TYPES if kind == variant.level]
    return float_tensors(config, outtype)


def predicted(geometry: Geometry, card: Card) -> dict[str, float]:
    """Milliseconds of a request by category, with an uncached prompt and without drafts."""
    found = predict(card, Reached(), geometry, None, UBATCH)
    return {name: found[name, CASES[0]]["estimate ms"] for name in CATEGORIES}


def kv_bytes(variant: Variant) -> float:
    """Mean bytes of an element of the KV cache, over keys and values."""
    kinds = [str(variant.settings.get(f"cache_type_{one}", "f16")) for one in "kv"]
    if unknown := [kind for kind in kinds if kind not in KV_BYTES]:
        raise BenchError(
            f"{variant.name}: a KV cache of {unknown[0]} is not priced; {', '.join(KV_BYTES)} are"
        )
    return sum(KV_BYTES[kind] for kind in kinds) / 2


def paired(gates: Sequence[GateScore]) -> Paired | None:
    """The comparison with full precision, item by item over all gates; None unless all gates have recorded
    outcomes."""
    pairs = [gate.paired for gate in gates if gate.paired is not None]
    return sum(pairs, Paired(0, 0)) if pairs and len(pairs) == len(gates) else None


def _column(gate: str) -> str:
    return f"{gate.removeprefix('nano_')} %"


def _percent(gate: GateScore | None) -> str | None:
    return None if gate is None else f"{100 * gate.score:.1f}"


def _verdicts(gates: Sequence[GateScore]) -> str | None:
    """``pass`` if every gate passes; otherwise the other verdicts, with their gates."""
    others = [gate for gate in gates if gate.verdict not in ("pass", None)]
    if others:
        return ", ".join(f"{gate.gate}: {gate.verdict}" for gate in others)
    return "pass" if any(gate.verdict for gate in gates) else None


def _losses(found: Paired | None) -> dict[str, Cell]:
    """Items lost and gained, and the p value."""
    if found is None:
        return dict.fromkeys(("lost", "gained", "p"))
    return {
        "lost": found.lost,
        "gained": found.gained,
        "p": f"{found.p_value:.2g}",
    }


def files(variants: Sequence[Variant]) -> str:
    """Markdown: what each variant's file sets. The files' comments give the reason for each value."""
    rows = ["| file, with its reasons | what | quant | settings |", "|---|---|---|---|"]
    for one in variants:
        settings = ", ".join(f"`{name}={str(value).lower()}`" for name, value in one.settings.items())
        rows.append(f"| [{one.name}](../variants/{one.name}.toml) | {one.about} | {one.level} | {settings} |")
    return "\n".join(rows) + "\n"


def published() -> list[Path]:
    """The folders in docs/results that have a summary."""
    return sorted(path.parent for path in RECORDED.glob("*/summary.csv"))


def read_recorded(path: Path) -> Results:
    """Read a store, or a folder written by `report --publish`. Raises BenchError if it has neither."""
    if not (path / "summary.csv").is_file():
        return load([path])
    summary = pd.read_csv(path / "summary.csv").rename(columns={"p50": "value"}).assign(round=1)
    manifests = [Manifest.model_validate(run) for run in json.loads((path / "runs.json").read_bytes())]
    return Results(summary[list(COLUMNS)], {manifest.run: manifest for manifest in manifests})


def recorded_gates(variant: Variant, results: Sequence[Results]) -> list[GateScore]:
    """The newest scores of the variant on nano, all of one run; empty if the current variant was not
    measured."""
    found: dict[str, list[GateScore]] = {}
    for one in results:
        for run, manifest in one.manifests.items():
            for name, about in manifest.subjects.items():
                if Path(str(manifest.settings.get("source"))).name == "nano" and _is(variant, about):
                    found[run] = gate_scores(one.of(run=run, subject=name)) or found.get(run, [])
    newest = max((run for run, scores in found.items() if scores), default=None)
    return [] if newest is None else found[newest]


def _is(variant: Variant, about: Mapping[str, object]) -> bool:
    """Whether a sweep's subject has the variant's weights and settings, and finished its gates."""
    settings, stages = about.get("settings"), about.get("stages")
    if about.get("quant") != variant.quant or variant.quant is None or not isinstance(settings, dict):
        return False
    if not isinstance(stages, dict) or ASKED not in stages:
        return False
    return {name: value for name, value in settings.items() if name not in ELSEWHERE} == variant.settings
