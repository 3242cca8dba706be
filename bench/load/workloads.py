"""What a load is made of: independent prompts, questions behind shared prefixes, growing conversations.

Each is a list of jobs of ``requests`` requests in all. The same ``rng`` state makes the same jobs, but for a
text that is used up.
"""

import random

from bench.load.generator import Job
from bench.load.prompts import Prompts


async def single_prompts(prompts: Prompts, tokens: int, requests: int, rng: random.Random) -> list[Job]:
    """Unrelated prompts of ``tokens`` each: the hackathon's where they are random tokens."""
    return [Job((await prompts.make(tokens, rng),), chat=False) for _ in range(requests)]


async def shared_prefixes(
    prompts: Prompts, tokens: int, requests: int, rng: random.Random, *, prefix_tokens: int, prefixes: int
) -> list[Job]:
    """As few-shot benchmarks send it: a long prefix per subject, distinct questions, subject by subject."""
    count = min(prefixes, requests)
    texts = [await prompts.make(prefix_tokens, rng) for _ in range(count)]
    questions = [await prompts.make(tokens, rng) for _ in range(requests)]
    return [
        Job((f"{texts[index * count // requests]}\n\n{question}",), chat=True)
        for index, question in enumerate(questions)
    ]


async def conversations(
    prompts: Prompts, tokens: int, requests: int, rng: random.Random, *, turns: int, clients: int
) -> list[Job]:
    """Whole conversations of several turns, at least one a client."""
    count = max(-(-requests // turns), clients)
    return [
        Job(tuple([await prompts.make(tokens, rng) for _ in range(turns)]), chat=True) for _ in range(count)
    ]
