"""An engine whose steps are launched ahead, as on a GPU, for the tests of that."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qwen_serve.server.engine import Engine, SamplingParams
from qwen_serve.server.engine.batch import Batch
from tests.server.engine.helpers import EXACT, Answer, Question, running

PLAIN: dict[str, Any] = {**EXACT, "sampling": "device", "speculation": "off"}
"""Sampling on the device, though that is the host here, as on a GPU."""
ENDS = SamplingParams()
"""Greedy, with the tokens that end an answer."""


@contextmanager
def ahead(model: Path, **changes: Any) -> Iterator[tuple[Engine, Counter[str]]]:
    """An engine that behaves as on a GPU, and the steps that it launched ahead."""
    with running(model, **{**PLAIN, **changes}) as engine:
        steps, launched = engine._step_loop, Counter[str]()  # noqa: SLF001 - nothing tells when a step is launched
        launch = steps._launch  # noqa: SLF001 - the same

        def watched(behind: Any = None) -> Any:
            if (following := launch(behind)) is not None and behind is not None:
                launched[_kind(behind.batch, following.batch)] += 1
                launched["behind an end"] += bool(behind.batch.dropped)
            return following

        steps._launch = watched  # type: ignore[method-assign]  # noqa: SLF001 - the same
        engine.components.device_runs_alone = True
        yield engine, launched


def _kind(batch: Batch, following: Batch) -> str:
    """How a batch follows another: the same sequences "again", "fewer" of them, a "first" decode of sequences
    whose prompts were read, or "prompts"."""
    if following is batch:
        return "again"
    return "prompts" if following.prompt_tokens else "fewer" if batch.is_decode else "first"


def assert_right(asked: list[Question], found: list[Answer], expected: list[Answer]) -> None:
    """Each answer is as expected; one that was cancelled, as far as it goes."""
    for request, answer, right in zip(asked, found, expected, strict=True):
        if request.cancel_after is None:
            assert answer == right
        else:
            n = min(len(answer.tokens), len(right.tokens))
            assert n >= min(request.cancel_after, len(right.tokens))
            assert answer.tokens[:n] == right.tokens[:n]
