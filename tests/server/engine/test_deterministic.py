"""`deterministic`: an answer does not depend on other requests, even in a quantized model.

That it does depend on it otherwise, and with every kind of draft, is in tests/server/test_answers.py.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen_serve.llamacpp import HAS_BATCH_INVARIANCE
from qwen_serve.server.engine import Engine, SamplingParams, SchedulingParams
from qwen_serve.server.engine.reproducible import Reproducible, rows_are_the_same
from qwen_serve.server.engine.request import Request
from tests.marks import slow_but
from tests.server.engine.helpers import Question, ask, ask_all, idle, random_prompt, running, told
from tests.server.engine.scheduling import NO_SAMPLER

INVARIANT = pytest.mark.skipif(not HAS_BATCH_INVARIANCE, reason="llama.cpp is built without batch-invariant")

MODES: dict[str, dict[str, Any]] = {
    "as it is": {"threads": 2},
    "flash attention": {"threads": 2, "flash_attn": "on"},
    "host": {"prefix_checkpoints": 2, "prefix_host_mib": 8, "prefix_interval": 128},
    "rows by themselves": {},
    "chunks": {"prefill_budget": 128},
    "in the graph": {"sampling": "device"},
}


def requests(rng: random.Random) -> list[Question]:
    """Prompts that share beginnings, repeat, and go on from others; greedy and seeded."""
    stems = [random_prompt(rng, 300), random_prompt(rng, 140)]
    asked = [Question([*rng.choice(stems), *random_prompt(rng, rng.randint(1, 200))], 30) for _ in range(8)]
    asked += [Question(random_prompt(rng, length), 30) for length in (1, 2, 128, 129, 130, 257)]
    asked += [Question(list(stem), 40) for stem in stems]
    seeded = SamplingParams(temperature=1.0, top_k=20, seed=7, ignore_eos=True)
    asked += [Question(random_prompt(rng, 90), 30, params=seeded) for _ in range(2)]
    return asked


async def answers_in_company(engine: Engine, asked: list[Question], rng: random.Random) -> list[list[int]]:
    shuffled = rng.sample(range(len(asked)), len(asked))
    late = [
        Question(asked[i].prompt, asked[i].max_tokens, rng.uniform(0, 0.6), params=asked[i].params)
        for i in shuffled
    ]
    noise = [
        Question(
            random_prompt(rng, rng.randint(1, 400)), 60, rng.uniform(0, 0.6), cancel_after=rng.randint(1, 30)
        )
        for _ in range(6)
    ]
    found = await ask_all(engine, [*late, *noise])
    answers: list[list[int]] = [[] for _ in asked]
    for i, answer in zip(shuffled, found, strict=False):
        answers[i] = answer.tokens
    return answers


@pytest.mark.parametrize("mode", slow_but(["host"], MODES))
async def test_an_answer_is_the_same_in_any_company(
    mode: str, nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(mode)
    asked = requests(rng)
    if mode == "rows by themselves":
        monkeypatch.setattr("qwen_serve.server.engine.reproducible.rows_are_the_same", lambda *_: False)
    if mode == "host":
        monkeypatch.setattr("qwen_serve.server.engine.prefix_cache.cache.MIN_RESTORE", 64)
    options = {"deterministic": True, "parallel": 6, "ctx_size": 6 * 1024, **MODES[mode]}
    with running(nano_q4_k_m, **options, prefix_cache=False) as engine:
        alone = [(await ask(engine, request)).tokens for request in asked]
    with running(nano_q4_k_m, **options) as engine:
        for _ in range(2):
            assert await answers_in_company(engine, asked, rng) == alone
        await idle(engine)
        stats = engine.stats()
        assert stats.prefix.hits > 0
        assert stats.preemptions == 0
        assert stats.kv_cells_used == stats.prefix.resident_cells
        if mode == "host":
            assert stats.prefix.restores > 0


CYRILLIC = "start: /[\u0430-\u044f]{10,16}/"
"""Tokens that are rarely among a row's best, so that whole rows are fetched from the device."""

CONSTRAINED: dict[str, dict[str, Any]] = {
    "cut anywhere": {},
    "chunks": {"prefill_budget": 512},
    "rows by themselves": {},
}


@INVARIANT
@pytest.mark.parametrize("mode", slow_but(["chunks"], CONSTRAINED))
async def test_a_fetched_row_is_the_request_s_own(
    mode: str, nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes with free slots between their sequences, and prompts of other lengths, come in another order
    than the batch. None is computed again, since its tokens would be read in passes of other lengths."""
    rng = random.Random(mode)
    if mode == "rows by themselves":
        monkeypatch.setattr("qwen_serve.server.engine.reproducible.rows_are_the_same", lambda *_: False)
    asked = [
        Question(
            random_prompt(rng, 20 + 4 * i),
            24,
            rng.uniform(0, 0.4),
            params=SamplingParams() if i % 2 else SamplingParams(ignore_eos=True),
            grammar=CYRILLIC if i % 2 else None,
        )
        for i in range(16)
    ]
    how = {"deterministic": True, "parallel": 8, "ctx_size": 8 * 512, "sampling": "device"}
    with running(nano_q4_k_m, **how, **CONSTRAINED[mode], speculation="off", prefix_cache=False) as engine:
        alone = [await ask(engine, replace(request, delay=0)) for request in asked]
        together = await ask_all(engine, asked)
        assert together == alone
        again = await ask_all(engine, [replace(one, delay=rng.uniform(0, 0.4)) for one in asked])
        assert again == alone
        assert engine.stats().preemptions == 0


@INVARIANT
@pytest.mark.parametrize(("chunk", "again", "next_turn"), [(0, 1, 1 + 30), (128, 400 - 384, 450 - 384)])
async def test_what_is_read_once_more(chunk: int, again: int, next_turn: int, nano_q4_k_m: Path) -> None:
    """Of the same prompt, and of one that goes on from the answer: from the last cut on, where there are
    cuts."""
    with running(nano_q4_k_m, deterministic=True, prefill_budget=chunk) as engine:
        reproducible = engine.components.scheduler.reproducible
        assert reproducible is not None
        assert reproducible.chunk == (chunk or 1)
        prompt = random_prompt(random.Random(1), 400)
        first = await ask(engine, Question(prompt, 20))
        for asked, read in (
            (prompt, again),
            ([*prompt, *first.tokens, *random_prompt(random.Random(2), 30)], next_turn),
        ):
            before = engine.stats().prompt_tokens
            answer = await ask(engine, Question(asked, 20))
            assert engine.stats().prompt_tokens - before == read
            assert asked is not prompt or answer == first


async def test_log_probabilities_of_a_prompt_that_is_cut_at_fixed_places(nano_q4_k_m: Path) -> None:
    """Its passes have fewer rows than a whole chunk has tokens, so its state is of no use to others."""
    prompt = random_prompt(random.Random(1), 300)
    plain = Question(prompt, 8)
    scored = Question(prompt, 8, params=SamplingParams(ignore_eos=True, prompt_logprobs=0, logprobs=0))
    with running(nano_q4_k_m, deterministic=True, prefill_budget=128) as engine:
        alone, *others = await told(engine, scored), await ask(engine, plain)
    with running(nano_q4_k_m, deterministic=True, prefill_budget=128) as engine:
        together = await asyncio.gather(told(engine, scored), told(engine, scored), ask(engine, plain))
    assert [*together] == [alone, alone, *others]


async def test_the_first_prompt_is_no_longer_than_a_sequence(
    nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it has a whole ubatch, for which a sequence with cells of its own may have no room."""
    monkeypatch.setattr("qwen_serve.server.engine.loading.WARM_UP_TOKENS_CPU", 512)
    with running(nano_q4_k_m, deterministic=True, parallel=4, ctx_size=4 * 256) as engine:
        assert (await ask(engine, Question(random_prompt(random.Random(1), 20), 4))).tokens


async def test_steps_shorter_than_the_text_of_the_comparison(nano_q4_k_m: Path) -> None:
    small: dict[str, Any] = {"batch_size": 32, "ubatch_size": 16, "parallel": 2, "ctx_size": 512}
    with running(nano_q4_k_m, deterministic=True, **small) as engine:
        assert (await ask(engine, Question(random_prompt(random.Random(1), 20), 4))).tokens


class MadeUpContext:
    """Rows that depend on their token, and, for those that `differs` names, on how many are computed."""

    n_batch = n_ubatch = n_ctx_seq = 256

    def __init__(self, differs: Callable[[int, int], bool]) -> None:
        self.tokens, self.positions, self.sequences, self.outputs = (np.zeros(256, int) for _ in range(4))
        self._differs = differs
        self._rows = np.zeros((0, 2), np.float32)

    def clear(self) -> None:
        pass

    def decode(self, n: int) -> None:
        tokens = self.tokens[:n].tolist()
        self._rows = np.array([[token, self._differs(token, n)] for token in tokens], np.float32)

    def logits(self, n: int) -> npt.NDArray[np.float32]:
        return self._rows[:n]


@pytest.mark.parametrize(
    ("differs", "same"),
    [
        (lambda _token, _n: False, True),
        (lambda _token, n: n == 6, False),
        (lambda token, n: n >= 4 and token % 5 == 3, False),  # most rows agree by chance
    ],
)
def test_rows_that_differ_now_and_then_are_found(differs: Callable[[int, int], bool], same: bool) -> None:
    context: Any = MadeUpContext(differs)
    assert rows_are_the_same(context, range(2, 7)) is same


@INVARIANT
@pytest.mark.slow
def test_rows_of_experts_are_computed_together(nano_moe_q4_k_m: Path) -> None:
    with running(nano_moe_q4_k_m, deterministic=True) as engine:
        assert engine.components.plan.spec.has_experts
        assert engine.components.scheduler.reproducible == Reproducible(1, 64)


def test_what_holds_is_said_at_the_start() -> None:
    alone = Reproducible(512, 64, alone=True)
    assert alone.told(drafts=True, experts=True).startswith("rows of a model with experts depend on how many")
    assert "nothing is drafted" in alone.told(drafts=True, experts=False)
    assert "every 512, whole chunks of them are read 4 at once" in Reproducible(512, 64, 4).told(
        drafts=False, experts=False
    )
    assert Reproducible(1, 64).told(drafts=True, experts=True).endswith("prompts wherever they are cut")


@INVARIANT
@pytest.mark.parametrize(("speculation", "alone"), [("off", False), ("ngram", True)])
def test_passes_of_several_tokens_that_differ_are_not_used(
    speculation: str, alone: bool, nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def several_differ(_: object, counts: object, lengths: object = ()) -> bool:
        return not lengths

    monkeypatch.setattr("qwen_serve.server.engine.reproducible.rows_are_the_same", several_differ)
    with running(nano_q4_k_m, deterministic=True, speculation=speculation) as engine:
        found = engine.components.scheduler.reproducible
    assert found is not None
    assert (found.chunk, found.alone) == (128, alone)
    one, other = (Request([0], 1, NO_SAMPLER) for _ in range(2))
    assert found.group(one, {one: 5, other: 6}, 512) == [one]


def with_drafts(rng: random.Random) -> list[Question]:
    """Requests with repetitive texts, so that there are drafts: greedy, seeded, and with a grammar."""
    asked: list[Question] = []
    for length in (5, 40, 128, 150, 260):
        text = random_prompt(rng, length) * 2
        greedy = SamplingParams(ignore_eos=True, logprobs=2)
        seeded = SamplingParams(temperature=0.7, top_k=20, seed=length, ignore_eos=True, logprobs=2)
        asked += [Question(text, 24, params=params) for params in (greedy, seeded)]
    asked.append(
        Question(
            random_prompt(rng, 50),
            24,
            params=SamplingParams(temperature=1.0, seed=3, logprobs=2),
            grammar="start: /[a-z ]{20,40}/",
        )
    )
    return asked


DRAFTS: dict[str, dict[str, Any]] = {
    "from the text": {"speculation": "ngram"},
    "the head's": {"speculation": "mtp"},
    "from copies": {"speculation": "mtp", "snapshots": 0},
    "short ones": {"speculation": "both", "mtp_depth": 6, "draft_max": 8, "snapshots": 8},
}
"""Where a sequence decodes alone, short ones are rolled back to a snapshot, long ones to a copy."""


@INVARIANT
@pytest.mark.parametrize("drafts", slow_but(["from the text"], DRAFTS))
async def test_drafts_and_company_change_no_bit(drafts: str, nano_q4_k_m: Path) -> None:
    rng = random.Random("ngram")
    asked = with_drafts(rng)
    options: dict[str, Any] = {"deterministic": True, "parallel": 5, "ctx_size": 5 * 1024}
    with running(nano_q4_k_m, **options, speculation="off", prefix_cache=False) as engine:
        alone = [await told(engine, request) for request in asked]
    with running(nano_q4_k_m, **options, **DRAFTS[drafts], draft_always=True) as engine:
        reproducible = engine.components.scheduler.reproducible
        assert reproducible is not None
        assert not reproducible.alone
        usual = 0 if drafts == "from the text" else 8
        assert engine.components.context.n_snapshots == DRAFTS[drafts].get("snapshots", usual)
        for apart in (0.0, 0.5):
            late = [replace(request, delay=rng.uniform(0, apart)) for request in asked]
            leaving = [Question(random_prompt(rng, 90), 40, rng.uniform(0, apart), cancel_after=7)] * 2
            found = await asyncio.gather(
                *(told(engine, request) for request in late), *(ask(engine, request) for request in leaving)
            )
            assert found[: len(asked)] == alone
        if drafts != "from the text":
            assert [await told(engine, request) for request in asked] == alone
        stats = engine.stats().drafts.values()
        assert sum(each.drafted for each in stats) > sum(each.accepted for each in stats) > 0


def conversations(rng: random.Random, known: list[list[int]]) -> list[Question]:
    """Up to five at once: new, again, or going on from a part of what was read or written; some leave."""
    asked: list[Question] = []
    for _ in range(rng.randint(1, 5)):
        base = rng.choice(known) if known and rng.random() < 0.8 else []
        kept = base[: rng.choice((len(base), rng.randint(0, len(base))))]
        prompt = [*kept, *random_prompt(rng, rng.choice((1, 3, 20, 70, 150)))][:900]
        params = SamplingParams(ignore_eos=True, logprobs=2)
        if rng.random() < 0.4:
            params = replace(params, temperature=1.0, top_k=30, seed=rng.randint(0, 9))
        asked.append(
            Question(
                prompt,
                rng.randint(1, 40),
                rng.uniform(0, 0.1),
                cancel_after=rng.randint(1, 20) if rng.random() < 0.15 else None,
                params=params,
                scheduling=SchedulingParams(priority=rng.randint(0, 2)),
            )
        )
    return asked


KEPT: dict[str, dict[str, Any]] = {
    "anywhere": {},
    "in turns": {"parallel": 2, "scheduling_policy": "priority"},
    "host": {"prefix_checkpoints": 2, "prefix_host_mib": 8},
    "chunks": {"prefill_budget": 128},
}


@INVARIANT
@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT)
async def test_a_kept_state_has_the_bits_of_a_fresh_prefill(
    kept: str, nano_q4_k_m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever kept it: a prompt that was read in some company, an answer, or one that was put off."""
    if kept == "host":
        monkeypatch.setattr("qwen_serve.server.engine.prefix_cache.cache.MIN_RESTORE", 64)
    rng = random.Random(kept)
    options: dict[str, Any] = {"deterministic": True, "parallel": 5, **KEPT[kept]}
    options["ctx_size"] = 1024 * options["parallel"]
    asked: list[Question] = []
    found: list[tuple[list[int], str]] = []
    with running(nano_q4_k_m, **options, speculation="ngram", draft_always=True) as engine:
        known: list[list[int]] = []
        for turn in range(60):  # how often a request is preempted depends on the machine's speed
            if turn > 10 and (kept != "in turns" or engine.stats().preemptions > 0):
                break
            now = conversations(rng, known)
            told_now = await asyncio.gather(*(told(engine, request) for request in now))
            for request, (tokens, logprobs) in zip(now, told_now, strict=True):
                known.append([*request.prompt, *tokens])
                if request.cancel_after is None:
                    asked.append(request)
                    found.append((tokens, logprobs))
        stats = engine.stats()
        assert stats.prefix.hits > 2
        assert kept == "chunks" or stats.prefix.evictions > 0
        if kept == "in turns":
            assert stats.preemptions > 0
        if kept == "host":
            assert stats.prefix.restores > 0
    with running(nano_q4_k_m, **options, speculation="off", prefix_cache=False) as engine:
        for request, before in zip(asked, found, strict=True):
            assert await told(engine, replace(request, delay=0.0)) == before
