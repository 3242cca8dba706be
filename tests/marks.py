"""Marks the cases of a test that are quick."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases for `pytest.mark.parametrize`, all but `quick` slow; a tuple is a value for each argument."""
    cases = list(cases)
    assert all(case in cases for case in quick), "a quick case that is none"
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
