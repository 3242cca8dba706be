"""A failure in a drafter costs only its drafts, is counted, and is logged once."""

import logging
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest

from qwen_serve.llamacpp.errors import LlamaError, NoMemorySlot
from qwen_serve.server.engine.batch import Batch
from qwen_serve.server.engine.speculation.health import DISABLED_AFTER, DISABLED_FIRST
from tests.server.engine.speculation.card import World, on_h200

ERRORS = [
    LlamaError("llama_decode returned -3"),
    NoMemorySlot("full"),
    FloatingPointError("NaN"),
    KeyError(1),
]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_costs_that_draft(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    world = on_h200()
    world.gain(20)
    drafts = world.speculator.stats()["mtp"].steps
    world.head.error = error
    assert world.step() == 0
    world.head.error = None
    assert world.gain(20) > 2
    stats = world.speculator.stats()["mtp"]
    assert (stats.failed, stats.state) == (1, "active")
    assert stats.steps > drafts
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "mtp" in record.message


def test_a_drafter_that_goes_on_failing_is_disabled_for_a_while_and_that_is_seen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = on_h200()
    world.head.error = LlamaError("no")
    assert world.gain(200) > 0.98
    stats = world.speculator.stats()["mtp"]
    assert (stats.failed, stats.state, stats.steps) == (DISABLED_AFTER, "failed", 0)
    world.gain(20 * DISABLED_FIRST)
    stats = world.speculator.stats()["mtp"]
    assert DISABLED_AFTER < stats.failed < DISABLED_AFTER + 5, "now and then"
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    world.head.error = None
    for _ in range(64):
        world.gain(DISABLED_FIRST)
        if world.speculator.stats()["mtp"].state == "active":
            break
    assert world.speculator.stats()["mtp"].state == "active"
    assert world.gain(100) > 3


def test_a_failing_drafter_leaves_the_other_alone() -> None:
    world = World(ngram=True)
    world.ngram.propose = Mock(side_effect=ValueError("broken"))  # type: ignore[method-assign]
    for _ in range(50):
        world.propose()
        world.speculator.abandon()
    assert world.gain(100) > 2
    stats = world.speculator.stats()
    assert stats["ngram"].state == "failed"
    assert stats["ngram"].failed < 10
    assert stats["mtp"].state == "active"


def test_without_a_checkpoint_nothing_is_drafted() -> None:
    world = on_h200()
    world.states.checkpoint = Mock(side_effect=LlamaError("no buffer"))  # type: ignore[method-assign]
    assert world.step() == 0
    assert world.speculator.stats()["mtp"].failed == 1


def test_a_rollback_that_fails_has_the_sequence_read_again() -> None:
    world = on_h200(snapshots=0)
    world.head.right = 0.0
    world.states.rollback = Mock(side_effect=LlamaError("no"))  # type: ignore[method-assign]
    while not world.step():
        pass
    assert world.states.freed == [0]
    [one] = world.sequences
    assert one.computed == 0
    assert world.speculator.stats()["mtp"].failed == 1


def test_hidden_rows_that_cannot_be_had_cost_no_step() -> None:
    world = on_h200()
    world.card.hidden = Mock(side_effect=LlamaError("no"))  # type: ignore[method-assign]
    world.gain(10)
    assert world.speculator.stats()["mtp"].failed > 0


def test_a_head_that_never_has_what_it_reads_is_seen() -> None:
    world = on_h200()
    world.head.can_draft = lambda request: False  # type: ignore[method-assign]
    assert world.gain(50) > 0.98
    stats = world.speculator.stats()["mtp"]
    assert stats.steps == 0
    assert stats.unready == 50


def test_a_head_that_does_not_pay_is_seen_to_cool_down() -> None:
    world = on_h200()
    world.head.right = 0.0
    world.gain(100)
    assert world.speculator.stats()["mtp"].state == "cooldown"


def test_a_batch_that_was_not_computed_leaves_nothing_behind() -> None:
    world = on_h200()
    world.gain(30)
    before = world.speculator.stats()["mtp"].steps
    batch: Batch = world.propose()
    assert batch.chunks[0].draft
    world.speculator.abandon()
    assert world.speculator.stats()["mtp"].steps == before
    assert world.gain(30) > 2


def test_a_measurement_that_fails_is_counted_and_no_more() -> None:
    world = on_h200()
    world.head.measure = Mock(side_effect=LlamaError("no"))  # type: ignore[method-assign]
    world.speculator.measure(world.rehearse, 0.1)
    assert world.speculator.stats()["mtp"].failed == 1
    assert world.gain(50) > 2


def test_what_was_published_does_not_change() -> None:
    """Other threads read it while the engine's thread adds to it."""
    world = on_h200()
    world.gain(20)
    before = world.speculator.stats()
    steps = before["mtp"].steps
    assert world.speculator.stats() is before, "nothing is worked out for who asks"
    world.gain(20)
    assert before["mtp"].steps == steps
    assert world.speculator.stats()["mtp"].steps > steps


@pytest.mark.parametrize(
    "method", ["can_draft", "begin", "cost", "took", "collect", "rolled_back", "pause", "forget"]
)
def test_whatever_a_head_raises_costs_drafts_alone(method: str) -> None:
    for index in range(30):
        world = on_h200(snapshots=0)
        world.head.right = 0.5
        calls, original = count(), getattr(world.head, method)

        def faulty(*what: Any) -> Any:
            if next(calls) == index:  # noqa: B023
                raise RuntimeError("a fault was injected")
            return original(*what)  # noqa: B023

        setattr(world.head, method, faulty)
        world.gain(50)
        world.admit(0)
        world.gain(20)
        assert world.tokens >= 70, "a token a step, at least"
        came = next(calls) > index
        assert world.speculator.stats()["mtp"].failed == came
        if not came:
            break
