"""Parameters and samplers: choices from known logits, and the same choices for the same seed."""

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from qwen_serve.llamacpp import Context, Model
from qwen_serve.llamacpp.row_results import NO_LOGPROBS, RowResult, Status
from qwen_serve.server.engine.batch import Batch, Placement
from qwen_serve.server.engine.errors import FormatTooComplex
from qwen_serve.server.engine.request import Request
from qwen_serve.server.engine.sampling import Sampler, SamplingParams
from qwen_serve.server.engine.sampling.constraint import Constraint
from qwen_serve.server.engine.sampling.rows import Rows
from qwen_serve.server.engine.sampling.thinking import ThinkingLimits, ThinkingWatch
from qwen_serve.server.engine.verification import sample
from qwen_serve.server.engine.vocab import Vocab
from tests.contexts import exact_options
from tests.server.engine.sampling.fake_rows import choose


class SmallVocab:
    """A vocabulary of ten tokens: 8 and 9 are padding, 3 ends a generation."""

    n_real = 8
    eog_ids = frozenset({3})


def sampler(params: SamplingParams, prompt: Sequence[int] = ()) -> Sampler:
    return Sampler(params, cast("Vocab", SmallVocab()), prompt)


def row(**logits: float) -> npt.NDArray[np.float32]:
    """A row of ten logits, zero except for those given as t<id>=value."""
    values = np.zeros(10, np.float32)
    for name, value in logits.items():
        values[int(name[1:])] = value
    return values


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
    ],
)
def test_nonsense_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_greedy_takes_the_best() -> None:
    assert choose(sampler(SamplingParams()), row(t5=2.0, t6=1.0)) == 5


def test_a_temperature_next_to_nothing_is_greedy() -> None:
    one = sampler(SamplingParams(temperature=1e-40))
    assert choose(one, row(t5=2.0, t6=1.0)) == 5
    one.close()


def test_padding_is_never_chosen() -> None:
    assert choose(sampler(SamplingParams()), row(t9=9.0, t8=8.0, t2=1.0)) == 2


def test_the_end_is_chosen_unless_it_is_to_be_ignored() -> None:
    assert choose(sampler(SamplingParams()), row(t3=5.0, t4=1.0)) == 3
    assert choose(sampler(SamplingParams(ignore_eos=True)), row(t3=5.0, t4=1.0)) == 4


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_unusable_logits_are_an_error_not_a_token(broken: float) -> None:
    with pytest.raises(FloatingPointError):
        choose(sampler(SamplingParams()), row(t5=broken))


def test_repetition_penalty_sees_the_prompt_and_the_output() -> None:
    one = sampler(SamplingParams(repetition_penalty=2.0), prompt=[5])
    assert choose(one, row(t5=3.0, t6=2.0)) == 6
    assert choose(one, row(t5=3.0, t6=2.0)) == 5  # 1.5 against 1.0: both have been seen


def test_presence_and_frequency_see_the_output_only() -> None:
    one = sampler(SamplingParams(presence_penalty=0.5, frequency_penalty=0.4), prompt=[5, 5, 5])
    logits = {"t5": 3.0, "t6": 2.0}
    chosen = [choose(one, row(**logits)) for _ in range(4)]
    # 5 stands at 3.0, then 2.1 (seen once), then 1.7 (twice), where 6 is ahead; then 6 is at 1.1
    assert chosen == [5, 5, 6, 5]


# --- on the logits of a real context ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def context(model: Model) -> Iterator[Context]:
    context = Context(model, exact_options(n_ctx=256, n_batch=32, n_outputs=1))
    context.tokens[:4] = [5, 6, 7, 8]
    context.positions[:4] = range(4)
    context.outputs[3] = 1
    context.decode(4)
    yield context
    context.close()


def draw(
    context: Context, model: Model, params: SamplingParams, logits: Sequence[float], n: int
) -> list[int]:
    """Draw `n` tokens from a row with these first logits and minus infinity for all others."""
    one = Sampler(params, Vocab(model), [1])
    chosen = []
    for _ in range(n):
        line = context.logits(1)[0]
        line[:] = -50.0
        line[: len(logits)] = logits
        chosen.append(choose(one, line))
    one.close()
    return chosen


def test_draws_follow_the_distribution(context: Context, model: Model) -> None:
    chosen = draw(
        context, model, SamplingParams(temperature=1.0, seed=1), np.log([0.5, 0.3, 0.2]).tolist(), 4000
    )
    shares = np.bincount(chosen, minlength=3) / 4000
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], atol=0.03)


def test_temperature_comes_before_top_p(context: Context, model: Model) -> None:
    # Probabilities 0.5, 0.3, 0.2 become 0.66, 0.24, 0.11 at temperature 0.5: top_p 0.85 then keeps two.
    params = SamplingParams(temperature=0.5, top_p=0.85, seed=1)
    chosen = draw(context, model, params, np.log([0.5, 0.3, 0.2]).tolist(), 2000)
    shares = np.bincount(chosen, minlength=3) / 2000
    np.testing.assert_allclose(shares, [25 / 34, 9 / 34, 0], atol=0.04)


def test_top_k_and_min_p_cut_the_tail(context: Context, model: Model) -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    by_top_k = draw(context, model, SamplingParams(temperature=1.0, top_k=2, seed=1), logits, 500)
    by_min_p = draw(context, model, SamplingParams(temperature=1.0, min_p=0.6, seed=1), logits, 500)
    assert set(by_top_k) == set(by_min_p) == {0, 1}


def test_the_same_seed_draws_the_same(context: Context, model: Model) -> None:
    logits = [0.0] * 50

    def drawn(seed: int | None) -> list[int]:
        return draw(context, model, SamplingParams(temperature=1.0, seed=seed), logits, 40)

    assert drawn(7) == drawn(7) != drawn(8)
    assert drawn(-1) == drawn(-1)
    assert drawn(None) != drawn(None)


def test_drawing_never_takes_padding_or_a_banned_end(context: Context, model: Model) -> None:
    vocab = Vocab(model)
    assert vocab.n_real < vocab.size
    params = SamplingParams(temperature=1.0, ignore_eos=True, seed=3)
    one = Sampler(params, vocab, [1])
    for _ in range(300):
        line = context.logits(1)[0]
        line[:] = 1.0
        token = choose(one, line)
        assert token < vocab.n_real
        assert token not in vocab.eog_ids
    one.close()


class Lost:
    """A constraint that fails when thinking has ended."""

    def forced(self) -> list[int]:
        return []

    def accept(self, token: int) -> bool:
        return True

    def validate(self, tokens: Sequence[int]) -> int:
        raise FormatTooComplex("grammar", "it is too complex")


class Watch:
    """Ends thinking after any token."""

    limits = ThinkingLimits(bridge=(1,))
    open = True

    def follow(self, tokens: Sequence[int]) -> bool:
        return True


class Chosen:
    """Rows 0 and 1, from which 5 and 6 are chosen."""

    def result(self, row: int) -> RowResult:
        return RowResult(5 + row, *NO_LOGPROBS, Status.OK, 0)


def test_a_constraint_that_fails_where_thoughts_end_fails_its_own_request() -> None:
    constraint, watch = cast("Constraint", Lost()), cast("ThinkingWatch", Watch())
    lost = Sampler(SamplingParams(), cast("Vocab", SmallVocab()), [1], constraint, watch)
    batch = Batch()
    for slot, one in enumerate((lost, sampler(SamplingParams()))):
        sequence = Request([1], 9, one)
        sequence.slot = slot
        batch.add(sequence, 1)
        batch.placements.append(Placement([slot], [slot]))
    rows = cast("Rows", Chosen())
    failed, good = sample(batch, rows, frozenset())
    assert isinstance(failed.error, FormatTooComplex)
    assert (failed.tokens, good.tokens) == ([], [6])
