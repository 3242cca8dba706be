"""Every command in a fenced block of the documentation: it is one that exists, and with nano it runs.

A page's commands run in the page's order, as they would be pasted, in a folder that has the models. What a
page asks of a large model is asked of nano, and of fewer requests (`SMALLER`); what cannot run without a
card, a network or another product has its reason (`ELSEWHERE`).
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from qwen_serve.bench.cli import COMMANDS as BENCH
from qwen_serve.bench.cli import make_app
from qwen_serve.convert.cli import parser as convert_parser
from qwen_serve.server import client, setup_llama
from qwen_serve.server.cli import USAGE
from qwen_serve.server.settings import Settings
from tests.processes import run
from tests.server.serving import ServerProcess
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "models/nano/README.md"]
PAGES += [ROOT / "models/nano/train/README.md"]
PAGES += [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
FENCE = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELL = ("", "bash", "sh", "console")
OTHER = ("text", "toml", "mermaid", "json", "python", "yaml")
"""Languages of blocks that hold no commands; clients.md's have the names of its clients behind them."""
INLINE = re.compile(
    r"(?<!`)`((?:\.venv/bin/)?(?:make|qwen-bench|qwen-convert|qwen-serve|python -m)[ \n][^`]+)`(?!`)"
)
"""A command, or the beginning of one, in a sentence."""
ACTIVATE = ". .venv/bin/activate"
OWN = re.compile(r"(qwen-|python -m|vllm-router)")
"""What lies in the environment's bin."""
WITHOUT_CHECKOUT = {"docs/installation.md"}

ELSEWHERE = {
    r"^make ": "its targets and variables are looked up; CI runs the targets that test",
    r"\bdocker\b": "docker",
    r"^export SUBMIT|^python scripts/submit\.py": "hands an image in; tests/bench/scripts",
    r"^pip |^qwen-serve setup": "builds llama.cpp; tests/test_packaging.py, tests/server/test_setup_llama.py",
    r"^qwen-bench build|^BIN/|llama-server": "llama.cpp's own programs; tests/bench/servers",
    r"^qwen-bench build synthetic|BF16\.gguf|\bF16\.words|[ =]Q4_K_M\.gguf": "a synthetic 4B of gigabytes",
    r"Qwen/Qwen3|z-lab/|unsloth/": "fetches a checkpoint, or a GGUF; tests/server/test_hub.py",
    r"^qwen-serve list": "what is in the caches of this machine; tests/server/test_hub.py",
    r"^vllm-router|host-a:8080": "a router and more machines; tests/server/test_cluster.py",
    r"server\.cluster": "tests/server/test_cluster.py",
    r"--workload tenants|--api-key-file KEYS": "a file of ten API keys; tests/bench/load/test_tenants.py",
    r"^qwen-bench conformance clients": "installs clients from the network; tests/bench/test_clients.py",
    r"(start|stop)_server\.sh|experiment hackathon": "a card and the 35B",
    r"stock\.toml": "recipes that the page tells how to write, and an hour",
    r"--distill": "torch and transformers; tests/reference/test_distillation.py",
    r"^qwen-bench quality levels": "an hour; tests/bench/gates/test_levels.py",
    r"^python -m models\.nano\.train": "trains or writes the bundled model",
}
SMALLER = {
    r"Qwen3\.5-4B(-DFlash)?-Q4_K_M\.gguf": lambda found: f"nano{(found[1] or '').lower()}-Q4_K_M.gguf",
    r"--runs \d+": "--runs 1 --categories short",
    r"--rounds \d+": "--rounds 1",
    r"--levels [\d,]+": "--levels 2",
    r"--rate [\d.,]+": "--rate 20",
    r"--requests \d+": "--requests 4",
    r"--waves \d+": "--waves 1",
    r"--input-tokens \d+": "--input-tokens 16",
    r"--output-tokens \d+": "--output-tokens 8",
    r"--prefixes \d+": "--prefixes 2",
    r"--prefix-tokens \d+": "--prefix-tokens 24",
    r"--quants \S+": "--quants Q4_K_M",
    r"--variants .*": "--variants small",
    r"--types \S+": "--types q8_0",
    r"--chunks \d+": "--chunks 1",
    r"/tmp/out": "out",
    r"^(qwen-bench throughput (?!.*--workload).*)": r"\1 --requests 4 --input-tokens 16 --output-tokens 8",
    r"^(qwen-bench sweep .*)": r"\1 --rounds 0 --limit 2 --threads 1",
    r"^(qwen-bench engine kv-cache (?!.*--types).*)": r"\1 --types q8_0 --chunks 1",
}
SETTINGS = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
SERVES = re.compile(r"^(python -m qwen_serve.server |qwen-serve serve )")


@dataclass(frozen=True)
class Command:
    """One command of a page, its lines joined and without comments."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def elsewhere(self) -> str | None:
        """The reason why a command is not run here."""
        return next((why for pattern, why in ELSEWHERE.items() if re.search(pattern, self.text)), None)

    def smaller(self, url: str) -> str:
        text = self.text
        for pattern, instead in SMALLER.items():
            text = re.sub(pattern, instead, text)  # type: ignore[call-overload]
        return re.sub(r"(http://127\.0\.0\.1|localhost):80[89]\d", url, text)


def read_commands() -> list[Command]:
    """Read the commands of a page. Raises AssertionError for a block in an unknown language."""
    found = []
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
            if language in SHELL:
                found += [Command(name, text) for text in commands_of(block)]
            elif not (name == "docs/clients.md" and "." in language):
                assert language in OTHER, f"{name}: a block in {language}: shell, or one of {OTHER}?"
    return found


def commands_of(block: str) -> Iterator[str]:
    """The commands of a block, with continued lines joined and without comments."""
    text = ""
    for line in block.splitlines():
        text += line.strip() if not text else f"\n{line}"
        if text.endswith("\\"):
            text = text[:-1].rstrip()
            continue
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # a quotation goes on
            continue
        if words:
            yield re.sub(r"(^|\s+)#( .*)?$", "", text.replace("\n", " ")).strip()
        text = ""
    assert not text, f"unfinished: {text}"


COMMANDS = read_commands()
RUN = [command for command in COMMANDS if command.elsewhere is None]


def test_there_are_commands_and_each_reason_is_needed() -> None:
    assert len(COMMANDS) > 50
    assert len(RUN) > 10
    idle = [
        why for pattern, why in ELSEWHERE.items() if not any(re.search(pattern, c.text) for c in COMMANDS)
    ]
    assert not idle


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text[:60]}")
def test_a_command_can_be_pasted(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """No synopsis; targets, variables and options that exist."""
    assert not re.search(r"\[[A-Z-]+[ =]|\[--|<\w+>", command.text), "a synopsis"
    words = [
        word for word in command.words if not re.fullmatch(r"[A-Z_]+=\S*", word) or "make" in command.text
    ]
    if words[-1] == "&":
        words = words[:-1]
    match words:
        case ["make", target, *variables]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert re.search(rf"^{target}:", makefile, re.MULTILINE)
            for name in (variable.partition("=")[0] for variable in variables):
                assert re.search(rf"\b{name}\b", makefile), name
        case ["qwen-bench", name, *options]:
            unused = make_app([name, *options]).parse_known_args([name, *options])[2]
            assert not unused
        case ["qwen-convert", *options]:
            convert_parser().parse_args(options)
        case ["python", "-m", "qwen_serve.server", *options]:
            assert {word for word in options if word.startswith("--")} <= SETTINGS
        case [program, *_]:
            known = {"curl", "docker", "pip", "export", "vllm-router", "python", "qwen-serve"}
            assert program in known or (ROOT / program).is_file() or program.startswith("BIN/"), program


def flags_of(command: str) -> set[str]:
    """The flags that `qwen-serve COMMAND --help` names."""
    main = {"chat": client.main, "setup": setup_llama.main}[command]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit, match="0"):
        main(["--help"])
    return set(re.findall(r"--[a-z-]+", printed.getvalue()))


INLINES = sorted(
    {
        (str(page.relative_to(ROOT)), " ".join(text.split()))
        for page in PAGES
        for text in INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    }
)


def test_sentences_hold_commands() -> None:
    assert len(INLINES) > 50


@pytest.mark.parametrize(("page", "text"), INLINES)
def test_what_a_sentence_names_exists(page: str, text: str) -> None:
    """Targets and their variables, commands, their parts and flags."""
    words = shlex.split(text.removeprefix(".venv/bin/"))
    asked = {word.partition("=")[0] for word in words if word.startswith("--") and word != "--help"}
    match words:
        case ["make", target, *variables]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(VENV)", ".venv")
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE)
            for name in (variable.partition("=")[0] for variable in variables):
                assert re.search(rf"\b{name}\b", makefile), name
        case [_, "COMMAND" | "..."] | ["python", "-m", "qwen_serve.bench", "COMMAND"]:
            pass
        case ["qwen-bench", name, *rest]:
            app = make_app([name, *rest])[name]
            if BENCH[name].where is None or (rest and rest[0] in BENCH[name].parts):
                app = app[rest[0]] if rest else app
            taken = app.assemble_argument_collection() if app.default_command else []
            assert asked <= {flag for argument in taken for flag in argument.names}
        case ["qwen-convert", *_]:
            assert asked <= set(re.findall(r"--[a-z-]+", convert_parser().format_help()))
        case ["qwen-serve", "chat" | "setup" as command, *_]:
            assert asked <= flags_of(command)
        case ["qwen-serve", command, *_]:
            assert f"qwen-serve {command} " in USAGE
            assert command == "--version" or asked <= SETTINGS | {"--quant"}
        case ["python", "-m", module, *_]:
            assert find_spec(module) is not None
            assert asked <= SETTINGS or module != "qwen_serve.server"
        case _:
            pytest.fail("nobody looks whether that exists")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_say_which_environment(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    if name in WITHOUT_CHECKOUT or not any(c.page == name and OWN.match(c.text) for c in COMMANDS):
        return
    text = page.read_text(encoding="utf-8")
    assert ACTIVATE in text.partition("```")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make convert` of nano and its drafter leaves."""
    made = tmp_path_factory.mktemp("checkout")
    (made / "models").mkdir()
    (made / "out").symlink_to("models")  # a page converts nano to there again, and finds it made
    for name in ("nano", "nano-dflash"):
        (made / "models" / name).symlink_to(ROOT / "models" / name)
    convert = [sys.executable, "-m", "qwen_serve.convert", "--out", "models"]
    for options in (
        ["--src", "models/nano", "--quant", "F16,Q4_K_M"],
        ["--src", "models/nano-dflash", "--target", "models/nano", "--quant", "Q4_K_M"],
    ):
        subprocess.run([*convert, *options], cwd=made, env=environment(made), check=True, capture_output=True)
    return made


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with ServerProcess("--model", folder / "models" / "nano-Q4_K_M.gguf") as server:
        server.wait_for(lambda: "ready at" in server.log)
        yield server.url


def environment(folder: Path) -> dict[str, str]:
    """As after `. .venv/bin/activate`, with a cache of its own."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QWEN_")}
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "QWEN_SERVE_CACHE": str(folder / "cache")}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", sorted({command.page for command in RUN}))
def test_a_pages_commands_run(page: str, folder: Path, url: str) -> None:
    for command in (one for one in RUN if one.page == page):
        text = command.smaller(url)
        if SERVES.match(text):
            starts_and_stops(text, folder)
            continue
        if command.words[0] == "curl" and shutil.which("curl") is None:
            continue
        done = run(["bash", "-c", text], cwd=folder, env=environment(folder))
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        if command.words[0] == "curl":
            assert json.loads(done.stdout)["choices"], done.stdout


def starts_and_stops(text: str, folder: Path) -> None:
    """The server starts, and stops when it gets a signal."""
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {text} --port 0"], cwd=folder, env=environment(folder), stderr=out
        )
        try:
            wait_until(lambda: process.poll() is not None or "ready at" in log.read_text(), 120)
            assert "ready at" in log.read_text(), log.read_text()[-2000:]
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
