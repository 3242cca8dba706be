"""Contexts of drafters, whose rows are guesses. Where rows are chosen on the device, so that nobody waits for
the host, the next pass may read a token, and the trunk may verify it, before the host knows it."""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from .context import Context
from .host_sampler import make_sampler
from .row_sampler import UNCHECKED, UNKNOWN, Filters, RowRequest, RowSampler
from .row_steps import HAS_QUEUE, RowSteps

FIRST = np.zeros(1, np.int32)
"""To ask whether the first row could be read."""


class DrafterContext(Context):
    """A context that chooses tokens of drafts: with `choose`, behind a pass or before it, and `chosen`."""

    @cached_property
    def queues(self) -> bool:
        """Whether tokens may be read where they are chosen, by the pass that needs them next."""
        return HAS_QUEUE and self.row_steps is not None and self._is_read(self.row_steps)

    def _is_read(self, steps: RowSteps) -> bool:
        raise NotImplementedError

    def choose(
        self, indices: Sequence[int], samplers: Sequence[RowSampler | None] = (), *, now: bool = True
    ) -> None:
        """Begin to choose a token from each row: the best one, or what the sampler in its place, if it is
        one, would choose. Rows that follow each other with the same sampler are for one token after the
        other; it does not count the tokens before them. Logits may be -inf: some drafters have fewer tokens.

        With `now` they are rows of the last batch, all of one pass, and `indices` are those of the batch.
        Otherwise they are rows of the next batch and, k times `n_batch` further, of the k-th one behind it.
        Needs `queues` then.
        """
        assert self.row_steps is not None
        each = [*(samplers or [None] * len(indices)), None]
        requests = [
            RowRequest(
                self._greedy if one is None else one,
                n_top=UNCHECKED,
                draft=UNKNOWN if one is not None and one is following else -1,
            )
            for one, following in pairwise(each)
        ]
        self.row_steps.begin(requests, indices, now=now)

    def chosen(self) -> list[int]:
        """The tokens, in the order of `choose`; -1 for an unusable row. Waits for them."""
        assert self.row_steps is not None
        return self.row_steps.results().tokens

    def best(self, indices: Sequence[int], samplers: Sequence[RowSampler | None] = ()) -> list[int]:
        """`choose` and `chosen`. Waits for the device."""
        self.choose(indices, samplers)
        return self.chosen()

    @cached_property
    def _greedy(self) -> RowSampler:
        return make_sampler(Filters(("best",)), self._n_vocab)
