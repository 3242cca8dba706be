"""Tables of `quality levels`, and the comparison of many candidates that it rests on."""

from itertools import pairwise
from pathlib import Path

import pytest

from qwen_serve.bench.gates import levels
from qwen_serve.bench.gates.levels import DEEP, Measured, Tried, changed, measure, print_depth, print_texts
from qwen_serve.convert import cli
from qwen_serve.convert.chunks import read_chunks
from qwen_serve.convert.kld import OWN, Candidate, compare, compare_all
from qwen_serve.convert.recipes import load_recipe
from qwen_serve.llamacpp import HAS_STATE_F16
from qwen_serve.llamacpp.evaluation import Runtime

import numpy as np  # isort: skip  (after llama_cpp: see llamacpp/__init__.py)

RUNTIME = Runtime(threads=1, n_gpu_layers=0)
ROOT = Path(__file__).parents[3]
NANO = ROOT / "models" / "nano"


def test_a_change_has_the_interval_of_its_chunks() -> None:
    before = np.array([[0.1, 0.3], [0.4, 0.4], [0.6, 0.2]])
    assert changed(before, before / 4) == pytest.approx((-0.75, -0.75, -0.75))
    mean, low, high = changed(before, before * np.array([[0.2], [0.5], [0.8]]))
    assert low < mean < high


def test_tables_have_every_text_and_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    deep = np.repeat([[0.1, 0.2, 0.3, 0.6]], 2, axis=1)
    texts = {OWN: np.full((2, 4), 0.5), "code": np.full((2, 4), 2.0), DEEP: deep}
    of = [Measured("Q2_K nearest", 3.38, texts)]
    of += [Measured("Q2_K compensated", 3.38, {name: values / 2 for name, values in texts.items()})]
    of += [Measured("F16, q8_0 keys and values", 14.2, {DEEP: deep})]
    of += [Measured("F16, recurrent states in f16", 14.2, {DEEP: deep * 1e-6})]
    print_texts("Q2_K", of[:2], head="nano")
    print_texts("Q8_0", of[:1])
    print_depth("nano", of)
    out = capsys.readouterr().out
    assert "| Q2_K | 3.38 | own | 8 | 0.5000 | 0.2500 | -50% [-50, -50] |" in out
    assert "| Q2_K | 3.38 | code | 8 | 2.0000 | 1.0000 | -50% [-50, -50] |" in out
    assert out.count("| nano: level | MB |") == 1
    assert "| Q8_0 | 3.38 | code | 8 | 2.0000 | | |" in out, "by nearest alone"
    assert "one pass of 8 tokens" in out
    assert "| F16, q8_0 keys and values |  | 0.30000 | 0.10000 | 0.20000 | 0.30000 | 0.60000 |" in out
    assert "| F16, recurrent states in f16 |  | 3.0e-07 | 1.0e-07 | 2.0e-07 | 3.0e-07 | 6.0e-07 |" in out


def test_many_candidates_are_measured_like_one(nano_f16: Path, nano_q2_k: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{n} and {n + 1} make {2 * n + 1}." for n in range(80)), encoding="utf-8")
    with RUNTIME.load(nano_f16) as whole, RUNTIME.load(nano_q2_k) as model:
        chunks = read_chunks(whole, text, 256)[:2]
        alone = compare(whole, model, chunks)
        candidates = [Candidate(model), Candidate(whole), Candidate(whole, "q4_0")]
        candidates.append(Candidate(whole, state_type="f16"))
        together, same, cache, states = compare_all(whole, candidates, chunks)
    assert np.array_equal(together.divergence, alone.divergence)
    assert same.divergence.max() == 0
    assert 0 < cache.divergence.mean() < alone.divergence.mean()
    assert (states.divergence.mean() > 0) == HAS_STATE_F16
    assert states.divergence.mean() < 1e-4


def test_what_was_measured_is_not_measured_again(
    nano_f16: Path, nano_q2_k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "nano-F16.gguf"
    base.symlink_to(nano_f16)
    with RUNTIME.load(base) as whole:
        ids = np.array([whole.tokenize(" ".join(map(str, range(200))), ends=True)[:256]], np.int32)
    files = {"Q2_K nearest": Tried(nano_q2_k), "F16, q4_0 keys and values": Tried(base, "q4_0")}
    before = measure(base, files, {OWN: ids}, RUNTIME)
    asked = []

    def noted(*arguments: object, **options: object) -> object:
        asked.append(arguments)
        return compare_all(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(levels, "compare_all", noted)
    after = measure(base, files, {OWN: ids}, RUNTIME)
    assert not asked
    for one, again in zip(before, after, strict=True):
        assert one.divergence[OWN].mean() > 0
        assert np.array_equal(one.divergence[OWN], again.divergence[OWN])
    measure(base, files, {OWN: ids[:, :128]}, RUNTIME)
    assert len(asked) == 1, "another text"


def test_a_recipe_is_a_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def noted(words: list[str]) -> int:
        asked.append(words)
        return 0

    monkeypatch.setattr(cli, "main", noted)
    recipe = "quant_recipes/neighbours/bartowski-Q4_K_M.toml"
    path = levels.convert(NANO, tmp_path, recipe, None, RUNTIME)
    assert path == tmp_path / "nano-bartowski-Q4_K_M.gguf"
    assert levels.compensate(NANO, tmp_path, "Q2_K", None, RUNTIME) == tmp_path / "Q2_K" / "nano-Q2_K.gguf"
    first, second = (dict(pairwise(words)) for words in asked)
    assert (first["--recipe"], first["--src"]) == (recipe, str(NANO))
    assert (second["--quant"], second["--method"]) == ("Q2_K", "compensated")
    assert second["--src"] == str(tmp_path / "nano-F16.gguf"), "the same file for both methods"
    assert second["--calibration"] == str(tmp_path / "nano.calibration.txt")


@pytest.mark.parametrize("path", sorted((ROOT / "quant_recipes").rglob("*.toml")), ids=lambda path: path.stem)
def test_every_bundled_recipe_is_one(path: Path) -> None:
    assert load_recipe(path).about
