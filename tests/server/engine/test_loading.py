"""From settings to a running engine: what is left behind when that fails, what its counts are."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from server.engine import DoesNotFit
from server.engine.errors import LlamaError
from server.engine.gguf import read_header
from server.engine.llama import Context, Model
from server.engine.loading import decide, load
from server.engine.memory import plan_memory
from tests.server.engine.helpers import Request, ask_all, running, settings

if TYPE_CHECKING:
    from pathlib import Path


def test_a_head_that_does_not_fit_leaves_nothing_behind(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_memory(decide(settings(nano_q4_k_m, speculation="auto")), read_header(nano_q4_k_m))
    closed: list[str] = []

    def refuse(*_: object) -> None:
        raise LlamaError("no memory for the head")

    for kind in (Context, Model):

        def close(self: Context | Model, close: object = kind.close, name: str = kind.__name__) -> None:
            closed.append(name)
            assert callable(close)
            close(self)

        monkeypatch.setattr(kind, "close", close)
    monkeypatch.setattr("server.engine.loading.MtpContext", refuse)
    with pytest.raises(DoesNotFit, match="no memory for the head"):
        load(plan)
    assert closed == ["Context", "Model"], "a model must outlive its contexts"


def test_counts_of_drafts_are_a_snapshot(nano_q4_k_m: Path) -> None:
    with running(nano_q4_k_m, draft_always=True) as engine:
        before = engine.stats()
        asyncio.run(ask_all(engine, [Request([300, 301] * 20, 20)]))
        after = engine.stats()
    assert sum(counts.drafted for counts in before.drafts.values()) == 0
    assert sum(counts.drafted for counts in after.drafts.values()) > 0
