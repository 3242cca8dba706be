"""The command line: accepted flags, and errors."""

import shutil
from pathlib import Path

import pytest

from qwen_serve.convert import cli
from qwen_serve.convert.errors import ConvertError
from tests.checkpoints import edit_json


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text('type = "Q8_0"\nabout = "eight bits"\n')
    return path


def run(*arguments: str | Path) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_float_types_and_recipes_are_told_apart() -> None:
    float_types, recipes = cli.select_quants(["Q4_K_M", "BF16", "Q2_K", "Q4_K_M"], None)
    assert float_types == ("BF16",)
    assert list(recipes) == ["Q4_K_M", "Q2_K"]


def test_the_default_quant() -> None:
    assert list(cli.select_quants(None, None)[1]) == [cli.DEFAULT_QUANT]


def test_a_recipe_file_is_named_after_the_quant_or_after_itself(recipe: Path) -> None:
    assert list(cli.select_quants(["Q4_K_M"], recipe)[1]) == ["Q4_K_M"]
    assert list(cli.select_quants(None, recipe)[1]) == ["mine"]


def test_a_recipe_file_and_several_quants_contradict(recipe: Path) -> None:
    with pytest.raises(ConvertError, match="give it with one --quant, or with none"):
        cli.select_quants(["Q4_K_M", "Q2_K"], recipe)


def test_an_unknown_quant_lists_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--src", "nowhere", "--quant", "Q4_K_M,Q9_X") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --quant Q9_X: unknown; known are F16, BF16, F32, Q8_0,")
    assert "Q2_K" in error


@pytest.mark.parametrize(
    "arguments", [["--quant", ","], ["--threads", "0"], ["--outtype", "Q8_0"], ["--distill", "501"]]
)
def test_malformed_flags_are_usage_errors(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2


def test_a_source_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--src", "nowhere", "--quant", "F16") == 1
    assert "--src nowhere: no such file or folder" in capsys.readouterr().err


def test_another_architecture(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(checkpoint / "config.json", architectures=["LlamaForCausalLM"])
    assert run("--src", checkpoint, "--quant", "F16", "--out", checkpoint / "out") == 1
    assert "architectures is LlamaForCausalLM" in capsys.readouterr().err
    assert not (checkpoint / "out").exists()


def test_too_little_disk_is_seen_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    out = tmp_path / "out"
    assert run("--src", checkpoint, "--quant", "F16,Q8_0", "--out", out) == 1
    error = capsys.readouterr().err
    assert f"error: --out {out}: about" in error
    assert "1 MB are free" in error
    assert not list(out.glob("*.gguf*"))


def test_an_out_that_is_a_file(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("")
    assert run("--src", checkpoint, "--quant", "F16", "--out", tmp_path / "out") == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_a_missing_calibration_file(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--src", checkpoint, "--quant", "Q2_K", "--calibration", checkpoint / "none.txt") == 1
    assert "none.txt: no such file" in capsys.readouterr().err


def test_a_method_is_for_what_is_quantized(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--src", "models/nano", "--quant", "F16", "--method", "compensated"]) == 1
    assert "--method compensated wants a --quant that is quantized" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "packages", "why"),
    [
        (["--quant", "F16"], True, "--distill wants a --quant that is quantized"),
        (["--quant", "Q2_K"], False, "--distill needs torch and transformers: pip install 'qwen-serve"),
        (["--quant", "Q2_K", "--calibration", "none.txt"], True, "none.txt: no such file"),
    ],
)
def test_what_distillation_needs(
    arguments: list[str],
    packages: bool,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: object() if packages else None)
    assert cli.main(["--src", "models/nano", "--distill", *arguments]) == 1
    assert why in capsys.readouterr().err


def test_experts_are_not_distilled(
    nano_moe_f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: object())
    assert run("--src", nano_moe_f32, "--quant", "Q2_K", "--distill", "--out", tmp_path / "out") == 1
    assert "--distill is for dense models" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["nearest", "compensated"])
def test_the_evidence_of_a_search_names_the_method(method: str) -> None:
    given = ["--quant", "auto", "--target-size", "4MB", "--method", method]
    arguments = cli.parser().parse_args(given)
    command = cli.search_command(cli.select_target(arguments), "models/nano", arguments)
    assert ("--method compensated" in command) == (method == "compensated")
    again = cli.parser().parse_args(command.split()[1:])
    assert (again.method, again.target_size) == (method, arguments.target_size)
