"""Downloads from the hub, against a local server with the needed part of its protocol."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGUFReader

from tests.fake_hub import COMMIT, REPO, Hub, serving
from tests.processes import run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[tuple[str, type[Hub]]]:
    with serving(checkpoint) as found:
        yield found


def convert(endpoint: str, repo: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    command = [
        sys.executable,
        "-m",
        "qwen_serve.convert",
        "--src",
        repo,
        "--quant",
        "F16",
        "--out",
        str(folder / "out"),
    ]
    return run(command, cwd=ROOT, env=environment)


def test_a_model_is_fetched_named_and_converted(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    done = convert(hub[0], REPO, tmp_path)
    assert done.returncode == 0, done.stderr
    fields = GGUFReader(tmp_path / "out" / "Tiny-1B-F16.gguf").fields
    assert fields["general.name"].contents() == "Tiny 1B"
    assert fields["general.organization"].contents() == "Someone"
    assert fields["general.source.url"].contents() == f"https://huggingface.co/{REPO}/tree/{COMMIT}"


def test_an_unknown_model(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    done = convert(hub[0], "Someone/Else", tmp_path)
    assert done.returncode == 1
    assert "error: --src Someone/Else: no such folder, and the hub knows no such model" in done.stderr


def test_a_download_larger_than_the_disk_is_not_begun(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    hub[1].claimed_bytes = 10**16
    done = convert(hub[0], REPO, tmp_path)
    assert done.returncode == 1
    assert f"error: --src {REPO}: 20,000,000.0 GB to download" in done.stderr
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
