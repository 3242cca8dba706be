"""A searched recipe as the TOML file that `--recipe` reads, with the evidence for it."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from qwen_serve.convert.progress import duration
from qwen_serve.convert.recipes import Evidence, Override, Recipe
from qwen_serve.convert.report import Report
from qwen_serve.convert.search.groups import Type, patterns
from qwen_serve.convert.search.search import Found
from qwen_serve.llamacpp.patches import LLAMA_VERSION

FILE_TYPES = {
    Type.Q2_K: "Q2_K",
    Type.IQ3_XXS: "IQ3_XXS",
    Type.Q3_K: "Q3_K_M",
    Type.IQ3_S: "IQ3_S",
    Type.IQ4_XS: "IQ4_XS",
    Type.Q4_K: "Q4_K_M",
    Type.IQ4_NL: "IQ4_NL",
    Type.Q5_0: "Q5_0",
    Type.Q5_1: "Q5_1",
    Type.Q5_K: "Q5_K_M",
    Type.Q6_K: "Q6_K",
    Type.Q8_0: "Q8_0",
}
"""File type by the most common type of its matrices; every matrix has an override."""


def evidence_of(found: Found, command: str, source: str) -> Evidence:
    """The measurements of a recipe; `command` makes it again, `source` names the model."""
    return Evidence(
        command=command,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        source=source,
        llama_cpp_python=LLAMA_VERSION,
        bytes=found.n_bytes,
        bits_per_weight=round(found.bits_per_weight, 4),
        predicted=found.predicted,
        measured=found.reading.mean,
        prediction_error=round(found.prediction_error, 4),
        left_out_error=round(found.left_out, 4),
        probes=found.probes,
        probe_tokens=found.tokens,
        search_seconds=round(found.seconds, 1),
        decode_ms=found.milliseconds,
    )


def with_results(evidence: Evidence, report: Report) -> Evidence:
    """The evidence with what was measured with the finished file."""
    measured: dict[str, Any] = {"bytes": report.n_bytes}
    if (d := report.divergence) is not None:
        evaluated = {"tokens": d.tokens, "mean": d.mean, "p99": d.p99, "same_top": d.same_top}
        measured |= {f"evaluation_{key}": value for key, value in evaluated.items()}
        measured["evaluation_unlike"] = {name: one.mean for name, one in report.unlike.items()}
    return evidence.model_copy(update=measured)


class Chosen(Protocol):
    """Types by tensor, and their parts of the divergence."""

    @property
    def types(self) -> Mapping[str, Type]: ...
    @property
    def shares(self) -> Mapping[str, float]: ...


def as_recipe(found: Chosen, about: str, evidence: Evidence | None) -> Recipe:
    """Overrides by type, then by role, so that tensors of a role with one type are one line."""
    weights: Counter[Type] = Counter(found.types.values())
    by_type: dict[Type, list[str]] = defaultdict(list)
    for name, kind in found.types.items():
        by_type[kind].append(name)
    overrides = []
    for kind in sorted(by_type, key=lambda kind: list(FILE_TYPES).index(kind)):
        roles: dict[str, list[str]] = defaultdict(list)
        for name in by_type[kind]:
            roles[patterns([name])[0].rpartition(")")[2]].append(name)
        for names in roles.values():
            share = sum(found.shares[name] for name in names)
            overrides.append(
                Override(
                    pattern=patterns(names)[0],
                    type=kind.name,
                    reason=f"predicted part of the divergence: {share:.2g} nats",
                )
            )
    return Recipe(
        type=FILE_TYPES[weights.most_common(1)[0][0]], about=about, override=overrides, evidence=evidence
    )


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Writes the file that `load_recipe` reads."""
    lines = [f"type = {json.dumps(recipe.type)}", f"about = {json.dumps(recipe.about, ensure_ascii=False)}"]
    if not recipe.imatrix:
        lines.append("imatrix = false")
    if recipe.evidence is not None:
        lines += ["", "[evidence]"]
        for key, value in recipe.evidence.model_dump(exclude_none=True).items():
            lines.append(f"{key} = {_toml(value)}")
    for override in recipe.override:
        lines += [
            "",
            "[[override]]",
            f"pattern = '{override.pattern}'",
            f'type = "{override.type}"',
            f"reason = {json.dumps(override.reason, ensure_ascii=False)}",
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _toml(value: str | float | dict[str, float]) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {one}' for key, one in value.items())} }}"
    return json.dumps(value, ensure_ascii=False)


def print_found(found: Found, report: Report, path: Path, took: Mapping[str, float]) -> None:
    """The search in a few lines, after the file's report; `took`: seconds by stage."""
    print(f"{path}")
    print(f"  searched    {found.probes} probes of {found.tokens:,} tokens in {duration(found.seconds)}")
    print(
        f"  mean KLD    predicted {found.predicted:.5f}, measured {found.reading.mean:.5f} "
        f"on the search's text ({100 * found.prediction_error:.0f}% off)"
    )
    if (d := report.divergence) is not None:
        print(f"              {d.mean:.5f} on the evaluation text, with the file")
        for name, one in report.unlike.items():
            times = one.mean / found.predicted
            print(f"              {one.mean:.5f} on {name}, {times:.1f} times the prediction")
    if found.reading.draft is not None:
        print(f"  drafts      mean KLD {found.reading.draft:.5f}")
    if found.milliseconds is not None:
        print(f"  a token     reads its weights in {found.milliseconds:.4g} ms at the datasheet's bandwidth")
    parts = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in took.items())
    print(f"  in all      {duration(sum(took.values()))}: {parts}")
    print()
