"""A model of experts in the pipeline: counts in its importance matrix, and types from recipes."""

import re
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from qwen_serve.convert.imatrix import Entry, Imatrix, expert_coverage
from qwen_serve.convert.quantize import quantize
from qwen_serve.convert.recipes import Recipe
from qwen_serve.convert.report import Report, print_report
from qwen_serve.llamacpp.evaluation import Batch, EvalContext, Runtime
from qwen_serve.llamacpp.probe import Probe, Routing
from tests.upcycling import EXPERTS, USED

import numpy as np  # isort: skip

RUNTIME = Runtime(threads=1, n_gpu_layers=0)


@pytest.fixture(scope="module")
def imatrix(nano_moe_q4_k_m: Path) -> Imatrix:
    return Imatrix.load(nano_moe_q4_k_m.with_name("nano-moe.imatrix.gguf"))


@pytest.mark.slow
def test_every_row_is_counted_for_the_experts_that_read_it(imatrix: Imatrix) -> None:
    rows = imatrix.chunk_count * imatrix.chunk_size
    for block in range(9):
        in_block = rows - imatrix.chunk_count if block == 8 else rows  # the MTP block's first has no draft
        for role in ("gate", "up", "down"):
            counts = imatrix.entries[f"blk.{block}.ffn_{role}_exps.weight"].counts
            assert counts.shape == (EXPERTS,)
            assert counts.sum() == USED * in_block
        assert imatrix.entries[f"blk.{block}.ffn_down_shexp.weight"].counts.tolist() == [in_block]


@pytest.mark.slow
def test_experts_sums_are_of_the_rows_that_each_has_read(nano_moe_q4_k_m: Path) -> None:
    """Against a loop over tokens and their experts, as in llama-imatrix."""
    seen: dict[str, tuple[Any, Any, Routing]] = {}
    f16 = nano_moe_q4_k_m.with_name("nano-moe-F16.gguf")

    def observe(name: str, rows: Any, routing: Routing | None) -> None:
        if routing is not None and name not in seen:
            collector.add(name, rows, routing)
            seen[name] = (rows.copy(), routing.ids.copy(), routing)

    from qwen_serve.convert.imatrix import _Collector

    collector = _Collector()
    with (
        RUNTIME.load(f16) as model,
        EvalContext(model, n_ctx=64, n_batch=64, callback=Probe(observe)) as context,
    ):
        batch = Batch(context)
        for position in range(40):
            batch.add(300 + 7 * position, position)
        context.decode(batch)
    assert {name.split(".", 2)[2] for name in seen} == {
        f"ffn_{role}_exps.weight" for role in ("gate", "up", "down")
    }
    entries = collector.entries()
    for name, (rows, ids, routing) in seen.items():
        assert routing.slots == (USED if "down" in name else 1)
        sums, counts = np.zeros((EXPERTS, rows.shape[1])), np.zeros(EXPERTS)
        for token, chosen in enumerate(ids):
            assert len(set(chosen.tolist())) == USED
            for i, expert in enumerate(chosen):
                sums[expert] += rows[token * routing.slots + i % routing.slots].astype(np.float64) ** 2
                counts[expert] += 1
        np.testing.assert_allclose(entries[name].sums, sums, rtol=1e-4)
        np.testing.assert_array_equal(entries[name].counts, counts)


def test_coverage_names_who_read_little_or_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def entry(counts: list[float]) -> Entry:
        return Entry(np.ones((len(counts), 2), np.float32), np.array(counts, np.float32))

    entries = {
        "blk.10.ffn_down_exps.weight": entry([100, 0, 31, 32]),
        "blk.9.ffn_down_exps.weight": entry([0, 0, 500, 400]),
        "blk.9.ffn_up_exps.weight": entry([0, 0, 500, 400]),
        "blk.9.ffn_down_shexp.weight": entry([900]),
    }
    coverage = expert_coverage(Imatrix(entries, ("t",), 1, 512))
    assert coverage is not None
    assert (coverage.experts, coverage.median_rows) == (8, 31.5)
    assert coverage.unreached == {"blk.9": [0, 1], "blk.10": [1]}
    assert coverage.rare == {"blk.10": [2]}
    assert expert_coverage(Imatrix({"blk.0.ffn_up.weight": entry([3])}, ("t",), 1, 512)) is None

    report = Report("f", 1, "x", 8, 4, (), None, None, None, {}, "0", coverage)
    assert Report.from_json(report.to_json()) == report
    (tmp_path / "r.json").write_text(report.to_json())
    with pytest.raises(ValueError, match="max"):  # a report without tensors has no table
        print_report(tmp_path / "r.json")
    shown = capsys.readouterr().out
    assert "8; half of them read 32 calibration rows or more" in shown
    assert "none at all: 3 (blk.9: 0, 1; blk.10: 1)" in shown
    assert "fewer than 32: 1 (blk.10: 2)" in shown


@pytest.mark.slow
def test_the_report_of_a_conversion_tells_the_coverage(nano_moe_q4_k_m: Path) -> None:
    report = Report.from_json(nano_moe_q4_k_m.with_suffix(".json").read_text())
    assert report.coverage is not None
    assert report.coverage.experts == 9 * EXPERTS
    assert report.coverage.median_rows > 0


@pytest.mark.slow
def test_a_recipe_treats_routed_experts_shared_ones_and_trunk_apart(
    nano_moe_q4_k_m: Path, tmp_path: Path
) -> None:
    source = nano_moe_q4_k_m.with_name("nano-moe-F16.gguf")
    imatrix = nano_moe_q4_k_m.with_name("nano-moe.imatrix.gguf")
    out = tmp_path / "q.gguf"
    recipe = Recipe.model_validate(
        {
            "type": "Q4_K_M",
            "about": "test",
            "override": [
                {"pattern": r"_shexp\.weight$", "type": "Q8_0", "reason": "shared"},
                {
                    "pattern": r"\.(attn_(q|k|v|qkv|gate|output)|ssm_(alpha|beta|out))\.",
                    "type": "Q8_0",
                    "reason": "trunk",
                },
            ],
        }
    )
    quantize(source, out, recipe=recipe, imatrix=imatrix, runtime=RUNTIME)
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(out).tensors}
    for name, kind in types.items():
        if "_exps." in name:
            assert kind in ("Q4_K", "Q6_K"), name
        elif "ffn_gate_inp" in name or "norm" in name:
            assert kind == "F32", name
        elif "_shexp." in name or re.search(r"\.(attn_|ssm_out|ssm_alpha|ssm_beta)", name):
            assert kind == "Q8_0", name
    with RUNTIME.load(out) as model:
        assert model.n_nextn == 1
