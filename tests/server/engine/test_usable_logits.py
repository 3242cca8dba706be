"""Logits that are not finite or all equal fail only the requests that get them."""

import asyncio
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from qwen_serve.llamacpp import model
from qwen_serve.server.engine import Engine, GenerateRequest, GenerationError, SamplingParams
from qwen_serve.server.engine.runner import Launched
from qwen_serve.server.engine.sampling.rows import Rows
from tests.marks import slow_but
from tests.server.engine.helpers import EXACT, Question, idle, random_prompt, running, submit
from tests.server.engine.launching import ahead
from tests.server.engine.test_any_kind_ahead import GRAMMAR, KINDS, of
from tests.waiting import until

PROMPT = [*range(300, 330)]
POISON = 400
"""A token whose embedding is not finite in one of the files."""

NORM = "output_norm.weight"
EMBEDDING = "token_embd.weight"


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may also be damaged in memory, after they were checked."""
    monkeypatch.setattr(model, "CHECK_TENSORS", False)


def spoilt(path: Path, to: Path, name: str, change: Callable[[npt.NDArray[Any]], object]) -> Path:
    """A copy of the model in which `change` modified the tensor of that name."""
    shutil.copy(path, to)
    reader = gguf.GGUFReader(to, "r+")
    [data] = [tensor.data for tensor in reader.tensors if tensor.name == name]
    change(data)
    reader.data.flush()
    return to


def put(value: float, rows: Any = slice(None)) -> Callable[[npt.NDArray[Any]], object]:
    def change(data: npt.NDArray[Any]) -> None:
        data[rows] = value

    return change


async def ask(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    generation = engine.submit(GenerateRequest(engine.prompt(prompt), params, 8))
    return [token async for tokens in generation for token in tokens]


PARAMS = {
    "greedy": SamplingParams(),
    "top_k": SamplingParams(temperature=1.0, seed=1, top_k=20),
    "row": SamplingParams(temperature=1.0, seed=1),
    "logprobs": SamplingParams(logprobs=2),
    "prompt logprobs": SamplingParams(prompt_logprobs=2),
    "penalties": SamplingParams(repetition_penalty=1.5),
    "biased": SamplingParams(logit_bias=((300, 5.0),)),
    "no end": SamplingParams(ignore_eos=True),
}


@pytest.fixture(scope="module", params=["nan", "inf", "zero"])
def broken(request: pytest.FixtureRequest, nano_f32: Path, tmp_path_factory: Any) -> Iterator[Path]:
    """`zero` is what NaN become where llama.cpp quantizes what goes into a product."""
    value = {"nan": np.nan, "inf": np.inf, "zero": 0.0}[request.param]
    folder = tmp_path_factory.mktemp("broken")
    yield spoilt(nano_f32, folder / "broken.gguf", NORM, put(value))
    shutil.rmtree(folder)


@pytest.mark.parametrize("sampling", slow_but(["device"], ["host", "device"]))
def test_every_way_to_choose_a_token_says_so(broken: Path, sampling: str) -> None:
    with running(broken, sampling=sampling, speculation="off", remember=False) as engine:
        for name, params in PARAMS.items():
            with pytest.raises(GenerationError, match=r"no usable logits .* weights are damaged"):
                asyncio.run(ask(engine, params))
                pytest.fail(name)


@pytest.mark.parametrize("speculation", ["ngram", "mtp"])
def test_verifications_too(broken: Path, speculation: str) -> None:
    options: dict[str, Any] = {"speculation": speculation, "draft_always": True, "remember": False}
    with running(broken, **options) as engine:
        for prompt in (PROMPT, PROMPT[:5] * 8):
            with pytest.raises(GenerationError, match="no usable logits"):
                asyncio.run(ask(engine, SamplingParams(), prompt))


def test_one_minus_infinity_is_enough(nano_f32: Path, tmp_path: Path) -> None:
    """The best token's logit is finite, another one's is not."""
    path = spoilt(nano_f32, tmp_path / "model.gguf", EMBEDDING, put(np.inf, (POISON, slice(0, 1))))
    with running(path, speculation="off", remember=False) as engine:
        for params in PARAMS.values():
            with pytest.raises(GenerationError, match="no usable logits"):
                asyncio.run(ask(engine, params))


async def test_it_costs_that_request_alone(nano_f32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests of the batch get the answers that they get alone."""
    with running(nano_f32, **EXACT) as engine:
        alone = await ask(engine, SamplingParams())
        collect = engine._runner.collect  # noqa: SLF001 - nothing else sees a step's rows

        def spoil(step: Launched) -> Rows | None:
            rows, batch = collect(step), step.batch
            for chunk, placement in zip(batch.chunks, batch.placements, strict=True):
                if POISON in chunk.sequence.tokens[:20]:
                    bad = FloatingPointError("the model computed no usable logits")
                    step.errors.update(dict.fromkeys(placement.rows, bad))
            return rows

        monkeypatch.setattr(engine._runner, "collect", spoil)  # noqa: SLF001 - the same
        prompts = (PROMPT, [*PROMPT[:10], POISON, *PROMPT[10:]], PROMPT)
        results = await asyncio.gather(
            *(ask(engine, SamplingParams(), prompt) for prompt in prompts), return_exceptions=True
        )
        assert [results[0], results[2]] == [alone, alone]
        assert isinstance(results[1], GenerationError)
        assert await ask(engine, SamplingParams()) == alone


@pytest.fixture(scope="module")
def poisonous(nano_f32: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """nano, but that a prompt with POISON has no finite logits, and leaves such keys and values. Others give
    the logits that they always gave: the output has the embedding's weights as they were."""
    reader = gguf.GGUFReader(nano_f32)
    path = tmp_path_factory.mktemp("poisonous") / "model.gguf"
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, *of = field.types
            writer.add_key_value(field.name, field.contents(), kind, sub_type=of[-1] if of else None)
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tensor.name == EMBEDDING:
            writer.add_tensor("output.weight", data.copy())
            data[POISON] = np.nan
        writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


BAD = [*PROMPT[:10], POISON, *range(330, 350)]


@pytest.mark.parametrize("speculation", slow_but(["mtp"], ["off", "mtp"]))
async def test_what_one_leaves_in_the_cache_spoils_nobody(poisonous: Path, speculation: str) -> None:
    """Neither those beside it nor those who get its cells: attention takes 0 times what is masked."""
    others = [[*range(start, start + 40)] for start in (300, 500, 600)]
    with running(poisonous, speculation=speculation, prefix_host_mib=8, remember=False, **EXACT) as engine:
        alone = [await ask(engine, SamplingParams(), prompt) for prompt in others]
        for _ in range(2):
            prompts = [others[0], BAD, others[1], [*BAD, 7], others[2], BAD]
            answers = await asyncio.gather(
                *(ask(engine, SamplingParams(), prompt) for prompt in prompts), return_exceptions=True
            )
            assert answers[::2] == alone
            for answer in answers[1::2]:
                assert isinstance(answer, GenerationError)
                assert "no usable logits" in str(answer)
        assert [await ask(engine, SamplingParams(), prompt) for prompt in others] == alone


BITS: dict[str, Any] = {"deterministic": True}
"""Log-probabilities are the same to the last bit."""


@pytest.mark.parametrize("more", slow_but([BITS], [BITS, {"speculation": "both", "draft_always": True}]))
async def test_many_of_every_kind_beside_them(poisonous: Path, more: dict[str, Any]) -> None:
    """Steps are launched ahead and rows are sampled on the device, as on a GPU: the bad ones in front of,
    between and behind those of others, in passes of 64 tokens, some with grammars or log-probabilities."""
    rng = random.Random(5)
    good = [Question(random_prompt(rng, 5 + 3 * i), 24, params=of(kind)) for i, kind in enumerate(KINDS)]
    good += [Question(random_prompt(rng, 20), 24, grammar=GRAMMAR) for _ in range(3)]
    bad = [Question([*BAD, *random_prompt(rng, i)], 24, params=one.params) for i, one in enumerate(good)]

    async def told(engine: Engine, one: Question) -> tuple[list[int], str]:
        await asyncio.sleep(one.delay)  # requests come when they come
        generation = submit(engine, one)
        tokens = [token async for new in generation for token in new]
        return tokens, repr(
            generation.request.logprobs and generation.request.logprobs.tokens
        ) if more is BITS else ""

    places = {"parallel": 16, "ctx_size": 16 * 512, "ubatch_size": 64, "remember": False}
    with ahead(poisonous, **places, prefix_cache=False, **more) as (engine, _):
        alone = [await told(engine, one) for one in good]
        for _ in range(2):
            sent = [(number, one) for kind in (good, bad) for number, one in enumerate(kind)]
            rng.shuffle(sent)
            for _, one in sent:
                one.delay = rng.random() / 2
            found = await asyncio.gather(*(told(engine, one) for _, one in sent), return_exceptions=True)
            for (number, one), answer in zip(sent, found, strict=True):
                if one is good[number]:
                    assert answer == alone[number], number
                else:
                    assert isinstance(answer, GenerationError), number
        await idle(engine)


async def test_what_a_cancelled_one_leaves_is_not_the_next_one_s_fault(poisonous: Path) -> None:
    """It went before it had logits by which anybody could have told."""
    with running(poisonous, speculation="off", remember=False, prefix_cache=False, **EXACT) as engine:
        alone = await ask(engine, SamplingParams())
        reading = engine.submit(GenerateRequest(engine.prompt([*BAD, *([300] * 1500)]), SamplingParams(), 8))
        await until(lambda: engine.stats().prompt_tokens > len(PROMPT))
        reading.cancel()
        assert await ask(engine, SamplingParams()) == alone
