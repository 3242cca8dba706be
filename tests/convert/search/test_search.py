"""The whole search for a recipe, on a random checkpoint: interrupted, resumed, and for each target."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from qwen_serve.convert import calibration, cli, kld, report
from qwen_serve.convert.calibration import text as writing
from qwen_serve.convert.recipes import load_recipe
from qwen_serve.convert.search import Found, Paths, Target, measure, search
from qwen_serve.convert.search.groups import HEAD, NARROW, TOKEN_EMBEDDING, Layout, Matrix, read_layout
from qwen_serve.convert.search.law import Sensitivity
from qwen_serve.convert.search.measure import Meter, Reading
from qwen_serve.convert.search.record import Record
from qwen_serve.convert.search.search import _Search
from qwen_serve.llamacpp.evaluation import Runtime
from qwen_serve.llamacpp.gguf import read_header
from tests.checkpoints import EXPERTS, EXPERTS_USED, VOCAB, write_checkpoint

RUNTIME = Runtime(threads=1, n_gpu_layers=0)
TEXT = "the other day they gathered there and the rest of them were gone before noon; " * 60


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CHUNKS", 1)
    monkeypatch.setattr(kld, "MIN_TOKENS", 512)
    monkeypatch.setattr(writing, "MIN_TOKENS", {"calibration": 1200, "search": 1200, "evaluation": 1200})
    monkeypatch.setattr(writing, "RANDOM_TOKENS", {"calibration": 512, "search": 0, "evaluation": 0})
    monkeypatch.setattr(writing, "MAX_NEW", 16)
    monkeypatch.setattr(writing, "MAX_NEW_THINKING", 16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "Random-1B", layers=4)


def run(checkpoint: Path, out: Path, *flags: str) -> int:
    wanted = ["--src", checkpoint, "--out", out, "--threads", 1, "--quant", "auto", *flags]
    return cli.main([str(flag) for flag in wanted])


@pytest.fixture(scope="module")
def base(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base")
    assert cli.main(["--src", str(checkpoint), "--out", str(out), "--quant", "F16"]) == 0
    return out / "Random-1B-F16.gguf"


@pytest.mark.slow
def test_a_searched_recipe_makes_the_file_that_was_asked_for(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after = 20
    measured = Meter.measure

    def interrupted(self: Meter, *arguments: object, **keywords: object) -> object:
        nonlocal stop_after
        stop_after -= 1
        if stop_after == 0:
            raise KeyboardInterrupt
        return measured(self, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(Meter, "measure", interrupted)
    assert run(checkpoint, tmp_path, "--target-size", "300kB") == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    record = json.loads((tmp_path / "Random-1B.search.json").read_text())
    assert len(record["readings"]) == 19
    assert not list(tmp_path.glob("*auto*"))

    monkeypatch.setattr(Meter, "measure", measured)
    assert run(checkpoint, tmp_path, "--target-size", "300kB") == 0
    told = capsys.readouterr()
    after = json.loads((tmp_path / "Random-1B.search.json").read_text())
    assert record["readings"].items() <= after["readings"].items()
    gguf = tmp_path / "Random-1B-auto-300.0kB.gguf"
    assert gguf.stat().st_size <= 300_000
    recipe = load_recipe(gguf.with_suffix(".toml"))
    evidence = recipe.evidence
    assert evidence is not None
    assert evidence.bytes == gguf.stat().st_size
    assert evidence.command == "qwen-convert --src Random-1B --quant auto --target-size 300.0kB"
    assert evidence.measured is not None
    assert evidence.measured > 0
    found = report.Report.from_json(gguf.with_suffix(".json").read_text())
    assert found.divergence is not None
    assert evidence.evaluation_mean == found.divergence.mean
    assert evidence.evaluation_unlike == {name: one.mean for name, one in found.unlike.items()}
    for name, one in found.unlike.items():
        times = one.mean / evidence.predicted
        assert f"{one.mean:.5f} on {name}, {times:.1f} times the prediction" in told.out
    assert f"{evidence.probes} probes of 512 tokens" in told.out

    # the recipe is an ordinary one: the same file comes of it
    again = tmp_path / "again"
    wanted = [
        "--src",
        checkpoint,
        "--out",
        again,
        "--recipe",
        gguf.with_suffix(".toml"),
        "--threads",
        1,
        "--no-kld",
    ]
    assert cli.main([str(word) for word in wanted]) == 0
    types = {t.name: t.type for t in read_header(gguf).tensors.values()}
    assert types == {
        t.name: t.type for t in read_header(again / f"Random-1B-{gguf.stem}.gguf").tensors.values()
    }
    assert {kind for name, kind in types.items() if name.endswith("ffn_up.weight")} <= set(NARROW)

    # nothing is measured or made again
    monkeypatch.setattr(Meter, "__init__", lambda *_: pytest.fail("a model was loaded"))
    before = gguf.stat().st_mtime_ns
    assert run(checkpoint, tmp_path, "--target-size", "300kB") == 0
    assert gguf.stat().st_mtime_ns == before


@pytest.mark.slow
def test_bits_divergence_and_time_are_kept_to(base: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    paths = Paths(base, text, None, tmp_path / "record.json")
    layout = read_layout(base, extra=1024, used_experts=None)

    def found(target: Target) -> tuple[dict[str, Type], Any]:
        one = search(paths, target, used_experts=None, made_from="test", runtime=RUNTIME)
        return dict(one.types), one

    by_bits, one = found(Target(bits_per_weight=7.0))
    assert 6.5 < layout.bits_per_weight(by_bits) <= 7.0
    limit = 2 * one.reading.mean
    by_divergence, two = found(Target(divergence=limit))
    assert 0 < two.reading.mean <= limit
    assert layout.file_bytes(by_divergence) < layout.file_bytes(by_bits)
    time = 1e3 * (layout.read_bytes(by_bits)) / 600e9
    by_time, three = found(Target(milliseconds=time, card="A10G"))
    assert three.milliseconds is not None
    assert three.milliseconds <= time
    # a token does not read the MTP block: on a card it costs nothing
    assert {by_time[m.name] for m in layout.matrices if m.mtp} == {Type.Q8_0}
    fastest, four = found(Target(divergence=limit, card="A10G"))
    assert four.reading.mean <= limit
    assert layout.read_bytes(fastest) <= layout.read_bytes(by_divergence)


@pytest.mark.slow
def test_what_compensation_leaves_is_measured_once(base: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    paths, target = Paths(base, text, None, tmp_path / "record.json"), Target(bits_per_weight=7.0)

    def found(paths: Paths) -> Found:
        return search(paths, target, used_experts=None, made_from="test", runtime=RUNTIME)

    plain, compensated = found(paths), found(replace(paths, compensate_on=text))
    assert compensated.probes - plain.probes <= 1  # the recipe's own
    record = Record(paths.record, "test")
    assert record.gains.keys() == read_layout(base, extra=1024, used_experts=None).groups.keys()
    assert all(0 < of[Type.Q8_0] < 1 for of in record.gains.values())
    before = paths.record.stat().st_mtime_ns
    assert found(replace(paths, compensate_on=text)).types == compensated.types
    assert paths.record.stat().st_mtime_ns == before


def test_a_type_that_compensation_helps_is_chosen_for_it(tmp_path: Path) -> None:
    """Q3_K and IQ3_S have the same size, and only the former is compensated."""
    matrix = Matrix("blk.0.ffn_up.weight", "ffn_up 0", 256, 256 * 256, 1.0, mtp=False)
    layout = Layout((matrix,), fixed=0, fixed_read=0, elements=matrix.elements, fixed_tensors=0)
    errors = {kind: 1 / (i + 1) for i, kind in enumerate(matrix.types)}

    def chosen(divergence: float | None, text: Path | None) -> Type:
        paths = Paths(tmp_path, tmp_path, None, tmp_path / "record.json", text)
        target = Target(n_bytes=matrix.n_bytes(Type.IQ3_S), divergence=divergence)
        record = Record(paths.record, "test")
        record.errors[matrix.name] = errors
        record.gains[matrix.group] = {Type.Q2_K: 0.9, Type.Q3_K: 0.5}
        record.save()
        solve = _Search(paths, layout, target, "test", RUNTIME)._solve  # noqa: SLF001 - a search has a model
        return solve({matrix.group: Sensitivity(1.0, 1.0)})[matrix.name]

    assert chosen(None, None) == Type.IQ3_S
    assert chosen(None, tmp_path) == Type.Q3_K
    # a divergence is kept to by what is measured, which is llama.cpp's rounding
    assert chosen(errors[Type.IQ3_S] * 1.01, tmp_path) == Type.IQ3_S


def test_a_record_is_kept_and_forgotten_with_what_it_was_made_from(tmp_path: Path) -> None:
    path, types = tmp_path / "record.json", {"blk.0.ffn_up.weight": Type.Q2_K}
    path.write_text('{"made_from": "a", "errors": 3}')
    record = Record(path, "a")
    assert record.reading(types) is None
    record.errors["blk.0.ffn_up.weight"] = {Type.Q2_K: 0.1}
    record.gains["ffn_up 0"], record.gains_from = {Type.Q2_K: 0.5}, "t"
    record.add("ffn_up 0 at Q2_K", types, Reading(0.1, 0.5, 0.9), 2.0)
    again = Record(path, "a")
    assert again.reading(types) == Reading(0.1, 0.5, 0.9)
    assert (again.errors, again.count, again.seconds) == (record.errors, 1, 2.0)
    assert (again.gains, again.gains_from) == (record.gains, "t")
    assert again.reading({"blk.0.ffn_up.weight": Type.Q4_K}) is None
    assert Record(path, "b").reading(types) is None


@pytest.mark.parametrize(
    "name", ["auto-300.0kB.toml", "auto-300.0kB.json", "auto-300.0kB.gguf", "F16.json", "search.json"]
)
def test_another_s_file_is_not_replaced(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The error comes before any work."""
    there = tmp_path / f"Random-1B{'.' if name == 'search.json' else '-'}{name}"
    there.write_text("precious")
    assert run(checkpoint, tmp_path, "--target-size", "300kB", "--quant", "auto,F16") == 1
    assert f"{there}: is there" in capsys.readouterr().err
    assert there.read_text() == "precious"
    assert not list(tmp_path.glob("*-F16.gguf"))


@pytest.mark.slow
def test_experts_are_groups_and_are_read_by_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SAMPLE_ELEMENTS", 64)  # fewer than an expert has
    source = write_checkpoint(tmp_path / "Random-MoE", layers=4, experts="fused", tied=False)
    assert (
        run(source, tmp_path / "out", "--target-bpw", "7", "--no-kld", "--target-ms", "1", "--for", "l4") == 1
    )
    out = tmp_path / "out"
    assert run(source, out, "--target-bpw", "7", "--no-kld") == 0
    gguf = next(out.glob("*-auto-7bpw.gguf"))
    types = {t.name: t.type for t in read_header(gguf).tensors.values()}
    layout = read_layout(next(out.glob("*-F16.gguf")), extra=1024, used_experts=EXPERTS_USED)
    by_name = {m.name: m for m in layout.matrices}
    assert by_name["blk.0.ffn_up_exps.weight"].read == EXPERTS_USED / EXPERTS
    assert by_name["blk.0.ffn_up_exps.weight"].group == "ffn_up_exps 0"
    assert by_name["blk.4.ffn_up_exps.weight"].group == "mtp ffn_up_exps"
    assert by_name["blk.4.ffn_up_exps.weight"].read == 0
    assert by_name[TOKEN_EMBEDDING].read == 1 / VOCAB
    assert by_name[HEAD].read == 1
    assert "blk.0.ffn_gate_inp.weight" not in by_name
    assert types["blk.0.ffn_gate_inp.weight"] == Type.F32
    assert {types[name] for name in by_name} <= set(NARROW)
    assert gguf.stat().st_size <= layout.file_bytes({name: types[name] for name in by_name})


def test_search_text_shares_no_prompt_with_evaluation() -> None:
    prompts = calibration.prompts.load_prompts
    assert not {p.text for p in prompts("search")} & {p.text for p in prompts("evaluation")}
    assert {p.subject for p in prompts("search")} == {p.subject for p in prompts("calibration")}
