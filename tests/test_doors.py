"""The folders at the top start the package's programs, from any folder and without an installation."""

import sys
from pathlib import Path

import pytest

from tests.processes import run

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("door", "usage"),
    [
        ("bench", "Usage: qwen-bench"),
        pytest.param("convert", "usage: qwen-convert", marks=pytest.mark.slow),
        ("server", "usage: python -m qwen_serve.server"),
    ],
)
def test_a_door_is_its_program(door: str, usage: str, tmp_path: Path) -> None:
    done = run([sys.executable, str(ROOT / door), "--help"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(usage)
