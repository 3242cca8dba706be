"""Neither the rest of a prompt nor its first token waits for drafters, which read the same rows later."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from qwen_serve.llamacpp import Context, Ring, layers
from qwen_serve.server.engine import Engine
from qwen_serve.server.engine.batch import Batch
from qwen_serve.server.engine.planning import contexts, plan
from qwen_serve.server.engine.request import Request, RequestStatus
from qwen_serve.server.engine.states import DeferredReads
from tests.marks import slow_but
from tests.server.engine.helpers import EXACT, Question, ask, ask_at_once, idle, random_prompt, running
from tests.server.engine.inside import held
from tests.server.engine.scheduling import NO_SAMPLER

WINDOW = 48
MIXES: dict[str, dict[str, Any]] = {
    "head": {"speculation": "mtp"},
    "drafter": {"speculation": "draft"},
    "drafter and head": {"speculation": "both"},
}
OPTIONS: dict[str, Any] = {"draft_always": True, "draft_max": 15, "draft_window": WINDOW}


def options(mix: str, draft: Path, parallel: int = 1) -> dict[str, Any]:
    beside = {} if mix == "head" else {"draft_model": draft}
    return {**EXACT, **OPTIONS, **MIXES[mix], **beside, "parallel": parallel}


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record events from now on: batches, waits for the trunk, drafters' reads, tokens that are sent."""
    events: list[str] = []

    def tell(owner: Any, name: str, say: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def told(*args: Any, **kwargs: Any) -> Any:
            if text := say(*args):
                events.append(text)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, told)

    context = engine.components.context
    tell(engine.components.runner, "launch", lambda batch, _: f"launch {batch.n_tokens}")
    steps = engine._step_loop  # noqa: SLF001 - when it sends tokens off is the subject
    tell(steps, "_flush", lambda: "tell" if engine._unsent else "")  # noqa: SLF001 - seen between two steps
    tell(context, "wait", lambda: "wait")
    tell(context, "hidden", lambda n: f"{n} rows")
    for drafter in engine.components.speculator.hidden_drafters:
        its: Any = drafter._context  # noqa: SLF001 - when it reads is the subject
        tell(its, "decode", lambda n: "read")
        tell(drafter, "collect", lambda *_: "collect")
        if drafter.layers:
            tell(its, "inject", lambda n: "read")
    return events


@pytest.mark.parametrize("mix", MIXES)
async def test_drafters_read_when_the_first_token_was_sent_off(
    mix: str, nano_f32: Path, nano_draft_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's checkpoint is before its last token, for which another batch is launched."""
    with running(nano_f32, **options(mix, nano_draft_f32)) as engine:
        engine.components.device_runs_alone = True
        events = watched(engine, monkeypatch)
        prompt = random_prompt(random.Random(1), 150)
        await ask(engine, Question(prompt, 8))
        assert events[:4] == ["launch 149", "launch 1", "tell", "wait"]
        assert {"collect", "read"} <= set(events[4:])
        await idle(engine)
        events.clear()
        await ask(engine, Question([*prompt, *random_prompt(random.Random(2), 90)], 1))
        await idle(engine)
        if mix == "head":
            assert events == ["launch 90", "launch 1"], "an answer of one token has no drafts"
        else:
            assert events[:3] == ["launch 90", "launch 1", "wait"]
            assert "collect" in events, "when there is nothing else to do"


@pytest.mark.parametrize("mix", MIXES)
async def test_what_would_be_written_over_is_read_before(
    mix: str, nano_f32: Path, nano_draft_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head needs all rows of a prompt that fits the window, including the first ones, which the next
    batch would overwrite."""
    with running(nano_f32, **options(mix, nano_draft_f32)) as engine:
        events = watched(engine, monkeypatch)
        await ask(engine, Question(random_prompt(random.Random(1), 30), 8))
        late = mix == "drafter" and engine.components.context.ring is not None
        assert events[:2] == ["launch 29", "launch 1" if late else "wait"]


async def test_a_head_that_drafts_for_one_is_not_waited_for_by_several(
    nano_f32: Path, nano_draft_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(4)
    with running(nano_f32, **options("drafter and head", nano_draft_f32, 3), draft_parallel=1) as engine:
        events = watched(engine, monkeypatch)
        await ask_at_once(engine, [Question(random_prompt(rng, 30), 8) for _ in range(3)])
        second = events.index("tell", events.index("tell") + 1)
        assert not [event for event in events[:second] if event.endswith("rows")]
        if engine.components.context.ring is not None:
            assert events[:3] == ["launch 87", "launch 3", "tell"]
        await idle(engine)
        events.clear()
        await ask(engine, Question(random_prompt(rng, 30), 8))
        assert [event for event in events if event.endswith("rows")]


READERS = [*((mix, n, True) for mix in MIXES for n in (1, 3)), ("drafter", 3, False)]


@pytest.mark.parametrize(("mix", "parallel", "ring"), slow_but([("drafter and head", 3, True)], READERS))
async def test_they_read_the_same_as_at_once(
    mix: str, parallel: int, ring: bool, nano_f32: Path, nano_draft_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts within a window and beyond, in one step and several, new, known, continued: equal drafts."""
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in (20, 60, 150, 300)]
    prompts += [[*prompt, *random_prompt(rng, more)] for prompt in prompts for more in (1, 25, 100)]
    prompts += prompts[2:6]
    for module in (layers, contexts, plan) if not ring else ():
        monkeypatch.setattr(module, "HAS_RING", False)
    steps: dict[str, Any] = {"batch_size": 128, "ubatch_size": 64, "prefill_budget": 100}
    found = []
    for at_once in (False, True):
        seen: list[Any] = []
        with (
            monkeypatch.context() as patch,
            running(
                nano_f32, **options(mix, nano_draft_f32, parallel), **steps, prefix_interval=40
            ) as engine,
        ):
            if at_once:
                patch.setattr(DeferredReads, "put_off", lambda self, read, batch_index=None: read())
            for drafter in engine.components.speculator.hidden_drafters:
                record(drafter, seen, patch)
            for start in range(0, len(prompts), parallel):
                requests = [Question(prompt, 12) for prompt in prompts[start : start + parallel]]
                answers = await ask_at_once(engine, requests)
                await idle(engine)
                seen.append(answers)
            queued = [Question([7, *prompt], 3) for prompt in prompts[1:4]]
            answers = await ask_at_once(engine, queued)  # each takes the slot of the one before
            await idle(engine)
            stats = engine.stats()
            for drafter in engine.components.speculator.hidden_drafters:
                saved = [drafter.save(node.seq_id or 0) for node in held(engine.components.cache)]
                seen += [one and (one.cache is None or one.cache.tobytes()) for one in saved]
        seen.append(answers)
        assert stats.prefix.hits > 5
        assert not any(counts.failed for counts in stats.drafts.values())
        found.append(seen)
    assert len(found[0]) > 40
    assert found[0] == found[1]


def record(drafter: Any, seen: list[Any], patch: pytest.MonkeyPatch) -> None:
    """The rows that it is given, and what it drafts."""
    collect, begin = drafter.collect, drafter.begin

    def collected(slot: int, start: int, rows: Any, most: int) -> None:
        seen.append((slot, start, rows.tobytes()))
        collect(slot, start, rows, most)

    def begun(requests: Any) -> Any:
        guesses = begin(requests)

        def read() -> list[list[int]]:
            tokens = guesses.read()
            seen.append(tokens)
            return tokens

        return replace(guesses, read=read)

    patch.setattr(drafter, "collect", collected)
    patch.setattr(drafter, "begin", begun)


# --- what is deferred --------------------------------------------------------------------------------------


class Trunk:
    """A context that records when it is waited for."""

    def __init__(self, ring: Ring | None) -> None:
        self.ring, self.waits = ring, 0

    def keeps_rows(self, place: int, n_tokens: int, n_rows: int) -> bool:
        return n_tokens <= place

    def wait(self) -> None:
        self.waits += 1


def a_batch(start: int, count: int, slot: int = 0, *, decodes: bool = False) -> Batch:
    batch, one = Batch(), Request([300] * (start + count), 9, NO_SAMPLER)
    one.slot, one.computed = slot, start
    one.status = RequestStatus.DECODE if decodes else RequestStatus.PREFILL
    batch.add(one, count)
    return batch


def test_calls_keep_their_order_and_nobody_waits_for_nothing() -> None:
    trunk, done = Trunk(None), list[str]()
    deferred = DeferredReads(cast("Context", trunk))
    deferred.in_turn(lambda: done.append("now"))
    deferred.clear_up()
    assert (done, trunk.waits, bool(deferred)) == (["now"], 0, False)
    deferred.put_off(lambda: done.append("read"), 20)
    deferred.in_turn(lambda: done.append("copied"))
    assert done == ["now"]
    deferred.clear_up()
    assert (done, trunk.waits, bool(deferred)) == (["now", "read", "copied"], 1, False)


def test_rows_on_the_host_stay_behind_a_shorter_batch() -> None:
    deferred = DeferredReads(cast("Context", Trunk(None)))
    assert not deferred.spoiled_by(a_batch(0, 100)), "there is nothing to spoil"
    deferred.put_off(lambda: None, 40)
    deferred.put_off(lambda: None, 20)
    assert not deferred.spoiled_by(a_batch(100, 20))
    assert deferred.spoiled_by(a_batch(100, 21))
    deferred.clear_up()
    assert not deferred.spoiled_by(a_batch(100, 21))


def test_a_copy_wants_a_window_of_the_ring() -> None:
    deferred = DeferredReads(cast("Context", Trunk(Ring(2, 64, 16))))
    deferred.copied(0, 10)  # at once: nothing was put off
    deferred.put_off(lambda: None)
    assert not deferred.spoiled_by(a_batch(100, 500)), "what a slot has not read yet it may lose"
    deferred.copied(0, 90)
    deferred.copied(0, 100)
    assert not deferred.spoiled_by(a_batch(100, 16, decodes=True))
    assert not deferred.spoiled_by(a_batch(115, 1, decodes=True))
    assert deferred.spoiled_by(a_batch(100, 17, decodes=True))
    assert not deferred.spoiled_by(a_batch(100, 500)), "of its prompt only the end is wanted"
    deferred.freed(0)
    assert deferred.spoiled_by(a_batch(100, 1)), "another sequence in the slot"
    assert not deferred.spoiled_by(a_batch(0, 500, slot=1))
    deferred.clear_up()
    assert not deferred.spoiled_by(a_batch(0, 500))
