"""Reports a conversion's result: size, types, digest, and divergence from the reference."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from qwen_serve.convert.compensation.errors import Errors, measure_errors
from qwen_serve.convert.imatrix import FEW_ROWS, Coverage, Imatrix, expert_coverage
from qwen_serve.convert.kld import OWN, Divergence, measure_divergence
from qwen_serve.convert.progress import BYTES, Progress, size
from qwen_serve.convert.recipes import Recipe
from qwen_serve.llamacpp.evaluation import Runtime
from qwen_serve.llamacpp.gguf import TensorInfo, read_header
from qwen_serve.llamacpp.patches import LLAMA_VERSION

READ_BYTES = 16 * 2**20
SHOWN = 8  # most blocks whose experts are listed on the terminal


@dataclass(frozen=True)
class Group:
    """Tensors of one role, such as `blk.*.ffn_down.weight`, and one type."""

    name: str
    type: str
    tensors: int
    elements: int
    n_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.n_bytes / self.elements


@dataclass(frozen=True)
class Report:
    """The JSON file beside a GGUF. `divergence` is None if none was measured. It is on the model's own text,
    `unlike` on texts of other kinds than any that the file was fitted to."""

    file: str
    n_bytes: int
    sha256: str
    elements: int
    tensor_bytes: int
    groups: tuple[Group, ...]
    recipe: Mapping[str, Any] | None
    reference: str | None
    divergence: Divergence | None
    provenance: Mapping[str, Any]
    llama_cpp_python: str
    coverage: Coverage | None = None
    """Coverage of the experts, if the model has any and an importance matrix was used."""
    unlike: Mapping[str, Divergence] = field(default_factory=dict)
    matrices: Mapping[str, Mapping[str, Errors]] = field(default_factory=dict)
    """Of a compensated file: errors by matrix, on the model's own text (`own`) and others (`unlike`)."""

    @property
    def bits_per_weight(self) -> float:
        """Bits of tensor data per weight, over all tensors."""
        return 8 * self.tensor_bytes / self.elements

    def to_json(self) -> str:
        data = asdict(self)
        data["bits_per_weight"] = round(self.bits_per_weight, 4)
        for group, source in zip(data["groups"], self.groups, strict=True):
            group["bits_per_weight"] = round(source.bits_per_weight, 4)
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        data = json.loads(text)
        del data["bits_per_weight"]
        for group in data["groups"]:
            del group["bits_per_weight"]
        data["groups"] = tuple(Group(**group) for group in data["groups"])
        data["divergence"] = Divergence(**data["divergence"]) if data["divergence"] else None
        data["unlike"] = {name: Divergence(**one) for name, one in data.get("unlike", {}).items()}
        data["matrices"] = {
            name: {kind: Errors(**one) for kind, one in kinds.items()}
            for name, kinds in data.get("matrices", {}).items()
        }
        data["coverage"] = Coverage(**data["coverage"]) if data.get("coverage") else None
        return cls(**data)


def tensor_groups(gguf: Path) -> tuple[Group, ...]:
    """Tensors by role and type, the largest first. The MTP block's roles have `mtp` in place of the number.

    Raises:
        ModelLoadError: not a GGUF file.
    """
    tensors = read_header(gguf).tensors.values()
    mtp_blocks = {t.name.split(".")[1] for t in tensors if ".nextn." in t.name}
    found: dict[tuple[str, str], list[TensorInfo]] = {}
    for tensor in tensors:
        block = re.match(r"blk\.(\d+)\.", tensor.name)
        name = tensor.name
        if block:
            name = f"blk.{'mtp' if block[1] in mtp_blocks else '*'}.{name[block.end() :]}"
        found.setdefault((name, tensor.type_name), []).append(tensor)
    groups = (
        Group(name, kind, len(ts), sum(t.n_elements for t in ts), sum(t.n_bytes for t in ts))
        for (name, kind), ts in found.items()
    )
    return tuple(sorted(groups, key=lambda group: (-group.n_bytes, group.name, group.type)))


def write_report(
    gguf: Path,
    out: Path,
    *,
    reference: Path | None,
    recipe: Recipe | None,
    imatrix: Path | None,
    texts: Mapping[str, Path],
    runtime: Runtime,
    provenance: Mapping[str, Any],
    base: Path | None = None,
) -> None:
    """Examines `gguf` and writes the report to `out`; with `reference` and `texts`, measures the divergence.

    Args:
        base: what a compensated file was made from, to measure its matrices' errors on the texts.

    Raises:
        ConvertError: see `measure_divergence`.
    """
    found: dict[str, Divergence] = {}
    if reference is not None and texts:
        found = measure_divergence(reference, gguf, texts=texts, runtime=runtime)
    matrices: dict[str, dict[str, Errors]] = {}
    if base is not None and texts:
        kinds = {"own": [texts[OWN]], "unlike": [text for name, text in texts.items() if name != OWN]}
        matrices = measure_errors(base, gguf, texts=kinds, imatrix=imatrix, runtime=runtime)
    groups = tensor_groups(gguf)
    report = Report(
        file=gguf.name,
        n_bytes=gguf.stat().st_size,
        sha256=_sha256(gguf),
        elements=sum(group.elements for group in groups),
        tensor_bytes=sum(group.n_bytes for group in groups),
        groups=groups,
        recipe=recipe.model_dump(by_alias=True) if recipe else None,
        reference=reference.name if reference else None,
        divergence=found.pop(OWN, None),
        provenance=provenance,
        llama_cpp_python=LLAMA_VERSION,
        coverage=expert_coverage(Imatrix.load(imatrix)) if imatrix else None,
        unlike=found,
        matrices=matrices,
    )
    out.write_text(report.to_json(), encoding="utf-8")


def print_report(path: Path) -> None:
    """Prints a report file as tables."""
    report = Report.from_json(path.read_text(encoding="utf-8"))
    print(f"\n{report.file}")
    print(f"  size        {size(report.n_bytes)} ({report.n_bytes:,} bytes)")
    print(f"  weights     {report.elements:,} at {report.bits_per_weight:.3f} bits")
    if method := report.provenance.get("method"):
        print(f"  method      {method}")
    if vocabulary := report.provenance.get("vocabulary"):
        print(f"  vocabulary  {vocabulary['tokens']:,} of {vocabulary['of']:,} tokens")
    print(f"  sha256      {report.sha256}")
    if (d := report.divergence) is not None:
        print(f"  mean KLD    {d.mean:.6f} nats from {report.reference} over {d.tokens:,} tokens")
        print(f"              median {d.median:.6f}, 99% {d.p99:.6f}, most {d.maximum:.4f}")
        print(f"  same top    {100 * d.same_top:.2f}% of tokens")
        if d.dropped:
            print(f"  dropped     {100 * d.dropped:.4f}% of the reference's probability, by --keep-vocab")
    for name, one in report.unlike.items():
        print(f"  on {name:<9}{one.mean:.6f} nats over {one.tokens:,} tokens unlike the calibration text")
    if (c := report.coverage) is not None:
        print(f"  experts     {c.experts:,}; half of them read {c.median_rows:,.0f} calibration rows or more")
        print(f"              none at all: {_experts(c.unreached)}")
        print(f"              fewer than {FEW_ROWS}: {_experts(c.rare)}")
    width = max(len(group.name) for group in report.groups)
    print(f"\n  {'tensors':<{width}}  type       count   bits       size")
    for g in report.groups:
        numbers = f"{g.tensors:5}  {g.bits_per_weight:5.2f}  {size(g.n_bytes):>9}"
        print(f"  {g.name:<{width}}  {g.type:<9}  {numbers}")
    if report.matrices:
        print_errors(report.matrices)
    print()


def print_errors(matrices: Mapping[str, Mapping[str, Errors]]) -> None:
    """Prints each matrix's squared errors, by nearest and compensated, on the model's own text and others."""
    width = max(map(len, matrices))
    heads = (
        f"{'own: nearest':>12}  {'compensated':>11}  {'':>4}  {'unlike: nearest':>15}  {'compensated':>11}"
    )
    print(f"\n  {'squared error of products':<{width}}  {heads}")
    for name, kinds in matrices.items():
        cells = (
            f"{one.nearest:{12 if kind == 'own' else 15}.3g}  {one.compensated:11.3g}  {_change([one]):>4}"
            for kind, one in kinds.items()
        )
        print(f"  {name:<{width}}  {'  '.join(cells)}")


def _change(errors: Sequence[Errors]) -> str:
    """The change by compensation, as the geometric mean."""
    ratios = [one.compensated / one.nearest for one in errors if one.nearest and one.compensated]
    return f"{100 * (geometric_mean(ratios) - 1):+.0f}%" if ratios else ""


def print_serving(models: Sequence[Path]) -> None:
    """Prints how to serve each of them."""
    print("to serve:" if len(models) == 1 else "to serve one of them:")
    for path in models:
        print(f"  python -m qwen_serve.server --model {shlex.quote(str(path))}")


def print_table(paths: Sequence[Path]) -> None:
    """Prints report files as one table, with a warning about experts that calibration hardly reached."""
    reports = [Report.from_json(path.read_text(encoding="utf-8")) for path in paths]
    width = max((len(report.file) for report in reports), default=0)
    kinds = list(dict.fromkeys(name for report in reports for name in report.unlike))
    heads = "".join(f"  {f'on {name}':>9}" for name in kinds)
    print(f"\n{'file':<{width}}  {'size':>9}  {'bits':>6}  {'mean KLD':>9}  {'same top':>8}{heads}")
    for report in reports:
        measured = f"{'':>9}  {'':>8}"
        if (d := report.divergence) is not None:
            measured = f"{d.mean:9.6f}  {100 * d.same_top:7.2f}%"
            measured += "".join(
                f"  {report.unlike[name].mean:9.6f}" for name in kinds if name in report.unlike
            )
        row = f"{report.file:<{width}}  {size(report.n_bytes):>9}  {report.bits_per_weight:6.3f}  {measured}"
        print(row.rstrip())
    for report in reports:
        if (c := report.coverage) is not None and (c.rare or c.unreached):
            rare, unreached = (sum(map(len, found.values())) for found in (c.rare, c.unreached))
            print(
                f"{report.file}: {unreached:,} of {c.experts:,} experts read no calibration row, {rare:,} "
                f"fewer than {FEW_ROWS} (--show-tensors names them)"
            )
        if report.matrices:
            own, unlike = (
                _change([kinds[kind] for kinds in report.matrices.values() if kind in kinds])
                for kind in ("own", "unlike")
            )
            print(
                f"{report.file}: with compensation the matrices' squared errors are {own} on the model's own "
                f"text, {unlike} on other kinds (--show-tensors names them)"
            )
    print()


def _experts(found: Mapping[str, list[int]]) -> str:
    """Text such as `3 (blk.0: 1, 5; blk.2: 7)`; only the first blocks are listed, the JSON has all."""
    if not found:
        return "0"
    shown = [f"{block}: {', '.join(map(str, experts))}" for block, experts in list(found.items())[:SHOWN]]
    more = "; ..." if len(found) > SHOWN else ""
    return f"{sum(map(len, found.values())):,} ({'; '.join(shown)}{more})"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file, Progress("sha256", path.stat().st_size, BYTES) as progress:
        while block := file.read(READ_BYTES):
            digest.update(block)
            progress.advance(len(block))
    return digest.hexdigest()
