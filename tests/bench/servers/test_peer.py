"""A peer is parsed from one line of text, and each program gets the same model and resources."""

from pathlib import Path

import pytest

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.servers.programs import Peer, Setup, parse_peer, process_of, resources


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("server", Peer("server", "server")),
        ("off=server --no-cache 'a b'", Peer("off", "server", ("--no-cache", "a b"))),
        ("llama-server", Peer("llama-server", "llama-server")),
        ("ours, no drafts=server --a=b", Peer("ours, no drafts", "server", ("--a=b",))),
        ("server --a=b", Peer("server --a=b", "server", ("--a=b",))),
        (
            "best=llama-server:ngram-mod+backend-sampling --ubatch-size 1024",
            Peer("best", "llama-server", ("--spec-default", "--backend-sampling", "--ubatch-size", "1024")),
        ),
        (
            "best=llama-server:dflash-15 --spec-draft-model d.gguf",
            Peer(
                "best",
                "llama-server",
                (
                    *("--spec-type", "draft-dflash", "--spec-draft-n-max", "15"),
                    *("--spec-draft-model", "d.gguf"),
                ),
            ),
        ),
        (
            "llama-server:mtp-4",
            Peer(
                "llama-server:mtp-4", "llama-server", ("--spec-type", "draft-mtp", "--spec-draft-n-max", "4")
            ),
        ),
        (
            "llama-server:tuned",
            Peer(
                "llama-server:tuned",
                "llama-server",
                (
                    *("--cache-ram", "0", "--ctx-checkpoints", "0", "--backend-sampling"),
                    *("--ubatch-size", "2048", "--batch-size", "8192"),
                ),
            ),
        ),
        (
            "vllm:Qwen/Qwen3.5-4B --x",
            Peer("vllm:Qwen/Qwen3.5-4B --x", "vllm", ("--x",), model="Qwen/Qwen3.5-4B"),
        ),
        ("vllm=http://gpu:8000/v1/", Peer("vllm", "url", url="http://gpu:8000")),
        ("https://gpu", Peer("https://gpu", "url", url="https://gpu")),
    ],
)
def test_parse(text: str, peer: Peer) -> None:
    assert parse_peer(text) == peer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("ollama", "not 'ollama'"),
        ("server:plain", "only llama-server has presets"),
        ("llama-server:fast", "no part 'fast'; there are cache, no-host"),
        ("llama-server:mtp-0", "no part 'mtp-0'"),
        ("http://gpu --flag", "takes no flags"),
        ("server 'a", "No closing quotation"),
    ],
)
def test_parse_errors(text: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        parse_peer(text)


def setup_in(tmp_path: Path, python: str = "py") -> Setup:
    return Setup(
        gguf=Path("m.gguf"),
        parallel=8,
        context=8 * 768,
        threads=1,
        binaries=Path("/bin"),
        python=python,
        logs=tmp_path,
        start_timeout=1,
    )


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_commands(tmp_path: Path) -> None:
    setup = setup_in(tmp_path)
    theirs = process_of(parse_peer("llama-server:cache --n 1"), setup)
    assert theirs.command[:3] == ["/bin/llama-server", "--model", "m.gguf"]
    assert theirs.command[-2:] == ["--n", "1"]
    assert (flag(theirs.command, "--threads"), flag(theirs.command, "--ctx-size")) == ("1", "6144")
    assert theirs.environment["LD_LIBRARY_PATH"].split(":")[0] == "/bin"
    assert theirs.log == tmp_path / "llama-server-cache---n-1.log"
    ours = process_of(parse_peer("server --ctx-size 9"), setup)
    assert ours.command[:3] == ["py", "-m", "qwen_serve.server"]
    assert (flag(ours.command, "--parallel"), flag(ours.command, "--ctx-size")) == ("8", "6144"), "equal"
    assert ours.command[-2:] == ["--ctx-size", "9"], "the user's flags come last and win"
    for process in (theirs, ours):
        assert process.url == f"http://127.0.0.1:{flag(process.command, '--port')}"
    running = process_of(parse_peer("x=http://gpu:1"), setup)
    assert (running.command, running.url, running.log) == ([], "http://gpu:1", None)


def test_resources_are_the_same_and_stated(tmp_path: Path) -> None:
    setup = setup_in(tmp_path)
    for text in ("server", "llama-server:tuned", "vllm"):
        assert resources(parse_peer(text), setup) == {"slots": 8, "context": 6144}
    assert resources(parse_peer("http://gpu"), setup) == {}


def test_vllm_is_started_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no")
    with pytest.raises(BenchError, match="vllm is not installed"):
        process_of(parse_peer("vllm:Qwen/Qwen3.5-4B"), setup_in(tmp_path))
    (tmp_path / "vllm").touch()
    setup = setup_in(tmp_path, str(tmp_path / "python"))
    command = process_of(parse_peer("vllm:Qwen/Qwen3.5-4B --dtype half"), setup).command
    assert command[:3] == [str(tmp_path / "vllm"), "serve", "Qwen/Qwen3.5-4B"]
    assert (flag(command, "--max-num-seqs"), flag(command, "--max-model-len")) == ("8", "768")
    assert command[-2:] == ["--dtype", "half"]
    assert process_of(parse_peer("vllm"), setup).command[2] == "m.gguf"
