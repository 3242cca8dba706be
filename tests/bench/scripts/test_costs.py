"""Scripts that time the engine's parts print a table, and name a file that is no model."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.llamacpp.row_sampler import HAS_ROW_SAMPLER

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a script with these words; returns its module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def run(name: str, *words: object) -> Any:
        module = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        sys.modules["script"].run(getattr(module, name))
        return module

    return run


def test_sampling(script: Any, nano_f32: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = script("sampling", nano_f32, "--rows", "1,2", "--times", "2")
    shown = capsys.readouterr().out
    places = ("host", "device") if HAS_ROW_SAMPLER else ("host",)
    ways = [f"{place}, {kind}" for place in places for kind in module.KINDS]
    ways.append("whole rows, argmax on the host")
    assert all(f"{way}, {n} rows" in shown for way in ways for n in (1, 2))


def test_prefix_cache(script: Any, nano_f32: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("prefix_cache", nano_f32, "--resident", "64,128", "--piece", 64, "--ubatch", 64, "--times", 2)
    shown = capsys.readouterr().out
    assert "64 tokens are " in shown
    assert all(f"1 sequence beside {resident} cells" in shown for resident in (0, 64, 128))
    assert all(f"{what} 64 tokens" in shown for what in ("share", "remove", "save", "restore"))


def test_grammar(script: Any, nano_f32: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("grammar", nano_f32, "--sequences", "1,2", "--tokens", 8, "--times", 2)
    shown = capsys.readouterr().out
    assert "times as long as free" in shown
    assert shown.count("nested lists") == shown.count("a text") == 2 * 2


@pytest.mark.parametrize("name", ["sampling", "prefix_cache", "grammar"])
def test_a_file_that_is_no_model(script: Any, name: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for file, message in (("no.gguf", "no.gguf: no such file"), ("x.gguf", "error: ")):
        with pytest.raises(SystemExit, match=message):
            script(name, tmp_path / file)
