"""A recipe for a large model from the probes of a small one: the same divergence in more tensors."""

import json
import re
import sys
from pathlib import Path

import pytest

from qwen_serve.bench.models.header import float_tensors, write_header
from qwen_serve.bench.models.shapes import SHAPES
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.recipes import RECIPES, load_recipe
from qwen_serve.convert.search.groups import TYPES, Layout, Type, read_layout
from qwen_serve.convert.search.measure import Reading
from qwen_serve.convert.search.record import Record
from qwen_serve.convert.search.search import HEADER_EXTRA, probed
from qwen_serve.convert.search.target import Target
from qwen_serve.convert.search.transfer import Costs
from tests.processes import run

ROOT = Path(__file__).parents[3]


def layout_of(shape: str, folder: Path) -> tuple[Path, Layout]:
    path = folder / f"{shape}.gguf"
    write_header(path, SHAPES[shape], float_tensors(SHAPES[shape]), vocab=False)
    return path, read_layout(path, extra=0, used_experts=None)


def probes(layout: Layout, path: Path, worse: str = "ssm_out") -> Record:
    """Of a model in which `worse` is ten times as sensitive as all else; errors halve with each type."""
    record = Record(path, "made")
    errors = {kind: 0.1 / 2**place for place, kind in enumerate(TYPES)}
    record.errors = {m.name: {kind: errors[kind] for kind in m.types} for m in layout.matrices}
    for group, matrices in layout.groups.items():
        scale = 10.0 if group.startswith(worse) else 1.0
        for kind in probed(matrices[0]):
            value = scale * errors[kind] * len(matrices)
            reading = Reading(mean=value, p99=value, same_top=1.0, draft=value)
            record.add(group, {m.name: kind for m in matrices}, reading, 0.0)
    record.save()
    return record


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Layout]:
    return layout_of("small", tmp_path)


def test_the_same_model_keeps_its_own_costs(tmp_path: Path, small: tuple[Path, Layout]) -> None:
    layout = small[1]
    costs = Costs.transferred(layout, layout, probes(layout, tmp_path / "x.json"))
    for m in layout.matrices:
        scale = 10.0 if m.group.startswith("ssm_out") else 1.0
        assert costs.of[m.name][Type.Q4_K] == pytest.approx(
            scale * 0.1 / 2 ** TYPES.index(Type.Q4_K), rel=1e-3
        )


def test_a_larger_model_loses_as_much(tmp_path: Path, small: tuple[Path, Layout]) -> None:
    """In each role, whatever the number of layers, but for a head that only the large one has."""
    record = probes(small[1], tmp_path / "x.json")
    own = Costs.transferred(small[1], small[1], record)
    large = layout_of("27b", tmp_path)[1]
    costs = Costs.transferred(large, small[1], record)
    for kind in (Type.Q2_K, Type.Q6_K):
        totals = []
        for each in (own, costs):
            of: dict[str, float] = {}
            for m in each.layout.matrices:
                role = m.group.partition(" ")[0]
                of[role] = of.get(role, 0.0) + each.of[m.name][kind]
            totals.append(of)
        head = totals[1].pop("output")
        assert head == pytest.approx(totals[0]["token_embd"], rel=1e-3)
        assert totals[1] == pytest.approx(totals[0], rel=1e-3)


def test_sensitive_roles_get_more_bits(tmp_path: Path, small: tuple[Path, Layout]) -> None:
    large = layout_of("27b", tmp_path)[1]
    costs = Costs.transferred(large, small[1], probes(small[1], tmp_path / "x.json"))
    room = large.file_bytes(dict.fromkeys((m.name for m in large.matrices), Type.Q4_K))
    types = costs.solve(Target(n_bytes=room))
    assert large.file_bytes(types) <= room
    assert costs.total(types) < costs.total(dict.fromkeys(types, Type.Q4_K))
    bits = {
        role: [TYPES.index(kind) for name, kind in types.items() if role in name]
        for role in ("ssm_out", "ffn_up")
    }
    assert min(bits["ssm_out"]) > max(bits["ffn_up"])


def test_a_record_without_some_probes_is_refused(tmp_path: Path, small: tuple[Path, Layout]) -> None:
    record = probes(small[1], tmp_path / "x.json")
    data = json.loads((tmp_path / "x.json").read_text())
    data["readings"].popitem()
    (tmp_path / "x.json").write_text(json.dumps(data))
    record = Record(tmp_path / "x.json", "made")
    with pytest.raises(ConvertError, match="the record has no probe of"):
        Costs.transferred(small[1], small[1], record)


def test_the_script_writes_a_recipe(tmp_path: Path, small: tuple[Path, Layout]) -> None:
    record, made, again = (tmp_path / name for name in ("x.json", "27b.toml", "again.toml"))
    probes(small[1], record)
    script: list[str | Path] = [sys.executable, ROOT / "scripts/recipe.py"]
    done = run([*script, "--base", small[0], "--record", record, "--out", made])
    assert done.returncode == 0, done.stderr
    assert "ffn_down" in done.stdout
    assert "Computed, not measured" in done.stdout
    recipe = load_recipe(made)
    assert any("ssm_out" in override.pattern for override in recipe.override)
    assert recipe.evidence is not None
    assert recipe.evidence.measured is None
    words = (
        recipe.evidence.command.replace("small.gguf", str(small[0])).replace("x.json", str(record)).split()
    )
    assert words[:2] == ["python", "scripts/recipe.py"]
    assert run([*script, *words[2:], "--out", again]).returncode == 0
    assert load_recipe(again) == recipe
    assert run([*script, "--base", small[0], "--record", small[0]]).returncode == 1


def test_the_27b_has_a_recipe_and_its_evidence_is_true(tmp_path: Path) -> None:
    """Each matrix has one override, the file the size, and its parts the sum that it says."""
    recipe = load_recipe(RECIPES / "27b/auto-17.2GB.toml")
    path, _ = layout_of("27b", tmp_path)
    layout = read_layout(path, extra=HEADER_EXTRA, used_experts=None)
    parts: dict[str, list[str]] = {override.pattern: [] for override in recipe.override}
    types: dict[str, Type] = {}
    for m in layout.matrices:
        (override,) = (each for each in recipe.override if re.search(each.pattern, m.name))
        parts[override.pattern].append(m.name)
        types[m.name] = next(kind for kind in TYPES if kind.name == override.type)
    assert all(parts.values()), "an override names a tensor that the model lacks"
    mtp = {m.name for m in layout.matrices if m.mtp}
    share = {override.pattern: float(override.reason.split()[-2]) for override in recipe.override}
    trunk = sum(share[pattern] for pattern, names in parts.items() if not mtp & {*names})
    with_drafts = sum(share.values())
    assert recipe.evidence is not None
    assert recipe.evidence.measured is None
    assert recipe.evidence.bytes == layout.file_bytes(types)
    assert recipe.evidence.bits_per_weight == pytest.approx(layout.bits_per_weight(types), abs=1e-4)
    assert trunk < recipe.evidence.predicted < with_drafts
    assert with_drafts < 1.5 * trunk
