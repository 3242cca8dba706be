"""What the policy learns from a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .hidden import HiddenDrafter

if TYPE_CHECKING:
    from collections.abc import Container

    from qwen_serve.server.engine.request import Request

    from .base import Drafter
    from .policy import Policy
    from .proposal import Proposal
    from .times import Graph, StepTimer


@dataclass(frozen=True, slots=True)
class Lesson:
    """A step that was verified."""

    n: int
    """Its sequences."""
    found: list[tuple[str, int, int, Request]]
    """Kind, drafted and right tokens of each draft, and whose it is."""
    proposal: Proposal | None
    drafting: tuple[Drafter, str] | None
    """The drafter and kind that answer for the step: those of its drafts, or of drafts that it catches up
    after."""
    graph: Graph
    seconds: float | None
    """From the launch to the last token; None if they include time of the step before."""
    whole: float | None
    """From the last token of the step before, if one came right before."""
    tokens: int
    """All that the step gave; 0 if it was not one of decodes alone."""

    def teach(self, policy: Policy, timer: StepTimer, alive: Container[Request]) -> None:
        """Update the policy and the times. Results of single sequences count if they are `alive`."""
        timer.book(self.graph, self.seconds)
        spent = (self.seconds or 0.0) + self._of_drafts(policy, alive)
        if self.drafting is not None and self.tokens and self.seconds is not None:
            policy.add(*self.drafting, self.n, self.tokens, spent)

    def _of_drafts(self, policy: Policy, alive: Container[Request]) -> float:
        """Seconds that making the drafts and taking them back took, without what continued drafting pays only
        once."""
        if (proposal := self.proposal) is None:
            return 0.0
        drafter, n, seconds, times = proposal.health.drafter, self.n, proposal.seconds, policy.times
        for kind, drafted, right, sequence in self.found:
            owner = sequence if n > 1 and sequence in alive else None
            policy.verified(drafter, kind, n, drafted, right, owner)
        if proposal.exceeds_snapshots:
            policy.rollback.add(proposal.rollback)
        depth = max(drafted for _, drafted, *_ in self.found)
        if isinstance(drafter, HiddenDrafter):
            drafter.took(len(self.found), depth, seconds)
        # a prompt is read only once, so that time does not predict the cost of the next draft
        expected = drafter.cost(len(self.found), depth)
        spent = min(seconds, 2 * expected) if expected else seconds
        if self.whole is not None and self.seconds is not None:
            times.between.add(n, max(0.0, self.whole - self.seconds - seconds - proposal.rollback))
        spent += proposal.rollback + times.between.of(n)
        if n == 1 and not drafter.instant:  # nor does the time to build a graph that is kept
            whole = spent + (self.seconds or 0.0)
            spent -= min(whole / 2, self.graph.seconds(times))
        return spent
