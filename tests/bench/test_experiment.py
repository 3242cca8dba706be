"""An experiment is a TOML file of commands. Finished parts are not run again."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from qwen_serve.bench.arguments import PromptOptions
from qwen_serve.bench.cli import main, make_app
from qwen_serve.bench.engine.drafts import make_cells
from qwen_serve.bench.experiments.run import FOLDER, Experiment
from qwen_serve.bench.load.cell import PromptSource
from qwen_serve.bench.load.throughput import LoadOptions
from qwen_serve.bench.load.vocabulary import Vocabulary
from qwen_serve.bench.servers.peers import Work
from qwen_serve.bench.store import load
from tests.bench.fake_server import FakeServer

ROOT = Path(__file__).parents[2]
FILE = """
title = "two servers"
[needs]
one = "a URL"
[options]
rounds = 1
warmup = 0
tokenizer = "{root}/models/nano"
[peers]
a = "{{one}}"
b = "{{one}}"
[[parts]]
name = "official"
peers = ["a", "b"]
options = {{ protocol = "official", categories = ["short"] }}
[[parts]]
name = "other"
peers = ["b"]
options = {{ protocol = "distinct", categories = ["short"] }}
"""


def test_parts_are_run_once_and_a_failure_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store = tmp_path / "it.toml", tmp_path / "store"
    file.write_text(FILE.format(root=ROOT))
    with FakeServer() as server:
        command = ["experiment", str(file), "--set", f"one={server.url}", "--out", str(store)]
        assert main([*command, "--part", "official"]) == 0
        assert "finished" in capsys.readouterr().out
        asked = len(server.requests)
        assert main([*command, "--part", "official"]) == 0
        assert len(server.requests) == asked
        assert "is there" in capsys.readouterr().out
    (manifest,) = load([store]).manifests.values()
    assert (manifest.verb, [*manifest.subjects]) == ("peers", ["a", "b"])
    assert {path.name for path in store.iterdir()} == {"official"}
    # with another option it is another part, and this one fails: the server is gone
    assert main([*command, "--part", "official", "--option", "start-timeout=0.2"]) == 1
    assert "exit status 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (FILE, [], "needs one (a URL)"),
        (FILE, ["--set", "one"], "--set one: want NAME=VALUE"),
        (FILE, ["--set", "one=x", "--part", "third"], "--part third: want official, other"),
        ("title = 1", [], "title: Input should be a valid string"),
        ("title = ", [], "not TOML"),
        (FILE.replace('["a", "b"]', '["c"]'), [], "part official: no peer 'c'"),
        (FILE.replace("{{one}}", "{{two}}"), ["--set", "one=x", "--dry-run"], "'two' is not in the file's"),
    ],
)
def test_mistakes(
    text: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "it.toml"
    file.write_text(text.format(root=ROOT))
    assert main(["experiment", str(file), *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.toml")))
def test_those_that_come_along_can_be_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The parser accepts each command with its options."""
    needs = [word for need in Experiment.read(Path(name)).needs for word in ("--set", f"{need}=/no/{need}")]
    assert main(["experiment", name, *needs, "--dry-run"]) == 0
    commands = [shlex.split(line)[1:] for line in capsys.readouterr().out.splitlines()]
    assert commands
    for words in commands:
        app = make_app(words[0])
        command, bound, *_ = app.parse_args(words, exit_on_error=False)
        assert callable(command)
        assert bound.arguments or bound.kwargs


def test_a_limit_is_shared_by_the_number_of_servers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "sampling", "--set", "url=x", "--limit", "130", "--dry-run"]) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    each = [(words.count("--peer"), float(words[words.index("--limit") + 1])) for words in commands]
    assert each == [(n, pytest.approx(10 * n)) for n, _ in each]
    assert sum(n for n, _ in each) == 13


class Words(Vocabulary):
    """A vocabulary in which each word is a token, as in the synthetic model's texts."""

    source, size = "words", 1

    async def encode(self, text: str) -> list[int]:
        return [0] * text.count("x ")

    async def decode(self, ids: Sequence[int]) -> str:
        return "x " * len(ids)


@pytest.mark.parametrize("name", ["dflash", "llama-server"])
async def test_the_texts_to_be_made_for_one_are_long_enough(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No part of an experiment uses up a text of the length that its file requires."""
    found = re.search(r"qwen-bench build synthetic .*--words (\d+)", (FOLDER / f"{name}.toml").read_text())
    assert found is not None
    text = tmp_path / "words.txt"
    text.write_text("x " * int(found[1]))
    needs = [word for need in Experiment.read(Path(name)).needs for word in ("--set", f"{need}=/no/{need}")]
    assert main(["experiment", name, *needs, "--dry-run"]) == 0
    for line in capsys.readouterr().out.splitlines():
        words = shlex.split(line)[1:]
        _, bound, *_ = make_app(words[0]).parse_args(words, exit_on_error=False)
        bound.apply_defaults()
        given = bound.arguments
        if words[0] == "draft-cost":
            cells = make_cells(given["input_tokens"], given["concurrency"], given["requests"])
            assert given["rounds"] * sum(cell.prompt_tokens for cell in cells) <= int(found[1])
        elif words[0] == "peers":
            work, options = given["work"], given["load"]
            assert isinstance(work, Work)
            assert isinstance(options, LoadOptions)
            source = PromptSource(Words(), PromptOptions(text=text))
            for cell in work.cells(source, options):
                await cell.prepare()


def test_an_unknown_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "nothing"]) == 1
    assert (
        "there are card, card-quick, dflash, drafts, hackathon, hackathon-one-card, llama-server, nano, "
        "sampling, three-servers, verify" in capsys.readouterr().err
    )
