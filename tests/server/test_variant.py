"""Variants: their files, errors, and precedence among flags and defaults."""

import re
from pathlib import Path

import pytest

from qwen_serve.server import cli
from qwen_serve.server.__main__ import main
from qwen_serve.server.settings import Settings, describe
from qwen_serve.server.settings_sources import SettingsError, load_settings, load_variant, unknown_variables
from qwen_serve.server.variant import VARIANTS, Variant, known_variants
from qwen_serve.server.weights import resolve
from tests.checkpoints import write_checkpoint


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "VARIANT", *Settings.model_fields):
        monkeypatch.delenv(f"QWEN_{name.upper()}", raising=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.gguf"
    path.touch()
    return str(path)


def written(folder: Path, text: str, name: str = "mine.toml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_what_comes_with_the_package() -> None:
    assert known_variants() == ["balanced", "exact", "fast", "reference", "small"]


@pytest.mark.parametrize("name", known_variants())
def test_each_says_why_each_value_stands(name: str) -> None:
    variant = load_variant(name)
    assert variant.name == name
    assert variant.about
    assert variant.quant
    lines = (VARIANTS / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    values = [line for line in lines if re.match(r"\w+ = ", line) and not line.startswith("about")]
    assert len(values) == 1 + len(variant.settings)
    assert all(re.search(r" # \S.{7}", line) for line in values)


def test_precedence(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = written(
        tmp_path,
        'quant = "Q4_K_M"\n[settings]\nparallel = 1\nctx_size = 1\nubatch_size = 1\nmlock = true\n',
    )
    config = tmp_path / "server.toml"
    config.write_text("parallel = 2\nctx_size = 2\nubatch_size = 2\n")
    monkeypatch.setenv("QWEN_PARALLEL", "3")
    monkeypatch.setenv("QWEN_CTX_SIZE", "3")
    arguments = ["--model", model, "--variant", variant, "--config", str(config), "--parallel", "4"]
    settings, sources, _ = load_settings(arguments)
    assert (settings.parallel, settings.ctx_size, settings.ubatch_size, settings.mlock) == (4, 3, 2, True)
    assert [sources[name] for name in ("parallel", "ctx_size", "ubatch_size", "mlock", "port")] == [
        "flag",
        "environment",
        str(config),
        "variant mine",
        "default",
    ]
    assert re.search(r"^mlock = true +# from variant mine$", describe(settings, sources), re.MULTILINE)


def test_the_environment_names_one(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_VARIANT", "exact")
    settings, sources, _ = load_settings(["--model", model])
    assert (settings.deterministic, sources["deterministic"]) == (True, "variant exact")
    assert unknown_variables() == []
    assert not load_settings(["--model", model, "--variant", "small"])[0].deterministic
    monkeypatch.setenv("QWEN_VARIANT", "")  # an image without one
    assert not load_settings(["--model", model])[0].deterministic


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quant = [", "not a readable TOML file"),
        ('quant = "Q8_0"\nrecipe = "a.toml"', "want either quant, a level by name, or recipe, a file"),
        ("about = 'x'", "want either quant"),
        ('quant = "Q8_0"\nname = "a/b"', "name: 'a/b' becomes a file name"),
        ('quant = "Q8_0"\nabuot = "x"', "abuot: unknown key; did you mean 'about'?"),
        ('quant = "Q8_0"\nzzz = 1', "zzz: unknown key; known are name, about, quant, recipe, settings"),
        ('quant = "Q8_0"\n[settings]\nctx_sise = 1', "unknown key 'ctx_sise'; did you mean 'ctx_size'?"),
        ('quant = "Q8_0"\n[settings]\nport = 1', "port is said where a model is served, not by a variant"),
        ('quant = "Q8_0"\n[settings]\nmodel = "x"', "model is said where a model is served"),
        ('quant = "Q8_0"\n[settings]\napi_key = "x"', "api_key is said where a model is served"),
        (
            'quant = "Q8_0"\n[settings]\nparallel = "many"',
            "--parallel (from {path}): Input should be a valid",
        ),
        ('quant = "Q8_0"\n[settings]\nparallel = 0', "--parallel (from {path}): Input should be greater"),
        ('quant = "Q8_0"\n[settings]\nparallel = [1]', "settings.parallel: Input should be"),
        ('quant = "Q8_0"\n[settings]\nparallel = 8\nbatch_size = 4', "batch_size is 4; it must be at least"),
        ('quant = "Q8_0"\n[settings]\nchat_template = "gone.jinja"', "gone.jinja is not a file"),
    ],
)
def test_mistakes_name_the_file_and_the_key(model: str, tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        load_settings(["--model", model, "--variant", path])
    assert path in str(caught.value)
    assert said.format(path=path) in str(caught.value)


def test_a_mistake_that_a_flag_would_hide_is_told(model: str, tmp_path: Path) -> None:
    path = written(tmp_path, 'quant = "Q8_0"\n[settings]\nparallel = 0')
    with pytest.raises(SettingsError, match="greater than or equal to 1, not 0"):
        load_settings(["--model", model, "--variant", path, "--parallel", "2"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("fsat", r"--variant: no variant is called 'fsat'; did you mean fast\?"),
        ("nothing", r"there are balanced, exact, fast, reference, small, or a file's path"),
        ("gone.toml", r"gone.toml is not a file"),
    ],
)
def test_a_variant_that_is_not_there(model: str, given: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings(["--model", model, "--variant", given])


def test_paths_are_relative_to_the_file(tmp_path: Path, model: str) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    path = written(tmp_path, 'recipe = "r.toml"\n[settings]\nchat_template = "mine.jinja"')
    variant = load_variant(path)
    assert variant.recipe == tmp_path / "r.toml"
    assert variant.level == "r"
    settings, _, _ = load_settings(["--model", model, "--variant", path])
    assert settings.chat_template == tmp_path / "mine.jinja"


def test_a_variant_names_what_a_checkpoint_is_converted_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "tiny"
    write_checkpoint(source)
    asked: list[list[str]] = []

    def convert(flags: list[str]) -> int:
        asked.append(flags)
        level = flags[flags.index("--quant") + 1] if "--quant" in flags else "mine"
        out = Path(flags[flags.index("--out") + 1])
        out.mkdir(parents=True, exist_ok=True)
        (out / f"tiny-{level}.gguf").touch()
        return 0

    monkeypatch.setattr("qwen_serve.server.weights._convert", convert)
    by_quant = Variant(name="a", quant="Q5_K_S")
    by_recipe = Variant(name="b", recipe=tmp_path / "mine.toml")
    assert resolve(str(source), None, by_quant).name == "tiny-Q5_K_S.gguf"
    assert resolve(str(source), None, by_recipe).name == "tiny-mine.gguf"
    assert asked[-1][asked[-1].index("--recipe") + 1] == str(tmp_path / "mine.toml")
    assert resolve(str(source), "Q8_0", by_quant).name == "tiny-Q8_0.gguf", "a flag wins"
    assert resolve(str(source), None).name == "tiny-Q4_K_M.gguf"
    gguf = tmp_path / "is.gguf"
    gguf.touch()
    assert resolve(str(gguf), None, by_quant) == gguf


def test_serve_hands_the_variant_on(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handed: list[list[str]] = []
    monkeypatch.setattr("qwen_serve.server.__main__.main", handed.append)
    assert cli.serve([model, "--variant", "small", "--port", "1"]) == 0
    assert handed == [["--model", model, "--variant", "small", "--port", "1"]]
    assert cli.serve([model, "--variant", "smal"]) == 2
    assert "did you mean small?" in capsys.readouterr().err
    monkeypatch.setenv("QWEN_VARIANT", "smal")
    assert cli.serve([model]) == 2


def test_the_program_says_where_values_come_from(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", model, "--variant", "reference", "--print-settings"])
    shown = capsys.readouterr().out
    assert re.search(r'^speculation = "off" +# from variant reference$', shown, re.MULTILINE)
