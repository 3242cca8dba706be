"""A server with a vision tower."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.seeing import write_tower
from tests.server.serving import Served, serving


@pytest.fixture(scope="module")
def mmproj(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tower(tmp_path_factory.mktemp("tower"))


@pytest.fixture(scope="module")
def seeing(nano_f32: Path, mmproj: Path) -> Iterator[Served]:
    with serving(nano_f32, mmproj=mmproj) as served:
        yield served
