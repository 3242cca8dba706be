"""``python scripts/recipe.py``: a searched recipe for a model of the family that is too large to probe."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from script import run

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.models.header import float_tensors, quantized_tensors, write_header
from qwen_serve.bench.models.shapes import SHAPES
from qwen_serve.bench.terminal import Table
from qwen_serve.common.files import replacing
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.recipes import Evidence, load_recipe
from qwen_serve.convert.search.groups import Layout, Type, read_layout
from qwen_serve.convert.search.record import Record, is_record
from qwen_serve.convert.search.search import HEADER_EXTRA
from qwen_serve.convert.search.target import Target, parse_size, spell_size
from qwen_serve.convert.search.transfer import Costs
from qwen_serve.convert.search.write import as_recipe, write_recipe
from qwen_serve.llamacpp.errors import ModelLoadError
from qwen_serve.llamacpp.patches import LLAMA_VERSION

NOTE = (
    "Computed, not measured: the larger model is taken to lose in each role, at each depth, what the probed "
    "one lost there. Its own search (`qwen-convert --quant auto`) measures it."
)


@dataclass(frozen=True)
class Chosen:
    types: Mapping[str, Type]
    shares: Mapping[str, float]


def recipe(
    *,
    base: Path,
    record: Path,
    shape: Literal["4b", "9b", "27b"] = "27b",
    like: str = "Q4_K_M",
    target_size: str | None = None,
    out: Path | None = None,
) -> None:
    """A recipe for a larger model, from the measurements of a smaller one's search.

    - `python scripts/recipe.py --base nano-F16.gguf --record nano.search.json --shape 27b`

    Parameters
    ----------
    base
        The unquantized GGUF of the model that was searched.
    record
        The measurements of its search, NAME.search.json.
    shape
        Shapes of the model that the recipe is for.
    like
        The recipe that it is compared with.
    target_size
        Size of the file, such as 16GB (default: the size with --like).
    out
        TOML file for `qwen-convert --recipe`.
    """
    try:
        standard = load_recipe(like)
        room = None if target_size is None else parse_size(target_size)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "header.gguf"
            write_header(path, SHAPES[shape], float_tensors(SHAPES[shape]), vocab=False)
            layout = read_layout(path, extra=HEADER_EXTRA, used_experts=None)
        if not is_record(record):
            raise BenchError(f"--record {record}: no measurements of a search")
        read = Record(record, json.loads(record.read_text(encoding="utf-8"))["made_from"])
        costs = Costs.transferred(layout, read_layout(base, extra=HEADER_EXTRA, used_experts=None), read)
        usual = {one.name: Type(one.type) for one in quantized_tensors(SHAPES[shape], standard)}
        usual = {m.name: usual[m.name] for m in layout.matrices}
        types = costs.solve(Target(n_bytes=room or layout.file_bytes(usual)))
    except (ConvertError, ModelLoadError, ValueError, OSError) as error:
        raise BenchError(str(error)) from error
    roles_table(shape, like, costs, usual, types).print()
    if out is not None:
        size = "" if target_size is None else f" --target-size {target_size}"
        options = f"--base {base.name} --record {record.name} --shape {shape} --like {like}{size}"
        evidence = Evidence(
            command=f"python scripts/recipe.py {options}",
            date=time.strftime("%Y-%m-%d", time.gmtime()),
            source=base.stem,
            llama_cpp_python=LLAMA_VERSION,
            bytes=layout.file_bytes(types),
            bits_per_weight=round(layout.bits_per_weight(types), 4),
            predicted=costs.total(types),
        )
        about = f"computed for {shape} from {record.name}, not measured"
        made = as_recipe(Chosen(types, costs.shares(types)), about, evidence)
        with replacing(out) as part:
            write_recipe(made, part)
        print(f"wrote {out}")


def roles_table(
    shape: str, like: str, costs: Costs, usual: Mapping[str, Type], types: Mapping[str, Type]
) -> Table:
    """Bits a weight of each role with both recipes; size and divergence of both files."""
    layout = costs.layout
    names: dict[str, list[str]] = defaultdict(list)
    for m in layout.matrices:
        names["MTP block" if m.mtp else m.group.partition(" ")[0]].append(m.name)
    elements = {m.name: m.elements for m in layout.matrices}
    rows: list[list[str | float]] = []
    for role, of in sorted(names.items(), key=lambda item: -sum(elements[name] for name in item[1])):
        share = 100 * sum(elements[name] for name in of) / layout.elements
        rows.append([role, f"{share:.1f}", *(_bits(layout, each, of) for each in (usual, types))])
    rows.append(["file, GB", "", *(f"{layout.file_bytes(each) / 1e9:.2f}" for each in (usual, types))])
    rows.append(["computed mean KLD", "", *(f"{costs.total(each):.4f}" for each in (usual, types))])
    header = ["role", "% of weights", f"{like}, bits a weight", "searched, bits a weight"]
    size = spell_size(layout.file_bytes(types))
    return Table(header, rows, f"A recipe of {size} for {shape}", (NOTE,))


def _bits(layout: Layout, types: Mapping[str, Type], names: list[str]) -> str:
    of = [m for m in layout.matrices if m.name in set(names)]
    return f"{8 * sum(m.n_bytes(types[m.name]) for m in of) / sum(m.elements for m in of):.2f}"


if __name__ == "__main__":
    run(recipe)
