"""GPUs' datasheets, and estimates of a pass's time from them.

    estimate = kernels x launch + max(bytes / bandwidth, operations / compute)

is a model, not a bound. It adds launches, although a GPU hides some of them behind work, and it uses measured
shares of the datasheet's bandwidth and compute. The bound is `least`: the bytes at the datasheet's bandwidth
or the operations at its highest rate (8-bit integers if the weights are quantized), without launches. With
drafts it applies to qwen-serve's passes; other servers may roll back differently.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwen_serve.bench.analysis.block_drafter import WINDOW, BlockDrafter
from qwen_serve.bench.analysis.geometry import UBATCH, Geometry, Work
from qwen_serve.convert.cards import BANDWIDTH


@dataclass(frozen=True)
class Card:
    """A GPU: bandwidth in bytes a second, and dense operations a second on tensor cores in F16 (``compute``)
    and 8-bit integers (``integer``)."""

    name: str
    bandwidth: float
    compute: float
    integer: float

    def least(self, work: Work) -> float:
        """Lower bound of the pass's time on this GPU, in seconds, if the datasheet is right."""
        peak = max(self.compute, self.integer) if work.integer else self.compute
        return max(work.n_bytes / self.bandwidth, work.operations / peak)


# published datasheets, dense rates
CARDS = {
    name: Card(name, BANDWIDTH[name], compute * 1e12, integer * 1e12)
    for name, compute, integer in (
        ("A10G", 70, 140),
        ("L4", 121, 242.5),
        ("H100", 989.5, 1979),
        ("H200", 989.5, 1979),
    )
}


@dataclass(frozen=True)
class Reached:
    """Performance that an engine reaches on a GPU: shares of its bandwidth and of its F16 rate, and seconds
    to launch a kernel.
    """

    bandwidth: float = 1.0
    compute: float = 1.0
    launch: float = 0.0

    def terms(self, card: Card, work: Work) -> NDArray[np.float64]:
        """An estimate of a pass in seconds: [memory, compute, launches]."""
        memory = work.n_bytes / (card.bandwidth * self.bandwidth)
        compute = work.operations / (card.compute * self.compute)
        launch = work.kernels * self.launch
        return np.array([memory, 0.0, launch] if memory >= compute else [0.0, compute, launch])


@dataclass(frozen=True)
class Drafts:
    """Speculation with `count` drafted tokens a step. Each is right with probability `acceptance` if those
    before it are.

    `mtp`: the model's MTP block drafts, with a pass for each token; `block`: a block drafter, with one pass
    for all tokens. Otherwise drafts cost nothing (n-grams).
    """

    count: int
    acceptance: float
    mtp: bool
    block: BlockDrafter | None = None

    @property
    def tokens(self) -> float:
        """Expected tokens of a verification, including the one after the accepted tokens."""
        return sum(self.acceptance**i for i in range(self.count + 1))

    @property
    def rejected(self) -> float:
        """Probability that a draft contains a wrong token."""
        return 1 - self.acceptance**self.count

    @property
    def recomputed(self) -> float:
        """Expected right tokens before a wrong one in a verification. After a rollback to a copy of the state
        they are computed again with the next draft.
        """
        return self.tokens - 1 - self.count * self.acceptance**self.count

    def snapshots(self, geometry: Geometry) -> int:
        """Number of snapshots that qwen-serve keeps by default. Drafts of at most that length are rolled back
        at no cost.
        """
        if self.block is not None:
            return self.count
        from qwen_serve.server.engine.planning.fit import (
            SNAPSHOTS,  # loads llama.cpp, so it is imported only here
        )

        return SNAPSHOTS if geometry.draft is not None else 0


def prefill_passes(
    geometry: Geometry, tokens: int, drafts: Drafts | None = None, *, cached: bool, ubatch: int = UBATCH
) -> Iterator[tuple[Work, float]]:
    """(pass, count) for reading a prompt. ``cached``: only its last token is read."""
    passes = [geometry.decode(tokens - 1)] if cached else [*geometry.prefill(tokens, ubatch=ubatch)]
    if drafts is not None and drafts.block is not None:
        rows = 1 if cached else tokens
        passes += [drafts.block.keep(rows, passes=len(passes)), drafts.block.inject(min(rows, WINDOW))]
    return ((work, 1.0) for work in passes)


def decode_passes(
    geometry: Geometry, prompt: int, tokens: int, drafts: Drafts | None
) -> Iterator[tuple[Work, float]]:
    """(pass, count) for the `tokens - 1` output tokens after the first one, which the prefill gives."""
    done, left = 0.0, float(tokens - 1)
    snapshots = drafts.snapshots(geometry) if drafts is not None else 0
    while left > 1e-9:
        context, gained = prompt + done, drafts.tokens if drafts is not None else 1.0
        share = min(1.0, left / gained)  # the last step may give more tokens than are needed
        if drafts is None:
            yield geometry.decode(context), share
        else:
            rows = drafts.count + 1.0
            if drafts.count > snapshots:
                rows += drafts.recomputed
                yield _rollback(geometry, drafts), share
            yield geometry.verify(rows, context, snapshots=snapshots), share
            if drafts.mtp:
                yield geometry.draft_step(context), share * drafts.count
            if drafts.block is not None:
                yield drafts.block.keep(rows), share
                yield drafts.block.draft(drafts.count + 1, context), share
        done, left = done + gained * share, left - gained * share


def _rollback(geometry: Geometry, drafts: Drafts) -> Work:
    """Copying a sequence's recurrent state on the GPU before a verification, and back after a rejection."""
    copies = 1 + drafts.rejected
    return Work(2 * copies * geometry.state_bytes, kernels=copies)
