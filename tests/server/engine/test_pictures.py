"""Prompts with pictures: answers equal those of a bare context, with other requests and with cached
states."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen_serve.llamacpp import Context, Model, layers
from qwen_serve.server.engine import Engine, GenerateRequest, InvalidPrompt, PromptTooLong, SamplingParams
from qwen_serve.server.engine.pictures import Layout, Picture, row_ids
from tests.contexts import exact_options
from tests.marks import slow_but
from tests.server.engine.helpers import EXACT, idle, random_prompt, running

N = 48
Part = list[int] | Picture


def copied(rng: random.Random) -> list[int]:
    """Repetitive text, whose drafts are often right."""
    return random_prompt(rng, 12) * 4


def picture(seed: int, columns: int, rows: int, n_embd: int = 256) -> Picture:
    """Rows of noise, of about the size of nano's embeddings, in a grid."""
    n = columns * rows
    noise = np.random.default_rng(seed).standard_normal((n, n_embd), np.float32) * np.float32(0.1)
    row, column = np.divmod(np.arange(n, dtype=np.int32), columns)
    still = np.zeros_like(row)
    positions = np.stack([still, row, column, still])
    return Picture(row_ids(f"{seed} {columns} {rows}".encode(), n), noise, positions, max(columns, rows))


def parts(seed: int, *shapes: tuple[int, int], text: int = 40) -> list[Part]:
    """A prompt of text, and of a picture and text for each shape."""
    rng = random.Random(seed)
    made: list[Part] = [random_prompt(rng, text)]
    for index, (columns, rows) in enumerate(shapes):
        made += [picture(100 * seed + index, columns, rows), random_prompt(rng, text)]
    return made


PROMPTS: list[list[Part]] = [
    parts(1, (4, 3)),
    parts(2, (9, 9), (3, 12)),
    parts(3),
    [picture(9, 6, 4), copied(random.Random(6)), picture(9, 6, 4), copied(random.Random(6))],  # one twice
    [picture(7, 12, 10), *parts(4, (1, 9))[0:1]],  # begins with one
    [
        *parts(5, (20, 25), text=20),
        picture(8, 5, 5),
        random_prompt(random.Random(9), 3),
    ],  # one behind another
]


class Bare:
    """The bare context: each run of text and each picture in a call of its own."""

    def __init__(self, path: Path) -> None:
        self.model = Model(path, n_gpu_layers=0)
        options = exact_options(n_ctx=4096, n_batch=1024, n_outputs=1)
        self.context = Context(self.model, options)
        self.eog = sorted(self.model.eog_ids)

    def greedy(self, prompt: list[Part], n: int) -> list[int]:
        answer: list[int] = []
        at, row = self.read(prompt)
        while len(answer) < n:
            row[self.eog] = -np.inf
            answer.append(int(row[: self.model.n_real].argmax()))
            at, row = self._read(answer[-1:], at)
        self.context.clear()
        return answer

    def read(self, prompt: list[Part]) -> tuple[int, npt.NDArray[np.float32]]:
        """(position after a prompt, logits of the next token)."""
        at, row = 0, np.zeros(0, np.float32)
        for part in prompt:
            at, row = self._read(part, at)
        return at, row

    def _read(self, part: Part, at: int) -> tuple[int, npt.NDArray[np.float32]]:
        context, n = self.context, len(part)
        context.sequences[:n] = 0
        context.outputs[:n] = 0
        if isinstance(part, Picture):
            context.embeddings[:n] = part.rows
            context.planes[:, :n] = part.positions + np.array([[at], [at], [at], [0]])
            context.decode(n, of_pictures=True)
            return at + part.n_pos, np.zeros(0, np.float32)
        context.tokens[:n] = part
        context.positions[:n] = np.arange(at, at + n)
        context.outputs[n - 1] = 1
        context.decode(n)
        return at + n, context.logits(1)[0].copy()

    def close(self) -> None:
        self.context.close()
        self.model.close()


@pytest.fixture(scope="module")
def alone(nano_f32: Path) -> list[list[int]]:
    bare = Bare(nano_f32)
    answers = [bare.greedy(prompt, N) for prompt in PROMPTS]
    other = [PROMPTS[0][0], picture(999, 4, 3), PROMPTS[0][2]]
    assert bare.greedy(other, N) != answers[0], "a picture that changes nothing would prove nothing"
    bare.close()
    return answers


async def ask(engine: Engine, prompt: list[Part], n: int = N, **changes: Any) -> tuple[list[int], int]:
    """(answer, number of cached prompt tokens)."""
    ids: list[int] = []
    pictures: list[tuple[int, Picture]] = []
    for part in prompt:
        if isinstance(part, Picture):
            pictures.append((len(ids), part))
        else:
            ids += part
    params = SamplingParams(ignore_eos=True, **changes)
    generation = engine.submit(GenerateRequest(engine.prompt(ids, pictures), params, n))
    tokens = [token async for new in generation for token in new]
    return tokens, generation.request.cached_tokens


MIXES: dict[str, dict[str, Any]] = {
    "all at once": {"parallel": 8, "ctx_size": 8192},
    "tiny chunks": {"parallel": 8, "ctx_size": 8192, "prefill_budget": 7, "ubatch_size": 16},
    "drafts from the text": {"parallel": 4, "ctx_size": 8192, "speculation": "ngram", "draft_always": True},
    "drafts of the head": {"parallel": 4, "ctx_size": 8192, "speculation": "mtp", "draft_always": True},
    "drafts of a model": {"parallel": 4, "ctx_size": 8192, "speculation": "draft", "draft_always": True},
    "sampled in the graph": {"parallel": 8, "ctx_size": 8192, "sampling": "device"},
}


@pytest.mark.parametrize("mix", slow_but(["drafts of the head", "drafts of a model"], MIXES))
async def test_together_as_alone(
    mix: str, nano_f32: Path, nano_draft_f32: Path, alone: list[list[int]]
) -> None:
    beside = {"draft_model": nano_draft_f32} if mix == "drafts of a model" else {}
    with running(nano_f32, **EXACT, **MIXES[mix], **beside) as engine:
        for _ in range(2):  # then from the prefix cache
            answers = await asyncio.gather(*(ask(engine, prompt) for prompt in PROMPTS))
            assert [tokens for tokens, _ in answers] == alone
        stats = engine.stats()
        if "drafts" in mix:
            assert sum(one.accepted for one in stats.drafts.values()) > 0


@pytest.mark.slow
async def test_a_draft_model_drafts_behind_pictures(
    nano_f32: Path, nano_draft_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them, behind one, and behind two with the prefix of the second prompt. Rows on the device are
    found by position, those on the host by index: the drafts are the same."""
    text, more = random_prompt(random.Random(1), 60), copied(random.Random(6))
    shown = picture(1, 16, 16)
    prompts: list[list[Part]] = [
        [text + more],
        [text, shown, more],
        [text, shown, more, picture(2, 4, 9), more],
    ]
    bare = Bare(nano_f32)
    expected = [bare.greedy(prompt, N) for prompt in prompts]
    bare.close()
    options: dict[str, Any] = {"speculation": "draft", "draft_always": True, "prefix_interval": 32}
    counts: list[list[tuple[int, int]]] = []
    for ring in (layers.HAS_RING, False):
        monkeypatch.setattr(layers, "HAS_RING", ring)
        counts.append([(0, 0)])
        with running(nano_f32, **EXACT, **options, draft_model=nano_draft_f32) as engine:
            for prompt, answer in zip(prompts * 2, expected * 2, strict=True):  # then from the prefix cache
                assert (await ask(engine, prompt))[0] == answer
                await idle(engine)
                drafts = engine.stats().drafts["dflash"]
                assert drafts.drafted > counts[-1][-1][0]
                assert drafts.accepted > counts[-1][-1][1]
                counts[-1].append((drafts.drafted, drafts.accepted))
            together = await asyncio.gather(*(ask(engine, prompt) for prompt in prompts))
            assert [tokens for tokens, _ in together] == expected
    assert counts[0] == counts[1]


async def test_a_preempted_one_reads_its_picture_again(nano_f32: Path) -> None:
    prompts: list[list[Part]] = [
        [random_prompt(random.Random(seed), 60), picture(seed, 9, 9), random_prompt(random.Random(-seed), 10)]
        for seed in (1, 2)
    ]
    bare = Bare(nano_f32)
    expected = [bare.greedy(prompt, 150) for prompt in prompts]
    bare.close()
    with running(nano_f32, **EXACT, ctx_size=512, parallel=2, speculation="off") as engine:
        answers = await asyncio.gather(*(ask(engine, prompt, 150) for prompt in prompts))
        assert engine.stats().preemptions > 0
    assert [tokens for tokens, _ in answers] == expected


async def test_a_second_question_reads_no_picture_again(nano_f32: Path) -> None:
    text, shown = random_prompt(random.Random(1), 30), picture(1, 16, 16)
    questions = [random_prompt(random.Random(seed), 20) for seed in (2, 3, 4)]
    bare = Bare(nano_f32)
    expected = [bare.greedy([text, shown, question], N) for question in questions]
    bare.close()
    with running(nano_f32, **EXACT, ctx_size=4096) as engine:
        for number, (question, answer) in enumerate(zip(questions, expected, strict=True)):
            tokens, cached = await ask(engine, [text, shown, question])
            assert tokens == answer
            assert cached == (len(text) + len(shown) if number else 0)
            await idle(engine)
        # the same text and another picture of that size
        _, cached = await ask(engine, [text, picture(2, 16, 16), questions[0]])
        assert cached <= len(text)


async def test_from_host_memory(nano_f32: Path) -> None:
    text, shown = random_prompt(random.Random(1), 30), picture(1, 16, 16)
    first, second = (random_prompt(random.Random(seed), 20) for seed in (2, 3))
    bare = Bare(nano_f32)
    expected = bare.greedy([text, shown, second], N)
    bare.close()
    with running(
        nano_f32, **EXACT, ctx_size=1024, parallel=1, prefix_host_mib=256, prefix_cells=400
    ) as engine:
        await ask(engine, [text, shown, first], 4)
        for seed in range(3):  # others push it out
            await ask(engine, [random_prompt(random.Random(50 + seed), 700)], 4)
            await idle(engine)
        tokens, cached = await ask(engine, [text, shown, second])
        assert cached == len(text) + len(shown)
        assert engine.stats().prefix.restores
        assert tokens == expected


async def test_across_a_restart(nano_f32: Path, tmp_path: Path) -> None:
    text, shown = random_prompt(random.Random(1), 30), picture(1, 16, 16)
    first, second = (random_prompt(random.Random(seed), 20) for seed in (2, 3))
    bare = Bare(nano_f32)
    expected = bare.greedy([text, shown, second], N)
    bare.close()
    options: dict[str, Any] = {**EXACT, "ctx_size": 1024, "prefix_file": tmp_path / "prefixes"}
    with running(nano_f32, **options) as engine:
        await ask(engine, [text, shown, first], 4)
    with running(nano_f32, **options) as engine:
        tokens, cached = await ask(engine, [text, shown, second])
    assert (tokens, cached) == (expected, len(text) + len(shown))


async def test_deterministic_answers_do_not_depend_on_company(nano_f32: Path) -> None:
    with running(nano_f32, deterministic=True, ctx_size=8192) as engine:
        alone = [await ask(engine, prompt, 24) for prompt in PROMPTS]
        together = await asyncio.gather(*(ask(engine, prompt, 24) for prompt in PROMPTS))
        assert any(cached for _, cached in together)
    with running(nano_f32, deterministic=True, ctx_size=8192) as engine:
        afresh = await asyncio.gather(*(ask(engine, prompt, 24) for prompt in reversed(PROMPTS)))
    answers = [tokens for tokens, _ in alone]
    assert [tokens for tokens, _ in together] == answers
    assert [tokens for tokens, _ in reversed(afresh)] == answers


async def test_penalties_know_no_rows(nano_f32: Path) -> None:
    with running(nano_f32, **EXACT) as engine:
        tokens, _ = await ask(engine, PROMPTS[1], repetition_penalty=1.3)
        assert len(tokens) == N


async def test_what_no_prompt_is(nano_f32: Path) -> None:
    shown = picture(1, 4, 3)
    with running(nano_f32, ctx_size=256) as engine:
        for index in (-1, 3, 4):  # nothing may end with a picture
            with pytest.raises(InvalidPrompt, match=f"a picture before token {index} of 3"):
                engine.prompt([300, 301, 302], [(index, shown)])
        with pytest.raises(InvalidPrompt, match="a picture before token 1 of 3"):
            engine.prompt([300, 301, 302], [(2, shown), (1, shown)])
        with pytest.raises(PromptTooLong):
            engine.prompt([300, 301, 302], [(1, picture(1, 20, 20))])
        with pytest.raises(InvalidPrompt, match="prompt_logprobs is for text"):
            await ask(engine, [[300, 301], shown, [302]], prompt_logprobs=1)


def test_where_tokens_stand() -> None:
    """Computed by hand: 5 tokens of text, 4 x 3 from position 5 on, 2 of text, 2 x 7, 1 of text."""
    layout = Layout([(5, picture(1, 4, 3)), (19, picture(2, 2, 7))])
    assert [layout.position(index) for index in (0, 4, 5, 17, 18, 19, 33, 40)] == [0, 4, 5, 9, 10, 11, 18, 25]
    assert [layout.run(index) for index in (0, 5, 16, 17, 19, 32, 33)] == [5, 17, 17, 19, 33, 33, None]
    assert layout.at(4) is None
    assert layout.at(17) is None
    first = layout.at(16)
    assert first is not None
    assert (first.start, first.position, first.end) == (5, 5, 17)
    assert layout.end == 33
    assert Layout().end == 0


def test_ids_of_rows_are_a_pictures_own() -> None:
    ids = row_ids(b"one", 1000)
    assert max(ids) < 0
    assert min(ids) >= -(2**31)
    assert len(set(ids)) > 990
    assert row_ids(b"one", 10) == ids[:10]
    assert not set(row_ids(b"two", 1000)) & set(ids)
