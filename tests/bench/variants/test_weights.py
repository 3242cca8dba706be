"""Only the file that the converter makes is measured."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from qwen_serve.bench.arguments import StoreOptions
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.variants import weights
from qwen_serve.bench.variants.plan import Plan, kept_vocabulary
from qwen_serve.bench.variants.weights import Weights, make_weights, reported
from qwen_serve.convert.report import print_report, print_table
from qwen_serve.server.variant import Variant

Q4 = Variant(name="q", quant="Q4_K_M")


def plan(folder: Path, *options: str) -> Plan:
    store = StoreOptions(out=folder / "store")
    return Plan(src="models/nano", models=folder, tasks="none", convert_options=options, store=store)


def write_gguf(path: Path, sha256: str) -> None:
    path.write_bytes(b"weights")
    report = {"file": path.name, "n_bytes": 7, "sha256": sha256, "bits_per_weight": 4.5, "divergence": None}
    path.with_suffix(".json").write_text(json.dumps(report))


@pytest.mark.parametrize(
    "options", [("--keep-vocab", "300"), ("--keep-vocab=300", "--no-kld"), ("--keep", "300")]
)
def test_a_pruned_vocabulary_names_the_file(options: tuple[str, ...], tmp_path: Path) -> None:
    assert plan(tmp_path, *options).gguf(Q4) == tmp_path / "nano-v300-Q4_K_M.gguf"
    assert plan(tmp_path).gguf(Q4) == tmp_path / "nano-Q4_K_M.gguf"
    assert plan(tmp_path, *options).gguf(Variant(name="f", quant="F32")) == tmp_path / "nano-v300-F32.gguf"


@pytest.mark.parametrize(
    ("file", "name"), [("Mine-BF16.gguf", "Mine"), ("Mine.gguf", "Mine"), ("F16.gguf", "F16")]
)
def test_a_gguf_is_named_without_its_type(file: str, name: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    assert replace(plan(tmp_path), src=str(tmp_path / file)).gguf(Q4) == tmp_path / f"{name}-Q4_K_M.gguf"


def test_a_recipe_that_prunes_is_named_for_itself(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('type = "Q4_K_M"\nabout = "small"\n[vocab]\nkeep = 500\n')
    variant = Variant(name="o", recipe=tmp_path / "own.toml")
    assert plan(tmp_path, "--keep-vocab", "300").gguf(variant) == tmp_path / "nano-own.gguf"


def test_the_converter_agrees_about_the_name(tmp_path: Path) -> None:
    """With the real converter, in the float type that is fastest."""
    variant = Variant(name="f", quant="F16")
    found = make_weights(plan(tmp_path, "--keep-vocab", "300", "--no-kld"), [variant])["f"]
    assert isinstance(found, Weights)
    assert found.path == tmp_path / "nano-v300-F16.gguf" and found.path.is_file()


def test_an_old_file_is_not_taken_for_what_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "nano-Q4_K_M.gguf", "old")
    monkeypatch.setattr(weights, "convert", lambda *_: {"nano-other-Q4_K_M.gguf"})
    found = make_weights(plan(tmp_path), [Q4])["q"]
    assert isinstance(found, BenchError)
    assert "nano-Q4_K_M.gguf: the converter made nano-other-Q4_K_M.gguf instead" in str(found)


@pytest.mark.parametrize("option", ["--out", "--name=x", "--quant=Q2_K", "--threads=2", "--recipe=r.toml"])
def test_what_the_sweep_sets_is_not_set_beside_it(option: str) -> None:
    with pytest.raises(BenchError, match=r"--convert-options: --\w+ is set by the sweep"):
        kept_vocabulary([option])


def test_a_keep_vocab_that_is_no_number() -> None:
    with pytest.raises(BenchError, match=r"--convert-options: .*invalid int value: 'many'"):
        kept_vocabulary(["--keep-vocab", "many"])


@pytest.mark.parametrize("told", [print_report, lambda path: print_table([path, path])])
def test_what_the_converter_made_is_read_from_its_tables(
    nano_q4_k_m: Path, told: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    told(nano_q4_k_m.with_suffix(".json"))
    assert reported(capsys.readouterr().out) == {nano_q4_k_m.name}
