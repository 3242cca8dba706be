"""Tests of samplers, also with the one in numpy for a llama.cpp without ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from qwen_serve.llamacpp import host_sampler
from qwen_serve.llamacpp.host_sampler import HostSampler, sample_on_host
from qwen_serve.llamacpp.row_sampler import HAS_ROW_SAMPLER, RowRequest, sample_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from qwen_serve.llamacpp.row_results import RowResults

IN_NUMPY = pytest.mark.parametrize("builds", ["ours", "stock"], indirect=True)


@pytest.fixture(autouse=True)
def builds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if getattr(request, "param", "ours") == "stock":
        monkeypatch.setattr(host_sampler, "HAS_ROW_SAMPLER", False)
    elif not HAS_ROW_SAMPLER:
        pytest.skip("this llama.cpp has no row sampler")


def sampled(requests: Sequence[RowRequest], rows: Sequence[npt.NDArray[np.float32]]) -> RowResults:
    """The results of the requests' own sampler."""
    in_numpy = isinstance(requests[0].sampler, HostSampler)
    return sample_on_host(requests, rows) if in_numpy else sample_rows(requests, rows)
