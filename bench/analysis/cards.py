"""What cards can do: published datasheets, and the time of a pass by them.

    estimate = kernels x launch + max(bytes / bandwidth, operations / compute)

is a model, not a bound: launches are added, though a card hides some of them behind work, and the compute
reached is what a calibration found. The bound is `least`: the bytes at the datasheet's bandwidth or the
operations at its highest rate, that of 8-bit integers where the weights are quantized, and no launches.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.analysis.block_drafter import BlockDrafter
from bench.analysis.geometry import UBATCH, Geometry, Work
from convert.cards import BANDWIDTH

SNAPSHOTS = 2  # tokens of the longest draft that our server, by default, takes back without copying a state

TERMS = ("memory", "compute", "launch")
"""What a pass's seconds are spent on: weights and caches being moved, arithmetic, launches."""

Floats = NDArray[np.float64]


def binding(terms: Floats) -> str:
    """The largest of the three."""
    return TERMS[int(terms.argmax())]


@dataclass(frozen=True)
class Card:
    """Bytes and operations (of dense F16 on tensor cores) a second, and seconds to launch a kernel.

    `integer`: operations a second of 8-bit integers on tensor cores, dense. `vector`: F32 operations a second
    outside of them, by which what one card reaches is carried over to another. `compute_shares`: (rows of a
    pass, share of `compute` reached), by rows; in between, by their logarithm.
    """

    name: str
    bandwidth: float
    compute: float
    vector: float
    integer: float
    launch: float = 0.0
    compute_shares: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    source: str = ""
    host: float = 32e9
    """Bytes a second to the host or from it."""

    def terms(self, work: Work) -> Floats:
        """The seconds of one pass by `TERMS`, an estimate."""
        memory = work.n_bytes / self.bandwidth
        moved = work.host_bytes / self.host
        compute = work.operations / (self.compute * self.compute_share(work.rows))
        launch = work.kernels * self.launch
        return np.array([memory + moved, 0.0, launch] if memory >= compute else [moved, compute, launch])

    def least(self, work: Work) -> float:
        """Seconds below which no engine can take the pass on this card, if the datasheet is right."""
        return max(work.n_bytes / self.bandwidth, work.operations / self.peak(work.integer))

    def peak(self, integer: bool) -> float:
        """The highest rate of operations there is for such weights."""
        return max(self.compute, self.integer) if integer else self.compute

    def compute_share(self, rows: float) -> float:
        """Of the compute, what a pass of so many rows reaches; beyond the known rows, as at the nearest."""
        known, shares = zip(*self.compute_shares, strict=True)
        return float(np.interp(np.log(rows), np.log(known), shares))


# Published datasheets, dense rates: F16 and 8-bit integers on tensor cores, F32 outside of them; PCIe one way
CARDS = {
    name: Card(
        name,
        BANDWIDTH[name],
        tensor * 1e12,
        vector * 1e12,
        integer * 1e12,
        host=host * 1e9,
        source=f"datasheet: {BANDWIDTH[name] / 1e9:,.0f} GB/s; "
        f"TOPS: F16 {tensor:g}, INT8 {integer:g}, F32 {vector:g}",
    )
    for name, tensor, vector, integer, host in (
        ("A10G", 70, 35, 140, 32),
        ("L4", 121, 30.3, 242.5, 32),
        ("H100", 989.5, 67, 1979, 64),
        ("H200", 989.5, 67, 1979, 64),
    )
}


def preset_of(text: str) -> Card | None:
    """The preset that a card's name, as nvidia-smi and people write it, has in it."""
    words = re.findall(r"\w+", text.upper())
    return next((card for name, card in CARDS.items() if name.upper() in words), None)


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
