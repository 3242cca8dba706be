"""Drafts as long as they can be, whatever they cost: for tests, and for whoever knows better."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Floors
from .plan import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence as ListLike

    from .plan import Candidate, Source


class Eager:
    """A planner that weighs nothing. It prefers the n-gram drafter, and shortens all when rows are short."""

    shape = (0, 0)

    def choose(self, candidates: ListLike[Candidate], most_rows: int) -> Plan:
        """The longest draft that each sequence can get; at most `most_rows` rows in all."""
        room = most_rows - sum(candidate.pending for candidate in candidates)
        each = max(0, room // max(1, len(candidates)))
        sources: list[Source] = []
        lengths = []
        for candidate in candidates:
            source: Source = "ngram" if len(candidate.ngram) else "mtp" if candidate.mtp else ""
            longest = len(candidate.ngram) or len(candidate.mtp)
            sources.append(source)
            lengths.append(min(longest, each))
        return Plan(sources, lengths, float(len(candidates)), 1.0)

    def floors(self, plan: Plan, pending: ListLike[int], *, lasting: bool = False) -> Floors:
        """No depth is too deep."""
        nothing = [0.0] * (max(plan.lengths) + 1)
        return Floors(nothing, nothing)
