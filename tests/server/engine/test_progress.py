"""Progress of reading a prompt, reported meanwhile."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from qwen_serve.server.engine import GenerateRequest, Generation, Progress, SamplingParams
from tests.server.engine.helpers import EXACT, random_prompt, running, step_by_step
from tests.waiting import until


class Recorded(Progress):
    """Remembers how it went: a listener that is late is told of several chunks at once."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "processed" and value:
            self.steps.append(value)


async def listen(generation: Generation, news: list[list[int]]) -> None:
    async for new in generation:
        news.append(new)  # noqa: PERF401 - each as it comes


async def test_a_listener_is_told_while_a_prompt_is_read(nano_f32: Path) -> None:
    ids = random_prompt(random.Random(3), 400)
    with running(nano_f32, **{**EXACT, "batch_size": 64, "ubatch_size": 64}) as engine:
        for again in (False, True):
            progress, news = Recorded(), list[list[int]]()
            with step_by_step(engine) as grant:
                generation = engine.submit(
                    GenerateRequest(engine.prompt(ids), SamplingParams(), 4, progress=progress)
                )
                listening = asyncio.create_task(listen(generation, news))
                grant(2)
                await until(lambda: news)  # noqa: B023
            await listening
            told = news.index(next(filter(None, news)))
            assert all(news[told:]), "nothing is told of the prompt behind the first token"
            if not again:
                assert told > 0
                assert progress.steps == sorted(set(progress.steps))
                assert len(progress.steps) >= 5
                assert progress.steps[-1] < len(ids)
                assert progress.cached == 0
            elif progress.steps:
                assert progress.cached > 0
        plain = [
            new async for new in engine.submit(GenerateRequest(engine.prompt(ids[::-1]), SamplingParams(), 4))
        ]
        assert all(plain), "nobody else is told"
