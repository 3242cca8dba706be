"""What cards can do: published datasheets, and the time of a pass by them.

    estimate = kernels x launch + max(bytes / bandwidth, operations / compute)

is a model, not a bound: launches are added, though a card hides some of them behind work, and bandwidth and
compute are the shares of the datasheet's that somebody measured. The bound is `least`: the bytes at the
datasheet's bandwidth or the operations at its highest rate, that of 8-bit integers where the weights are
quantized, and no launches.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.analysis.block_drafter import BlockDrafter
from bench.analysis.geometry import UBATCH, Geometry, Work
from convert.cards import BANDWIDTH

SNAPSHOTS = 2  # tokens of the longest draft that our server, by default, takes back without copying a state


@dataclass(frozen=True)
class Card:
    """Bytes a second, operations a second of dense F16 and of 8-bit integers on tensor cores, and bytes a
    second to the host or from it."""

    name: str
    bandwidth: float
    compute: float
    integer: float
    host: float

    def least(self, work: Work) -> float:
        """Seconds below which no engine can take the pass on this card, if the datasheet is right."""
        peak = max(self.compute, self.integer) if work.integer else self.compute
        return max(work.n_bytes / self.bandwidth, work.operations / peak)


# Published datasheets, dense rates; PCIe one way
CARDS = {
    name: Card(name, BANDWIDTH[name], compute * 1e12, integer * 1e12, host * 1e9)
    for name, compute, integer, host in (
        ("A10G", 70, 140, 32),
        ("L4", 121, 242.5, 32),
        ("H100", 989.5, 1979, 64),
        ("H200", 989.5, 1979, 64),
    )
}


@dataclass(frozen=True)
class Reached:
    """What an engine makes of a card: shares of its bandwidth and of its F16 rate, and seconds to launch a
    kernel."""

    bandwidth: float = 1.0
    compute: float = 1.0
    launch: float = 0.0

    def terms(self, card: Card, work: Work) -> NDArray[np.float64]:
        """The seconds of one pass, an estimate: bytes being moved, arithmetic, launches."""
        memory = work.n_bytes / (card.bandwidth * self.bandwidth)
        moved = work.host_bytes / card.host
        compute = work.operations / (card.compute * self.compute)
        launch = work.kernels * self.launch
        return np.array([memory + moved, 0.0, launch] if memory >= compute else [moved, compute, launch])


@dataclass(frozen=True)
class Drafts:
    """Speculation: `count` drafts a step, each right with probability `acceptance`, if those before it were.

    `mtp`: drafted by the model's MTP block, one step of it each; `block`: by a block drafter, all in one
    pass; else they cost nothing (n-grams).
    """

    count: int
    acceptance: float
    mtp: bool
    block: BlockDrafter | None = None

    @property
    def tokens(self) -> float:
        """Expected tokens a verification, the one after the accepted drafts included."""
        return sum(self.acceptance**i for i in range(self.count + 1))

    @property
    def rejected(self) -> float:
        """The chance that a draft is not right to its end and the recurrent state has to go back."""
        return 1 - self.acceptance**self.count if self.count > SNAPSHOTS else 0.0

    @property
    def recomputed(self) -> float:
        """Expected tokens of a verification that were right and are computed again with the next."""
        right = self.tokens - 1 - self.count * self.acceptance**self.count
        return right if self.count > SNAPSHOTS else 0.0


def prefill_passes(
    geometry: Geometry, tokens: int, *, cached: bool, ubatch: int = UBATCH
) -> Iterator[tuple[Work, float]]:
    """Reading a prompt: passes and how often each; ``cached``: all but its last token is there already."""
    passes = [geometry.decode(tokens - 1)] if cached else geometry.prefill(tokens, ubatch=ubatch)
    return ((work, 1.0) for work in passes)


def decode_passes(
    geometry: Geometry, prompt: int, tokens: int, drafts: Drafts | None
) -> Iterator[tuple[Work, float]]:
    """The `tokens - 1` output tokens after the first, which the prefill gives: passes, how often each."""
    done, left = 0.0, float(tokens - 1)
    while left > 1e-9:
        context, gained = prompt + done, drafts.tokens if drafts is not None else 1.0
        share = min(1.0, left / gained)  # the last step may be needed in part only
        if drafts is None:
            yield geometry.decode(context), share
        else:
            yield geometry.verify(drafts.count + 1 + drafts.recomputed, context), share
            if drafts.rejected:
                yield _way_back(geometry, drafts), share
            if drafts.mtp:
                yield geometry.draft_step(context), share * drafts.count
            if drafts.block is not None:
                yield drafts.block.inject(gained), share
                yield drafts.block.guess(drafts.count + 1, context), share
        done, left = done + gained * share, left - gained * share


def _way_back(geometry: Geometry, drafts: Drafts) -> Work:
    """A sequence's recurrent state copied on the card before a verification, and back after a rejection."""
    copies = 1 + drafts.rejected
    return Work(2 * copies * geometry.state_bytes, kernels=copies)
