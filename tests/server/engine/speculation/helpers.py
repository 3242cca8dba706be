"""What the tests of speculation share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen_serve.server.engine.sequence import Sequence
from tests.server.engine.scheduling import NO_SAMPLER

if TYPE_CHECKING:
    from qwen_serve.server.engine.speculation import Drafter, Speculator


def sequence(tokens: list[int], max_tokens: int = 1000) -> Sequence:
    """A request with this prompt that nobody samples."""
    return Sequence(tokens, max_tokens, NO_SAMPLER)


def draft_by(speculator: Speculator | None, drafter: Drafter) -> None:
    """Have another drafter in the place of the first, the one that drafts from the text."""
    assert speculator is not None
    speculator._drafters[0].drafter = drafter
