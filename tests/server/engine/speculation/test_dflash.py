"""The block drafter: what it is worth, what it needs, when it is refused; test_exactness has the rest."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_serve.llamacpp import HAS_RING, layers
from qwen_serve.llamacpp.gguf import TensorInfo, read_header
from qwen_serve.server.engine import Engine, EngineSettings, ModelLoadError, SamplingParams
from qwen_serve.server.engine.planning import contexts, plan
from qwen_serve.server.engine.planning.spec import DraftSpec, ModelSpec
from qwen_serve.server.engine.speculation.base import Drafter
from tests import heldout
from tests.drafters import converted, some_tokens, with_own_vocabulary
from tests.marks import slow_but
from tests.server.engine.helpers import EXACT, Question, ask, ask_all, ask_at_once, running, settings
from tests.server.engine.inside import draft_states

ALONE: dict[str, Any] = {"speculation": "draft", "draft_always": True, "ctx_size": 8192}


def prompts(family: str, count: int) -> list[str]:
    shots, rows = heldout.read(heldout.SHOTS), heldout.read(family)
    found = []
    for row in rows[:: max(1, len(rows) // count)][:count]:
        messages = heldout.messages(row, family, shots)
        found.append(
            row["prompt"] if messages is None else heldout.prompt_text(messages, family == "reasoning")
        )
    return found


def accepted(engine: Engine) -> tuple[int, int]:
    counts = engine.stats().drafts["dflash"]
    return counts.accepted, counts.steps


@pytest.mark.parametrize(
    ("family", "least"),
    slow_but([("instructions", 5.0)], [("instructions", 5.0), ("reasoning", 5.0), ("continuation", 3.0)]),
)
async def test_blocks_are_right_in_good_part(
    family: str, least: float, nano_q4_k_m: Path, nano_draft_q4_k_m: Path
) -> None:
    with running(nano_q4_k_m, **ALONE, draft_model=nano_draft_q4_k_m) as engine:
        requests = [
            Question(engine.vocab.tokenize(text, special=True), 96, params=SamplingParams())
            for text in prompts(family, 6)
        ]
        await ask_all(engine, requests)
        tokens, blocks = accepted(engine)
    print(f"{family}: {tokens / blocks:.2f} a block")
    assert tokens / blocks > least


@pytest.mark.skipif(not HAS_RING, reason="a llama.cpp without layer-inputs-ring")
async def test_rows_that_stay_on_the_device_give_the_same_drafts(
    nano_f32: Path, nano_draft_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for ring in (True, False):
        for module in (layers, contexts, plan):
            monkeypatch.setattr(module, "HAS_RING", ring)
        with running(nano_f32, **ALONE, **EXACT, draft_model=nano_draft_f32, draft_window=48) as engine:
            assert (engine.components.context.ring is not None) == ring
            requests = [
                Question(engine.vocab.tokenize(text, special=True), 64, params=SamplingParams())
                for text in prompts("instructions", 2) + prompts("continuation", 2)
            ]
            answers = [await ask(engine, requests[0]), *await ask_at_once(engine, requests)]
            counts.append((answers, accepted(engine)))
    (with_ring, (right, blocks)), (without, (expected, passes)) = counts
    assert with_ring == without
    assert right / blocks == pytest.approx(expected / passes, rel=0.05)
    assert right > 100


async def test_a_cached_prompt_is_drafted_for_as_if_it_had_been_read(
    nano_q4_k_m: Path, nano_draft_q4_k_m: Path
) -> None:
    """The checkpoint shares what the drafter had of it."""
    with running(nano_q4_k_m, **ALONE, draft_model=nano_draft_q4_k_m) as engine:
        [text] = prompts("instructions", 1)
        request = Question(engine.vocab.tokenize(text, special=True), 96, params=SamplingParams())
        expected, first = await ask(engine, request), accepted(engine)
        assert (await ask(engine, request)) == expected
        second = accepted(engine)
        assert engine.stats().prefix.hits
        assert engine.stats().drafts["dflash"].unready <= 2
    assert (second[0] - first[0]) / (second[1] - first[1]) >= 0.8 * first[0] / first[1]


async def test_what_is_beyond_the_window_is_not_needed(nano_q4_k_m: Path, nano_draft_q4_k_m: Path) -> None:
    with running(nano_q4_k_m, **ALONE, draft_model=nano_draft_q4_k_m, draft_window=16) as engine:
        [text] = prompts("reasoning", 1)
        await ask(engine, Question(engine.vocab.tokenize(text * 8, special=True), 64))
        counts = engine.stats().drafts["dflash"]
        [drafter] = engine.components.states.hidden_drafters
        held = [state.end - state.first for state in draft_states(drafter).values()]
    assert counts.steps > 2
    assert not counts.failed
    assert max(held) <= 3 * 16


async def test_it_is_everything_that_a_drafter_can_be(nano_q4_k_m: Path, nano_draft_q4_k_m: Path) -> None:
    with running(nano_q4_k_m, **ALONE, draft_model=nano_draft_q4_k_m) as engine:
        [drafter] = engine.components.states.hidden_drafters
        its: Drafter = drafter  # type: ignore[assignment]
        assert (its.name, its.depth, its.most) == ("dflash", 15, 4)
        assert its.cost(1, 15) == its.cost(1, 1) > 0, "one pass, however deep"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculation": "draft"}, "needs draft_model"),
        ({"speculation": "off", "draft_model": Path("d.gguf")}, "no use with speculation 'off'"),
        ({"draft_window": 0}, "draft_window"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineSettings(model=Path("m.gguf"), **changes)


def test_another_kind_of_file_is_refused(nano_q4_k_m: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"draft_model: .*architecture 'qwen35'"):
        Engine(settings(nano_q4_k_m, draft_model=nano_q4_k_m))
    with pytest.raises(ModelLoadError, match=r"draft_model: .*does not exist"):
        Engine(settings(nano_q4_k_m, draft_model=tmp_path / "none.gguf"))


@pytest.mark.parametrize(
    ("metadata", "tensors", "said"),
    [
        ({"dflash.embedding_length": 512}, {}, "drafts for another model.*512"),
        ({"dflash.target_layers": (2, 8)}, {}, "drafts for another model.*it has 8"),
        ({"dflash.target_layers": None}, {}, "no usable dflash.target_layers .it is missing"),
        ({"tokenizer.ggml.mask_token_id": None}, {}, "no usable tokenizer.ggml.mask_token_id"),
        ({"dflash.block_size": 1}, {}, "no usable dflash.block_size .it is 1"),
        ({}, {"markov_w1.weight": 8}, "markov_w1.weight: a DFlash2 or DSpark"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    metadata: dict[str, Any],
    tensors: dict[str, int],
    said: str,
    nano_q4_k_m: Path,
    nano_draft_q4_k_m: Path,
) -> None:
    header = read_header(nano_draft_q4_k_m)
    target = ModelSpec.from_header(read_header(nano_q4_k_m))
    more = {name: TensorInfo(name, (size,), 0) for name, size in tensors.items()}
    changed = replace(header, metadata={**header.metadata, **metadata}, tensors={**header.tensors, **more})
    assert DraftSpec.from_header(header, target).layers == (2, 4, 7)
    with pytest.raises(ModelLoadError, match=said):
        DraftSpec.from_header(changed, target)


def test_a_drafter_for_another_vocabulary_is_refused(nano_q4_k_m: Path, nano_draft_q4_k_m: Path) -> None:
    header = read_header(nano_draft_q4_k_m, "draft_model")
    target = ModelSpec.from_header(read_header(nano_q4_k_m))
    assert target.n_vocab == 3712
    with pytest.raises(
        ModelLoadError, match=r"draft_model: .*vocabulary has 3,712 tokens, the model's 3,000"
    ):
        DraftSpec.from_header(header, replace(target, n_vocab=3000))


async def test_a_reduced_vocabulary_drafts_as_the_whole_does(
    nano_f32: Path, nano_draft_f32: Path, tmp_path: Path
) -> None:
    """With all tokens in another order, rows are the same and drafts must be, too."""
    tokens = np.random.default_rng(1).permutation(3712)
    found = []
    for draft in (nano_draft_f32, converted(with_own_vocabulary(tmp_path / "own", tokens))):
        with running(nano_f32, **ALONE, **EXACT, draft_model=draft) as engine:
            [text] = prompts("reasoning", 1)
            answer = await ask(engine, Question(engine.vocab.tokenize(text, special=True), 96))
            found.append((answer.tokens, accepted(engine)))
    assert found[0] == found[1]
    assert found[0][1][0] > 20


@pytest.mark.parametrize(
    ("table", "drop", "said"),
    [
        ([1, 2, 3], "output.weight", "no output.weight"),
        (None, "", "64-bit integers"),
        ([1, 2, 3712], "", "must be 0 to 3711, and are 1 to 3712"),
        ([-1, 2, 3], "", "are -1 to 3"),
        ([1, 2, 2], "", "a token twice"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    table: list[int] | None, drop: str, said: str, nano_q4_k_m: Path, nano_draft_own_f32: Path
) -> None:
    header = read_header(nano_draft_own_f32)
    target = ModelSpec.from_header(read_header(nano_q4_k_m))
    assert header.tables["d2t"].tolist() == some_tokens(2 / 3).tolist()
    assert DraftSpec.from_header(header, target).layers == (2, 4, 7)
    tensors = {name: tensor for name, tensor in header.tensors.items() if name != drop}
    tables = {} if table is None else {"d2t": np.array(table)}
    with pytest.raises(ModelLoadError, match=said):
        DraftSpec.from_header(replace(header, tensors=tensors, tables=tables), target)
