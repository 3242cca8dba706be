"""nano with a vision tower, for several comparisons."""

from pathlib import Path
from typing import Any

import pytest

from tests.reference.seeing import seeing_nano


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_nano(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="session")
def reader(checkpoint: Path) -> Any:
    from models.nano.train.see import Reader

    return Reader(checkpoint)
