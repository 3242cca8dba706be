"""`qwen-serve`: values of `serve MODEL`, and nano from conversion to its first answer."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from qwen_serve.server.cli import main, serve
from qwen_serve.server.other_names import FLAGS
from qwen_serve.server.settings import Settings, find_mmproj
from qwen_serve.server.weights import WeightsError, resolve
from tests.checkpoints import write_checkpoint
from tests.processes import group_runs
from tests.processes import run as run_program
from tests.waiting import wait_until


def test_an_interrupted_conversion_says_nothing_of_python(tmp_path: Path) -> None:
    """The signal comes as a terminal sends it, to every process there is."""
    (tmp_path / "llama_cpp.py").write_text("import os, signal\nos.killpg(0, signal.SIGINT)\n")
    done = run_program(
        [sys.executable, "-m", "qwen_serve.server.cli", "convert", "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        start_new_session=True,
    )
    assert (done.returncode, done.stderr) == (130, "")


STUCK = """
import sys, time
if "--no-kld" in sys.argv:  # the converter
    open({began!r}, "w")
    time.sleep(600)
sys.path.remove({folder!r})
del sys.modules["llama_cpp"]
import llama_cpp
sys.path.insert(0, {folder!r})
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_conversion_ends_with_who_wants_to_serve(tmp_path: Path, sent: signal.Signals) -> None:
    began = tmp_path / "began"
    (tmp_path / "llama_cpp.py").write_text(STUCK.format(began=str(began), folder=str(tmp_path)))
    write_checkpoint(tmp_path / "tiny")
    process = subprocess.Popen(
        [sys.executable, "-m", "qwen_serve.server.cli", "serve", str(tmp_path / "tiny"), "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "QWEN_SERVE_CACHE": str(tmp_path / "cache")},
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: began.exists() or process.poll() is not None, 60)
        assert began.exists()
        process.send_signal(sent)
        assert process.wait(60) != 0
        wait_until(lambda: not group_runs(process.pid), 60)
    finally:
        if group_runs(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("wrong", [["--port", "80000"], ["--paralel", "4"]])
def test_settings_are_checked_before_a_model_is_fetched(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qwen_serve.server.weights.resolve", lambda *_, **__: pytest.fail("too late"))
    assert serve(["Qwen/Qwen3.5-4B", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.slow
def test_nano_is_converted_once_and_answers(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "qwen_serve.server.cli",
        "serve",
        "nano",
        "--quant",
        "q4_k_m",
        "--port",
        "0",
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--threads", "1", "--ctx-size", "1024", "--parallel", "1"],
            env={**os.environ, "QWEN_SERVE_CACHE": str(tmp_path / "cache")},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: "ready at" in log.read_text() or process.poll() is not None, 400, log.read_text)
        ready = re.search(r"ready at (\S+)", log.read_text())
        assert ready, log.read_text()
        question = {"messages": [{"role": "user", "content": "What is 2+2?"}], "max_tokens": 16}
        answer = httpx.post(f"{ready[1]}/v1/chat/completions", json=question, timeout=60).json()
        assert "4" in answer["choices"][0]["message"]["content"]
        assert "Importance matrix" in log.read_text(), "what takes long is told"
        assert "to serve:" not in log.read_text()
    finally:
        process.terminate()
        process.wait(60)
    (made,) = (tmp_path / "cache" / "models" / "nano").glob("nano-Q4_K_M.gguf")
    written = made.stat().st_mtime_ns
    os.environ["QWEN_SERVE_CACHE"] = str(tmp_path / "cache")
    try:
        assert resolve("nano", None) == made
    finally:
        del os.environ["QWEN_SERVE_CACHE"]
    assert made.stat().st_mtime_ns == written


def test_a_checkpoints_folder_is_converted_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path / "cache"))
    for place in ("one", "two"):
        write_checkpoint(tmp_path / place / "tiny", vision=True)
    made = {resolve(str(tmp_path / place / "tiny"), "f16") for place in ("one", "two")}
    assert {path.name for path in made} == {"tiny-F16.gguf"}
    assert len(made) == 2
    assert all(find_mmproj(path) for path in made), "pictures are seen"
    assert not list((tmp_path / "one" / "tiny").glob("*.gguf"))


def test_a_gguf_and_a_folder_with_one_are_served_as_they_are(nano_f16: Path) -> None:
    assert resolve(str(nano_f16), None) == nano_f16
    assert resolve(str(nano_f16.parent), None) == nano_f16.parent
    with pytest.raises(WeightsError, match="a GGUF is served as it is"):
        resolve(str(nano_f16), "Q4_K_M")


def test_a_hub_model_that_was_converted_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path))
    kept = tmp_path / "models" / "Qwen--Qwen3.5-4B" / "Qwen3.5-4B-Q4_K_M.gguf"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert resolve("Qwen/Qwen3.5-4B", None) == kept


def test_what_cannot_be_served_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for arguments, status, said in (
        (["no such model"], 1, "error: no such model: no such file or folder, not a hub id"),
        (["Nobody/None"], 1, "error: Nobody/None could not be converted to Q4_K_M\n"),
        (["--quant", "Q4_K_M"], 2, "error: --quant needs a checkpoint"),
    ):
        assert serve(arguments) == status
        told = capfd.readouterr().err
        assert said in told
        assert "Traceback" not in told


def run(*arguments: str) -> int | str | None:
    """Run `qwen-serve` in this process. Returns its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["qwen-serve", *arguments])
        try:
            return main()
        except SystemExit as end:
            return end.code or 0


def test_each_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "chat", "setup"):
        assert run(command, "--help") == 0
        helped = capsys.readouterr().out
        assert f"qwen-serve {command} " in helped
        assert "MODEL is one of" in helped or command != "serve"
    assert run("--version") == 0
    assert run("nothing") == run() == run("serve") == 2
    assert "--model is required" in capsys.readouterr().err


def test_serve_alone_names_what_can_be_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(one in line for one in ("serve nano", "hf:owner/name", "model.gguf"))


def test_commands_of_other_servers_are_answered_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for word, answer in (("run", "qwen-serve chat"), ("pull", "qwen-serve serve"), ("ps", "qwen-serve list")):
        assert run(word, "nano") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {word} is not a command here")
        assert answer in line
    assert run("srve") == 2
    assert capsys.readouterr().err == "error: srve is not a command; did you mean serve?\n"


def test_flags_of_other_servers_are_answered_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value, answer in (
        ("-c", "8192", "--ctx-size N"),
        ("-m", "x.gguf", "--model FILE.gguf"),
        ("-ngl", "-1", "--n-gpu-layers N"),
        ("--max-model-len", "8192", "--ctx-size N"),
        ("--gpu-memory-utilization", "0.9", "--ctx-size N"),
        ("--served-model-name", "qwen", "--alias NAME"),
    ):
        assert serve(["nano", flag, value]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{flag} is not a setting here: ")
        assert answer in line


def test_answers_about_other_servers_flags_name_settings_that_there_are() -> None:
    ours = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    named = {flag for answer in FLAGS.values() for flag in re.findall(r"--[a-z-]+", answer)}
    assert {flag.replace("--no-", "--", 1) for flag in named} - ours == {"--quant"}
    assert not ours & set(FLAGS)


def test_a_conversion_takes_the_place_of_the_command() -> None:
    command = [sys.executable, "-m", "qwen_serve.server.cli", "convert", "--help"]
    helped = run_program(command, check=True)
    assert "--src" in helped.stdout


def test_a_gguf_that_is_not_there_is_no_hub_id() -> None:
    with pytest.raises(WeightsError, match="no such file or folder"):
        resolve("models/nowhere.gguf", None)
