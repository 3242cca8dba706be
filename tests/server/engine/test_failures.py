"""A failure in optional work is counted and changes no answer."""

import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.server.api.observe.metrics import Metrics
from qwen_serve.server.engine import Engine
from tests.marks import slow_but
from tests.server.engine.helpers import (
    EXACT,
    Question,
    answers_alone,
    ask,
    ask_all,
    idle,
    random_prompt,
    running,
)
from tests.server.engine.inside import draft_by, drafters, policy
from tests.server.engine.speculation.test_exactness import Scripted

N = 40


def sometimes(function: Callable[..., Any], rng: random.Random, share: float = 0.2) -> Callable[..., Any]:
    """The same function, which sometimes fails as llama.cpp might."""

    def unreliable(*what: Any, **how: Any) -> Any:
        if rng.random() < share:
            raise LlamaError("no room for optional work")
        return function(*what, **how)

    return unreliable


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(21)
    stem = random_prompt(rng, 60)
    return [[*stem, *random_prompt(rng, 20 + 10 * n)] if n % 2 else random_prompt(rng, 80) for n in range(6)]


@pytest.fixture(scope="module")
def alone(nano_f32: Path, prompts: list[list[int]]) -> list[list[int]]:
    return answers_alone(nano_f32, prompts, N)


async def check(engine: Engine, prompts: list[list[int]], alone: list[list[int]], rounds: int = 3) -> None:
    """Check that answers, together and one by one, equal those of each request alone, and that the engine
    still runs."""
    requests = [Question(prompt, N) for prompt in prompts]
    for _ in range(rounds):
        assert [answer.tokens for answer in await ask_all(engine, requests)] == alone
        assert [(await ask(engine, request)).tokens for request in requests] == alone
    await idle(engine)
    assert engine.ready
    stats = engine.stats()
    assert stats.finished == {"length": 2 * rounds * len(prompts)}
    assert stats.kv_cells_used == stats.prefix.resident_cells


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["save", "restore"])
async def test_copies_of_checkpoints_to_the_host_and_back(
    broken: str,
    nano_f32: Path,
    prompts: list[list[int]],
    alone: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qwen_serve.server.engine.prefix_cache.cache.MIN_RESTORE", 32)
    host = {"prefix_checkpoints": 2, "prefix_host_mib": 8, "speculation": "both", "draft_always": True}
    with running(nano_f32, **EXACT, **host) as engine:
        context = engine.components.context
        monkeypatch.setattr(context, broken, sometimes(getattr(context, broken), random.Random(broken)))
        await check(engine, prompts, alone)
        stats = engine.stats().prefix
    assert stats.failed_copies > 0
    assert stats.restores > 0, "those that did not fail"


@pytest.mark.slow
@pytest.mark.parametrize("speculation", ["mtp", "draft"])
async def test_copies_of_what_a_drafter_has(
    speculation: str,
    nano_f32: Path,
    nano_draft_f32: Path,
    prompts: list[list[int]],
    alone: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qwen_serve.server.engine.prefix_cache.cache.MIN_RESTORE", 32)
    host = {"prefix_checkpoints": 2, "prefix_host_mib": 8, "speculation": speculation, "draft_always": True}
    beside = {"draft_model": nano_draft_f32} if speculation == "draft" else {}
    with running(nano_f32, **EXACT, **host, **beside) as engine:
        [head] = engine.components.states.hidden_drafters
        for name in ("copy", "save", "restore"):
            monkeypatch.setattr(head, name, sometimes(getattr(head, name), random.Random(name)))
        await check(engine, prompts, alone)


BROKEN = [("rollback", "ngram"), ("hidden", "mtp"), ("layer_inputs", "draft"), ("inject", "draft")]


@pytest.mark.parametrize(("broken", "speculation"), slow_but(BROKEN[:1], BROKEN))
async def test_drafts(
    broken: str,
    speculation: str,
    nano_f32: Path,
    nano_draft_f32: Path,
    prompts: list[list[int]],
    alone: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That can not be taken back, and hidden rows that are not there: again and again."""
    beside = {"draft_model": nano_draft_f32} if speculation == "draft" else {}
    with running(nano_f32, **EXACT, speculation=speculation, draft_always=True, **beside) as engine:
        parts = engine.components
        if speculation == "ngram":  # one that is often wrong
            texts = [prompt + answer for prompt, answer in zip(prompts, alone, strict=True)]
            draft_by(engine.components.speculator, Scripted(texts, broken))
        owner: Any = {
            "rollback": parts.states,
            "hidden": parts.context,
            "layer_inputs": parts.context,
            "inject": parts.draft and parts.draft[1],
        }[broken]
        monkeypatch.setattr(owner, broken, sometimes(getattr(owner, broken), random.Random(broken)))
        await check(engine, prompts, alone)
        counts = engine.stats().drafts["dflash" if speculation == "draft" else speculation]
    assert counts.failed > 0
    assert counts.accepted > 0, "those that did not fail"


METHODS = ["can_draft", "propose", "forget"]
OF_READERS = ["begin", "took", "collect", "rolled_back", "pause", "copy", "free", "save", "restore"]


CALLS = {"second": [1], "others": [0, 3, 13]}


def once(function: Callable[..., Any], index: int) -> Callable[..., Any]:
    """The same function, but its call of that index raises what nobody foresaw."""
    calls = count()

    def faulty(*what: Any, **how: Any) -> Any:
        if next(calls) == index:
            raise RuntimeError("a fault was injected")
        return function(*what, **how)

    return faulty


@pytest.mark.parametrize(
    ("calls", "speculation"),
    slow_but([("second", "ngram")], [(calls, by) for calls in CALLS for by in ("ngram", "mtp", "draft")]),
)
async def test_whatever_a_drafter_raises_at_whichever_call(
    calls: str,
    speculation: str,
    nano_f32: Path,
    nano_draft_f32: Path,
    prompts: list[list[int]],
    alone: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And whatever goes wrong around it: the answers are those without drafts, and the engine lives."""
    monkeypatch.setattr("qwen_serve.server.engine.prefix_cache.cache.MIN_RESTORE", 32)
    host = {"prefix_checkpoints": 2, "prefix_host_mib": 8, "speculation": speculation, "draft_always": True}
    beside = {"draft_model": nano_draft_f32} if speculation == "draft" else {}
    with running(nano_f32, **EXACT, **host, **beside) as engine:
        speculator, states = engine.components.speculator, engine.components.states
        if speculation == "ngram":
            texts = [prompt + answer for prompt, answer in zip(prompts, alone, strict=True)]
            draft_by(speculator, Scripted(texts, calls))
        drafter = drafters(speculator)[0]
        names = [name for name in METHODS + OF_READERS if hasattr(drafter, name)]
        faults: list[tuple[Any, str]] = [(drafter, name) for name in names]
        faults += [(policy(speculator), "choose"), (speculator, "_requests"), (speculator, "_learn")]
        faults += [(states, "checkpoint"), (states, "rollback")]
        for owner, name in faults:
            for index in CALLS[calls]:
                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, once(getattr(owner, name), index))
                    answers = await ask_all(engine, [Question(prompt, N // 2) for prompt in prompts[:2]])
                    answers.append(await ask(engine, Question(prompts[2], N // 2)))
                    await idle(engine)
                assert [answer.tokens for answer in answers] == [
                    expected[: N // 2] for expected in alone[:3]
                ], (name, index)
                assert engine.ready
        stats = engine.stats()
    [counts] = stats.drafts.values()
    assert counts.failed > len(faults) / 3, "not every case comes so often"
    assert counts.accepted > 0
    assert f'qwen_drafts_failed_total{{drafter="{next(iter(stats.drafts))}"}} {float(counts.failed)}' in (
        Metrics().render(stats).decode()
    )
    assert stats.kv_cells_used == stats.prefix.resident_cells
