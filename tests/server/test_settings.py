"""Precedence of flags, environment, file and defaults; errors name the source."""

import tomllib
from pathlib import Path

import pytest

from qwen_serve.llamacpp.vision import has_vision
from qwen_serve.server.__main__ import main
from qwen_serve.server.engine import EngineSettings
from qwen_serve.server.engine.settings import ForcedSettings, UserSettings
from qwen_serve.server.settings import Settings, describe, describe_chosen, find_mmproj, find_model
from qwen_serve.server.settings_sources import GONE, SettingsError, load_settings, unknown_variables


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("CONFIG", *Settings.model_fields):
        monkeypatch.delenv(f"QWEN_{name.upper()}", raising=False)
    path = tmp_path / "model.gguf"
    path.touch()
    return str(path)


def test_defaults(model: str) -> None:
    settings, sources, _ = load_settings(["--model", model])
    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert not settings.thinking
    assert settings.model_id == "model"
    assert sources["model"] == "flag"
    assert sources["port"] == "default"


def test_precedence(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "server.toml"
    config.write_text(f'model = "{model}"\nport = 1\nparallel = 2\nthinking = true\nalias = "file"\n')
    monkeypatch.setenv("QWEN_CONFIG", str(config))
    monkeypatch.setenv("QWEN_PARALLEL", "3")
    monkeypatch.setenv("QWEN_ALIAS", "environment")
    settings, sources, _ = load_settings(["--alias", "flag", "--no-thinking"])
    assert (settings.port, settings.parallel, settings.alias, settings.thinking) == (1, 3, "flag", False)
    assert sources["port"] == str(config)
    assert sources["parallel"] == "environment"
    assert sources["alias"] == "flag"
    assert sources["batch_size"] == "default"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], r"--port \(from flag\).*65535.*'99999'"),
        (["--parallel", "many"], r"--parallel \(from flag\).*integer.*'many'"),
        (["--parallel", "0"], r"--parallel \(from flag\).*greater than or equal to 1, not '0'"),
        (["--parallel", "257"], r"--parallel \(from flag\).*less than or equal to 256, not '257'"),
        (["--prefill-seconds", "0"], r"--prefill-seconds \(from flag\).*greater than 0, not '0'"),
        (["--threads", "100000"], r"--threads \(from flag\).*at most \d+, 4 for each.*, not '100000'"),
        (["--batch-size", "7"], r"batch_size is 7.*at least parallel \(8\)"),
        (["--flash-attn", "maybe"], r"--flash-attn.*'auto', 'on' or 'off'.*'maybe'"),
        (["--drain-timeout", "nan"], r"--drain-timeout.*'nan'"),
        (["--model", "/no/such/file.gguf"], r"--model \(from flag\).*/no/such/file.gguf does not exist"),
        (["--chat-template", "/no/such.jinja"], r"--chat-template.*not a file"),
        (["--api-key", ""], r"--api-key \(from flag\).*at least 1"),
        (["--api-key-file", "/no/such"], r"--api-key-file.*/no/such is not a file"),
        (["--ssl-certfile", "/no/such.pem"], r"--ssl-certfile.*/no/such.pem is not a file"),
        (["--ssl-certfile", __file__], r"--ssl-certfile and --ssl-keyfile: give both, or neither"),
        (["--allowed-origins", "page.example"], r"--allowed-origins.*page.example is not an origin such as"),
        (["--prefill-budget", "512"], "--prefill-budget is gone: prefill_seconds says"),
        (["--no-prefix-shrinks"], "--no-prefix-shrinks is gone: the prefix cache is"),
        (["--sampling=host"], "--sampling is gone: sampling_defaults says"),
        (["--config", "/no/such.toml"], r"--config: /no/such.toml is not a file"),
        (["--flash-attn", "off", "--cache-type-v", "q8_0"], "cache_type_v.*flash"),
    ],
)
def test_values_that_cannot_be_used(model: str, arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(["--model", model, *arguments])


def test_a_file_of_keys(model: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# none yet\n\n")
    with pytest.raises(SettingsError, match="has no key in it"):
        load_settings(["--model", model, "--api-key-file", str(keys)])
    keys.write_text("one\n# two\n three class=flex share=0.5 # 3\n")
    settings, sources, _ = load_settings(["--model", model, "--api-key", "own", "--api-key-file", str(keys)])
    assert [key.key for key in settings.api_keys()] == ["own", "one", "three"]
    assert [(key.service_tier, key.share) for key in settings.api_keys()] == [
        ("default", 1.0),
        ("default", 1.0),
        ("flex", 0.5),
    ]
    assert "three" not in describe(settings, sources)
    assert load_settings(["--model", model])[0].api_keys() == []


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("key class=best", "class="),
        ("key share=0", "share="),
        ("key share=nan", "share="),
        ("key share=1e-300", "share="),
        ("key share=inf", "share="),
        ("key more", ""),
    ],
)
def test_a_key_with_a_class_or_share_that_there_is_not(
    model: str, tmp_path: Path, line: str, named: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# the team's\n{line}\n")
    with pytest.raises(
        SettingsError, match=rf"--api-key-file.*keys, line 2: {named}.*a line is a key"
    ) as caught:
        load_settings(["--model", model, "--api-key-file", str(keys)])
    assert "more" not in str(caught.value), "it may be a part of a key"


def test_every_problem_is_told_at_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_PORT", "-1")
    with pytest.raises(SettingsError) as caught:
        load_settings(["--model", model, "--log-level", "loud"])
    assert "--port (from environment)" in str(caught.value)
    assert "--log-level (from flag)" in str(caught.value)


@pytest.mark.usefixtures("model")
def test_no_model() -> None:
    with pytest.raises(SettingsError, match=r"--model is required \(or QWEN_MODEL\)"):
        load_settings([])


@pytest.mark.parametrize("name", sorted(GONE))
def test_what_is_gone_is_named_with_what_is_there(
    model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "server.toml"
    config.write_text(f"{name} = 1")
    with pytest.raises(SettingsError, match=rf"server\.toml: unknown key '{name}'; it is gone: {GONE[name]}"):
        load_settings(["--model", model, "--config", str(config)])
    monkeypatch.setenv(f"QWEN_{name.upper()}", "1")
    with pytest.raises(SettingsError, match=rf"QWEN_{name.upper()} is gone: {GONE[name]}"):
        load_settings(["--model", model])


def test_what_is_forced_is_no_setting() -> None:
    assert not Settings.model_fields.keys() & ForcedSettings.model_fields.keys()


@pytest.mark.parametrize("text", ["prot = 1", "port = ", "[server]\nport = 1"])
def test_files_that_cannot_be_used(model: str, tmp_path: Path, text: str) -> None:
    config = tmp_path / "server.toml"
    config.write_text(text)
    with pytest.raises(SettingsError, match=r"server\.toml"):
        load_settings(["--model", model, "--config", str(config)])


def test_the_tower_beside_a_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tmp_path / "Some-4B-v2-Q4_K_M.gguf"
    tower, second = tmp_path / "mmproj-Some-4B-F16.gguf", tmp_path / "mmproj-Some-4B-v2-Q8_0.gguf"
    for path in (model, tmp_path / "mmproj-Some-4-F16.gguf"):  # another's
        path.touch()
    assert find_mmproj(model) is None
    tower.touch()
    assert find_mmproj(model) == (tower if has_vision() else None)
    settings, *_ = load_settings(["--model", str(model)])
    assert settings.engine().mmproj == find_mmproj(model)
    settings, *_ = load_settings(["--model", str(model), "--mmproj", "off"])
    assert settings.engine().mmproj is None
    second.touch()
    settings, *_ = load_settings(["--model", str(model), "--mmproj", str(second)])
    assert settings.engine().mmproj == second
    assert find_mmproj(model) is None
    assert "name one with --mmproj (mmproj-Some-4B-F16.gguf, mmproj-Some-4B-v2-Q8_0.gguf)" in caplog.text
    with pytest.raises(SettingsError, match=r"mmproj.*none\.gguf is not a file; want an mmproj"):
        load_settings(["--model", str(model), "--mmproj", str(tmp_path / "none.gguf")])


def test_a_folder_with_one_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*\.gguf"):
        find_model(tmp_path)
    (tmp_path / "a.imatrix.gguf").touch()
    (tmp_path / "mmproj-a-F16.gguf").touch()
    (tmp_path / "a-Q4_K_M.gguf.part").touch()
    (tmp_path / "a-Q4_K_M.gguf").touch()
    assert find_model(tmp_path) == tmp_path / "a-Q4_K_M.gguf"
    (tmp_path / "a-F16.gguf").touch()
    with pytest.raises(ValueError, match=r"name one of a-F16\.gguf, a-Q4_K_M\.gguf"):
        find_model(tmp_path)


def test_a_description_is_a_file_of_settings(model: str, tmp_path: Path) -> None:
    arguments = [
        "--model",
        model,
        "--thinking",
        "--port",
        "0",
        "--alias",
        'a "quoted" \\ name',
        "--api-key",
        "secret",
    ]
    settings, sources, _ = load_settings(arguments)
    text = describe(settings, sources)
    assert "secret" not in text
    config = tmp_path / "again.toml"
    config.write_text(text)
    assert tomllib.loads(text)["thinking"] is True
    again, _, _ = load_settings(["--config", str(config)])
    assert again == settings.model_copy(update={"api_key": None})


def test_every_engine_setting_can_be_set(model: str) -> None:
    for name, field in UserSettings.model_fields.items():
        assert Settings.model_fields[name].default == field.default
        assert field.description, f"{name} says nothing of itself"
    settings, _, _ = load_settings(["--model", model, "--ubatch-size", "64", "--no-use-mmap"])
    assert settings.engine() == EngineSettings(model=Path(model), ubatch_size=64, use_mmap=False)


@pytest.mark.usefixtures("model")
def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    letters = "".join(shown.split())  # a line may end behind a hyphen
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')} " in shown.replace(",", " ")
        assert "".join(str(field.description).split()) in letters


@pytest.mark.usefixtures("model")
def test_bad_settings_end_the_program_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--port", "x"])
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prot", "1"], r"--prot is not a setting; did you mean --port\?$"),
        (["--no-prefix-cahce"], r"--no-prefix-cahce is not a setting; did you mean --prefix-cache\?"),
        (["--ctx_size=9"], r"did you mean --ctx-size\?"),
        (["--zzz"], r"--zzz is not a setting; --help lists them"),
        (["extra"], r"extra: settings are flags"),
    ],
)
def test_a_mistyped_flag(model: str, arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(["--model", model, *arguments])


def test_a_mistyped_key_of_the_file(model: str, tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text("paralel = 2\n")
    with pytest.raises(SettingsError, match=r"unknown key 'paralel'; did you mean 'parallel'\?"):
        load_settings(["--model", model, "--config", str(config)])


def test_a_mistyped_variable(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in ("QWEN_SERVE_CACHE", "QWEN_SERVE_WHEELS", "QWEN_BENCH_API_KEY"):
        monkeypatch.setenv(known, "x")
    assert unknown_variables() == []
    monkeypatch.setenv("QWEN_CTX_SIEZ", "1")
    monkeypatch.setenv("QWEN_HOME", "1")
    monkeypatch.setenv("QWEN_PARALLEL", "1")
    first, second = unknown_variables()
    assert first == "QWEN_CTX_SIEZ is not a setting; did you mean QWEN_CTX_SIZE?"
    assert second == "QWEN_HOME is not a setting; it has no effect"


def test_a_hub_id_says_how_to_convert(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"qwen-convert --src Qwen/Qwen3.5-4B .*Qwen3.5-4B-Q4_K_M.gguf"):
        find_model(Path("Qwen/Qwen3.5-4B"))
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match="is a checkpoint, not a GGUF"):
        find_model(tmp_path)
    with pytest.raises(ValueError, match=r"models/mine.gguf does not exist$"):
        find_model(Path("models/mine.gguf"))


def test_what_was_set_is_one_line(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_API_KEY", "hidden")
    settings, sources, _ = load_settings(["--model", model, "--parallel", "2"])
    line = describe_chosen(settings, sources)
    assert "parallel = 2 (flag)" in line
    assert "api_key = (secret) (environment)" in line
    assert "hidden" not in line
    assert "port" not in line


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load_settings(["--version"])
    assert left.value.code == 0
    assert "llama-cpp-python" in capsys.readouterr().out
