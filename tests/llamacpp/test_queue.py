"""Passes of a drafter begun behind each other guess what passes in turn guess, and another context reads that
before the host does."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from qwen_serve.llamacpp import Context, Model, drafter
from qwen_serve.llamacpp.mtp import MtpContext
from qwen_serve.llamacpp.row_sampler import Filters, Place, RowRequest, RowSampler
from qwen_serve.llamacpp.row_steps import HAS_QUEUE
from qwen_serve.server.engine.sampling import Sampler
from qwen_serve.server.engine.speculation.base import DraftRequest, Guesses
from qwen_serve.server.engine.speculation.mtp import MtpDrafter
from tests.contexts import exact_options
from tests.server.engine.speculation.helpers import sequence

pytestmark = pytest.mark.skipif(not HAS_QUEUE, reason="this llama.cpp begins no passes behind each other")

TEXTS = {0: 9, 1: 4, 3: 23}
"""Tokens by sequence id."""


@pytest.fixture(scope="module")
def with_head(nano_f32: Path) -> Iterator[Model]:
    with Model(nano_f32, n_gpu_layers=0, load_mtp=True) as model:
        yield model


class Noise:
    """A request's sampler, as a drafter sees it."""

    def __init__(self, n_vocab: int, seed: int) -> None:
        filters = Filters(("best",)) if seed == 0 else Filters(("top_k", "temperature"), seed, top_k=40)
        self.noise = RowSampler(filters, n_vocab)


def head(model: Model) -> MtpContext:
    return MtpContext(
        model, exact_options(n_ctx=1024, n_batch=64, n_outputs=8, n_seq=8, row_sampling=Place.DEVICE)
    )


def begin(model: Model, context: MtpContext, depth: int) -> Guesses:
    """Drafts behind every text, from the same arbitrary hidden rows."""
    mtp = MtpDrafter(context, 64, depth=depth, slots=8, most=8)
    requests = []
    for slot, n in TEXTS.items():
        rng = np.random.default_rng(slot)
        one = sequence(rng.integers(256, 2000, n).tolist())
        one.slot, one.sampler = slot, cast("Sampler", Noise(model.n_vocab, slot))
        mtp.collect(slot, 0, rng.standard_normal((n - 1, model.n_embd)).astype(np.float32))
        requests.append(DraftRequest(one, slot, depth - (slot == 1)))
    return mtp.begin(requests)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_same_is_guessed(with_head: Model, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    context = head(with_head)
    assert context.queues
    guesses = begin(with_head, context, depth)
    queued = guesses.read()
    context.close()
    monkeypatch.setattr(drafter, "HAS_QUEUE", False)
    in_turn = head(with_head)
    assert not in_turn.queues
    assert queued == begin(with_head, in_turn, depth).read()
    in_turn.close()
    assert [len(one) for one in queued] == [depth, depth - 1, depth]


def test_they_are_verified_before_they_are_read(with_head: Model) -> None:
    context = head(with_head)
    options = exact_options(n_ctx=512, n_batch=64, n_outputs=32, ahead=True, row_sampling=Place.HOST)
    trunk, plain = Context(with_head, options), Context(with_head, options)
    assert trunk.runs_ahead
    guesses = begin(with_head, context, 4)
    rows = guesses.rows[2]
    n = 1 + len(rows)
    for one in (trunk, plain):
        one.tokens[:n], one.positions[:n], one.sequences[:n], one.outputs[:n] = 7, np.arange(n), 0, 1
    trunk.decode(n, next_rows=np.array([-1, *rows], np.int32), sampled_by=context)
    drafts = guesses.read()
    plain.tokens[1:n] = drafts[2]
    plain.decode(n)
    samplers = [RowSampler(Filters(("temperature",), 5), with_head.n_vocab) for _ in range(n)]
    found = []
    for one in (trunk, plain):
        assert one.row_steps is not None
        one.row_steps.begin([RowRequest(sampler, n_top=1) for sampler in samplers], range(n), now=True)
        results = one.row_steps.results()
        found.append([(results[i].token, results[i].logprob) for i in range(n)])
        one.close()
    assert found[0] == found[1]
    context.close()
