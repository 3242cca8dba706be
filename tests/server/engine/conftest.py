"""Shortens the measurements at an engine's start."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _short_measurement() -> Iterator[None]:
    """Time each verification only briefly, since no test's outcome depends on the measurement."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qwen_serve.server.engine.loading.MEASURING_CPU", 0.02)
        yield
