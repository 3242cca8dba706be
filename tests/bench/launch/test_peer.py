"""One line of text names a peer; every program gets the same model and resources."""

from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.launch import Peer, Setup, command_for, parse_peer


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("server", Peer("server", "server")),
        ("off=server --no-cache 'a b'", Peer("off", "server", ("--no-cache", "a b"))),
        ("llama-server", Peer("llama-server", "llama-server")),
        (
            "best=llama-server:ngram-mod+backend-sampling --ubatch-size 1024",
            Peer("best", "llama-server", ("--spec-default", "--backend-sampling", "--ubatch-size", "1024")),
        ),
        (
            "llama-server:mtp-4",
            Peer(
                "llama-server:mtp-4", "llama-server", ("--spec-type", "draft-mtp", "--spec-draft-n-max", "4")
            ),
        ),
        ("llama_cpp.server", Peer("llama_cpp.server", "llama_cpp.server")),
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


def test_commands(tmp_path: Path) -> None:
    setup = Setup(
        gguf=Path("m.gguf"),
        parallel=8,
        request_tokens=700,
        threads=1,
        binaries=Path("/bin"),
        python="py",
        logs=tmp_path,
        start_timeout=1,
    )
    assert setup.cells == 8 * 768
    theirs = command_for(parse_peer("llama-server:cache --n 1"), setup)
    assert theirs.command[:3] == ["/bin/llama-server", "--model", "m.gguf"]
    assert theirs.command[-4:] == ["--threads", "1", "--n", "1"]
    assert theirs.command[theirs.command.index("--ctx-size") + 1] == "6144"
    assert theirs.environment["LD_LIBRARY_PATH"].split(":")[0] == "/bin"
    assert theirs.log == tmp_path / "llama-server-cache---n-1.log"
    ours = command_for(parse_peer("server --ctx-size 9"), setup)
    assert ours.command[:3] == ["py", "-m", "server"]
    assert ours.command[ours.command.index("--parallel") + 1] == "8"
    assert ours.command[-2:] == ["--ctx-size", "9"], "the user's flags come last and win"
    python = command_for(parse_peer("llama_cpp.server"), setup)
    assert python.command[python.command.index("--n_ctx") + 1] == "768"
    assert {process.url for process in (theirs, ours, python)} == {
        f"http://127.0.0.1:{process.command[process.command.index('--port') + 1]}"
        for process in (theirs, ours, python)
    }
    running = command_for(parse_peer("x=http://gpu:1"), setup)
    assert (running.command, running.url, running.log) == ([], "http://gpu:1", None)
