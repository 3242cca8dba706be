"""`qwen-serve setup`: which build is chosen, what it is kept under, and what is said while it runs."""

from __future__ import annotations

import io
import sys
import tomllib
from pathlib import Path

import pytest

from server import setup_llama
from server.setup_llama import Build, SetupError, installed_key, kept_wheel, main, requirement

ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of its own, with no card and no nvcc, and a cache of its own."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("QWEN_SERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    monkeypatch.setattr(setup_llama, "NVCC", tmp_path / "none")
    return tools


def program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("card", "compiler", "asked", "expected"),
    [
        ("8.6", True, "auto", "with CUDA for compute capability 86"),
        ("9.0\n8.6\n9.0", True, "auto", "with CUDA for compute capability 86;90"),
        ("8.6", False, "auto", "for the CPU"),
        ("", True, "auto", "for the CPU"),
        ("", True, "1", "with CUDA for compute capability 86"),
        ("8.6", True, "0", "for the CPU"),
    ],
)
def test_the_build_follows_card_and_compiler(
    machine: Path, capsys: pytest.CaptureFixture[str], card: str, compiler: bool, asked: str, expected: str
) -> None:
    said = f"printf '%s\\n' '{card}'" if card else "echo 'No devices were found'; exit 6"
    program(machine, "nvidia-smi", said)
    if compiler:
        program(machine, "nvcc", "echo release 13.0")
    assert main(["--cuda", asked, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"llama-cpp-python is built {expected}" in printed
    assert ("-DGGML_CUDA=ON" in printed) == expected.startswith("with CUDA")


def test_a_card_without_its_compiler_is_said_first_and_last(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(machine, "nvidia-smi", "printf '8.6\\n'")
    assert main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    notice = setup_llama.card_without_nvcc()
    assert "install a CUDA toolkit" in notice
    assert "apt install nvidia-cuda-toolkit" in notice
    assert len({len(line) for line in notice.splitlines()}) == 1
    assert printed.startswith(notice)
    assert printed.endswith(notice)
    assert printed.count(notice) == 2
    assert main(["--advise"]) == 0
    assert capsys.readouterr().out == notice
    assert main(["--cuda", "0", "--dry-run"]) == 0
    assert "no nvcc" not in capsys.readouterr().out
    program(machine, "nvcc", "echo release 13.0")
    assert main(["--advise"]) == 0
    assert capsys.readouterr().out == ""


def test_cuda_without_its_compiler_is_refused(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cuda", "1", "--dry-run"]) == 1
    assert "CUDA=1 needs nvcc" in capsys.readouterr().err


def build(*, cuda: bool = False, cards: str = "86", patched: bool = True, native: bool = True) -> Build:
    return Build(cuda=cuda, cards=cards, patched=patched, native=native)


def test_what_differs_has_another_key(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(machine, "nvcc", "echo release 13.0")
    builds = [
        build(),
        build(patched=False),
        build(native=False),
        build(cuda=True),
        build(cuda=True, cards="86;89"),
    ]
    keys = [each.key for each in builds]
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_OPENMP=OFF")
    keys.append(build().key)
    program(machine, "c++", "echo c++ 99")
    keys.append(build().key)
    program(machine, "nvcc", "echo release 13.1")
    keys.append(build(cuda=True).key)
    monkeypatch.setattr(setup_llama, "processor", lambda: "another")
    keys.append(build().key)
    assert len(set(keys)) == len(keys)
    assert keys[0].startswith(requirement().partition("==")[2] + "-cpu-")


def test_a_changed_patch_is_another_build(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches = tmp_path / "patches"
    (patches / "llama.cpp").mkdir(parents=True)
    (patches / "llama.cpp" / "0001-a.patch").write_text("a")
    monkeypatch.setattr(setup_llama, "data_folder", lambda name: tmp_path / name)
    first = build().key
    (patches / "llama.cpp" / "0001-a.patch").write_text("b")
    assert build().key != first


def test_a_kept_wheel_is_taken_from_a_folder_that_nobody_may_write(machine: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "cache" / "wheels" / build().key / "llama_cpp_python-1-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    wheel.parent.parent.chmod(0o555)
    assert kept_wheel(build()) == wheel
    assert not (wheel.parent.parent / ".lock").exists()


def test_a_cache_that_can_not_be_made_is_named(machine: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(SetupError, match=r"cache.*QWEN_SERVE_CACHE names another folder"):
        kept_wheel(build())


def test_stock_builds_are_no_build_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_llama, "PACKAGE", "pytest")
    assert installed_key() is None
    monkeypatch.setattr(setup_llama, "PACKAGE", "no-such-package")
    assert installed_key() is None


def test_the_pin_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirement() in project["dependencies"]


def test_progress_is_ninjas_or_makes(capsys: pytest.CaptureFixture[str]) -> None:
    script = "print('noise'); [print(f'[{i}/40] Building x') for i in range(41)]; print('[ 50%] y')"
    log = io.StringIO()
    setup_llama._follow([sys.executable, "-c", script], {}, "llama.cpp", log)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("llama.cpp:   0%")
    assert any(line.startswith("llama.cpp: 100%") for line in shown)
    assert 10 <= len(shown) <= 12  # every tenth, where no terminal shows one line that changes
    assert "noise" in log.getvalue()


def test_a_failure_shows_the_end_of_its_output(tmp_path: Path) -> None:
    script = "print('why it failed'); raise SystemExit(3)"
    with (
        (tmp_path / "a.log").open("w") as log,
        pytest.raises(SetupError, match=r"llama\.cpp: failed; .*a\.log\n[^$]*why it failed"),
    ):
        setup_llama._follow([sys.executable, "-c", script], {}, "llama.cpp", log)
