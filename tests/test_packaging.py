"""What can be proved of Dockerfile.cuda and the Makefile without Docker and without a card."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile.cuda").read_text()
PIN = next(
    requirement
    for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    if requirement.startswith("llama-cpp-python")
)
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the image's `pip install .` fills, from just the files the Dockerfile copies.

    Built with this environment's setuptools (the extra `dev`), for which nothing has to be fetched.
    """
    context, site = tmp_path_factory.mktemp("context"), tmp_path_factory.mktemp("site")
    build_stage = DOCKERFILE.split("\nFROM ")[1]
    for sources in re.findall(r"^COPY (.+) \S+$", build_stage, re.MULTILINE):
        for source in sources.split():
            subprocess.run(["cp", "-r", ROOT / source, context], check=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *OFFLINE, "--target", site, "."],
        cwd=context,
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull},
        check=True,
    )
    return site


def run_in_image(
    site: Path, tmp_path: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    entry = re.search(r'^ENTRYPOINT \["python3", (.+)\]$', DOCKERFILE, re.MULTILINE)
    assert entry, "the entry point is not python3"
    command = [sys.executable, *re.findall(r'"([^"]+)"', entry.group(1)), *arguments]
    return subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_installed_server_starts_outside_the_checkout(image: Path, tmp_path: Path) -> None:
    helped = run_in_image(image, tmp_path, "--help")
    assert helped.returncode == 0, helped.stderr
    assert "--model" in helped.stdout


def test_the_images_environment_reaches_the_settings(image: Path, tmp_path: Path) -> None:
    """Run without a model: the error must name the folder that the image's ENV gives."""
    environment = dict(re.findall(r"(QWEN_\w+)=(\S+)", DOCKERFILE.split("\nENV ")[-1]))
    assert environment == {"QWEN_MODEL": "/opt/ml/model", "QWEN_HOST": "0.0.0.0", "QWEN_PORT": "8080"}
    folder = tmp_path / "model"
    folder.mkdir()
    refused = run_in_image(image, tmp_path, **{**environment, "QWEN_MODEL": str(folder)})
    assert refused.returncode not in (0, None)
    assert str(folder) in refused.stderr + refused.stdout
    assert "Traceback" not in refused.stderr


def test_every_copied_path_exists_and_is_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE):
        for source in sources.split():
            if source == "${MODEL}":
                continue
            assert (ROOT / source).exists(), source
            assert source in allowed, f"{source} is copied but .dockerignore keeps it out"


def test_the_image_builds_the_pinned_engine() -> None:
    command = re.search(r'"\$\((sed .+ pyproject\.toml)\)"', DOCKERFILE)
    assert command
    printed = subprocess.run(
        command.group(1), shell=True, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == PIN


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
def test_setup_chooses_the_build(
    tmp_path: Path, card: str, compiler: bool, asked: str, expected: str
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("sed", "grep", "sort", "tr", "paste", "sh", "awk", "cat", "ls"):
        found = subprocess.run(["which", tool], capture_output=True, text=True, check=True).stdout.strip()
        (tools / tool).symlink_to(found)
    make = subprocess.run(["which", "make"], capture_output=True, text=True, check=True).stdout.strip()

    def script(name: str, body: str) -> None:
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)

    script("nvidia-smi", f"printf '%s\\n' '{card}'" if card else "echo 'No devices were found'; exit 6")
    script("nvcc", "exit 0")
    said = subprocess.run(
        [make, "-n", "setup", f"CUDA={asked}", f"VENV={tmp_path}/venv", *([] if compiler else ["NVCC="])],
        cwd=ROOT,
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"llama-cpp-python is built {expected}" in said
    assert ("-DGGML_CUDA=ON" in said) == expected.startswith("with CUDA")


def test_make_alone_prints_the_help() -> None:
    printed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("setup", "convert", "serve", "chat", "test", "test-reference", "lint", "clean"):
        assert f"make {target} " in printed
