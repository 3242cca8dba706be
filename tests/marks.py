"""Which cases of a test are quick."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases for `pytest.mark.parametrize`, of which all but `quick` are slow."""
    cases = list(cases)
    assert all(case in cases for case in quick), "a quick case that is none"
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
