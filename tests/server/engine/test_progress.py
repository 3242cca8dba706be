"""Progress of reading a prompt, reported meanwhile."""

import asyncio
import random
from pathlib import Path

from qwen_serve.server.engine import GenerateRequest, Generation, SamplingParams
from tests.server.engine.helpers import EXACT, random_prompt, running, step_by_step
from tests.waiting import until

News = list[tuple[list[int], int]]
"""New tokens, and how much of the prompt has been read then."""


async def listen(generation: Generation, news: News) -> None:
    async for new in generation:
        news.append((new, generation.request.processed))


async def test_a_listener_is_told_while_a_prompt_is_read(nano_f32: Path) -> None:
    ids = random_prompt(random.Random(3), 400)
    with running(nano_f32, **{**EXACT, "batch_size": 64, "ubatch_size": 64}) as engine:
        for chunks in (5, 1):
            news: News = []
            with step_by_step(engine) as grant:
                asked = GenerateRequest(engine.prompt(ids), SamplingParams(), 4, reports_progress=True)
                generation = engine.submit(asked)
                listening = asyncio.create_task(listen(generation, news))
                grant(1)
                for n in range(chunks):  # each is told of while the next is read
                    grant(1)
                    await until(lambda: len(news) > n)  # noqa: B023
            await listening
            read = [processed for tokens, processed in news if not tokens]
            assert all(tokens for tokens, _ in news[len(read) :]), "nothing behind the first token"
            assert read == sorted(read)
            if chunks > 1:
                assert len(read) >= chunks
                assert read[chunks - 1] < len(ids)
                assert generation.request.cached_tokens == 0
            else:
                assert generation.request.cached_tokens > 0
        plain = [
            new async for new in engine.submit(GenerateRequest(engine.prompt(ids[::-1]), SamplingParams(), 4))
        ]
        assert all(plain), "nobody else is told"
