"""A random checkpoint of the official layout, fresh for every test that may damage it."""

from pathlib import Path

import pytest

from tests.checkpoints import write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "Random-1B")
