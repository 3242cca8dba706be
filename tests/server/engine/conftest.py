"""What engines do at their start, cut short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _short_measurement() -> Iterator[None]:
    """No test's outcome depends on how well verifications were timed: each is, but once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qwen_serve.server.engine.loading.MEASURING_CPU", 0.02)
        yield
