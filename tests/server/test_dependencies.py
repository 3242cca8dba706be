"""What `pip install qwen-serve` brings serves a GGUF; what converts a checkpoint is the extra `convert`."""

import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from qwen_serve.convert.cli import parser, select_target
from qwen_serve.convert.errors import ConvertError
from qwen_serve.server.settings import Settings
from qwen_serve.server.weights import CONVERTING, WeightsError, resolve
from tests.processes import run

ROOT = Path(__file__).parents[2]

SERVING = """
import importlib, pkgutil, sys
from pathlib import Path
sys.modules.update(dict.fromkeys(sys.argv[2:]))
import qwen_serve.server
for module in pkgutil.walk_packages(qwen_serve.server.__path__, "qwen_serve.server."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from qwen_serve.server.engine import Engine, EngineSettings
engine = Engine(EngineSettings(model=Path(sys.argv[1]), ctx_size=512, parallel=1, remember=False))
engine.start()
engine.wait_ready(60)
engine.close()
"""

CONVERT = """
import runpy, sys
sys.modules["gguf"] = None
sys.argv[1:] = ["--src", "models/nano"]
runpy.run_module("qwen_serve.convert", run_name="__main__", alter_sys=True)
"""

SERVE = """
import sys
sys.modules["pydantic"] = None
sys.argv[1:] = ["serve", "nano"]
from qwen_serve.server.cli import main
sys.exit(main())
"""


def test_what_is_not_installed_is_named() -> None:
    done = run([sys.executable, "-c", SERVE])
    assert (done.returncode, done.stderr.startswith("error: pydantic is not installed: ")) == (1, True)


def test_a_gguf_is_served_without_what_converts(nano_q4_k_m: Path) -> None:
    command = [sys.executable, "-c", SERVING, str(nano_q4_k_m), *CONVERTING, "scipy", "aiohttp"]
    done = run(command)
    assert done.returncode == 0, done.stderr


def test_the_extra_is_what_is_looked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["optional-dependencies"]["convert"]
    extra = {line.partition("=")[0].rstrip(">").replace("-", "_") for line in wanted}
    assert extra == set(CONVERTING)


@pytest.mark.parametrize("model", ["Qwen/Qwen3.5-4B", "nano"])
def test_a_checkpoint_without_the_extra_is_told_of_it(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(WeightsError, match=r"not installed \(gguf\): pip install 'qwen-serve\[convert\]'"):
        resolve(model, None)


def test_the_converter_without_the_extra_is_told_of_it() -> None:
    done = run([sys.executable, "-c", CONVERT])
    assert done.returncode == 1
    assert done.stderr == "error: the converter needs gguf: pip install 'qwen-serve[convert]'\n"


def test_pictures_by_url_need_their_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert Settings(model=tmp_path / "a.gguf").image_urls == "off"
    with pytest.raises(ValidationError, match=r"needs aiohttp: pip install 'qwen-serve\[image-urls\]'"):
        Settings(model=tmp_path / "a.gguf", image_urls="https", image_url_hosts="*")


def test_only_a_search_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    arguments = parser().parse_args(["--src", "models/nano", "--quant", "auto", "--target-size", "4MB"])
    with pytest.raises(ConvertError, match=r"--quant auto needs scipy: pip install 'qwen-serve\[search\]'"):
        select_target(arguments)
    done = run(
        [sys.executable, "-c", "import sys; sys.modules['scipy'] = None; import qwen_serve.convert.cli"]
    )
    assert done.returncode == 0, done.stderr
