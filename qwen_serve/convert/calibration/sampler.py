"""Batched sampling: continues many prompts at once, each with its own random stream."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from qwen_serve.llamacpp.evaluation import Batch, EvalContext
from qwen_serve.llamacpp.model import Model
from qwen_serve.llamacpp.probe import Floats

PARALLEL = 32
MIN_P = 0.02  # tokens less likely than this share of the likeliest are never drawn; temperature is 1


@dataclass
class Request:
    """A prompt to continue by at most `max_new` tokens; `seed` fixes what is drawn."""

    prompt: list[int]
    max_new: int
    seed: Sequence[int]
    generated: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)


def complete(
    model: Model,
    requests: Sequence[Request],
    on_finished: Callable[[Request], None],
    *,
    threads: int = 1,
) -> None:
    """Fills in every request's `generated`, including the end-of-generation token if one was drawn.

    At most `PARALLEL` sequences run at once; when one ends, the next begins. The draws depend only on the
    seeds and the model's logits, so the text is the same in every run on one machine.
    """
    room = max(len(r.prompt) + r.max_new for r in requests)
    n_seq = min(PARALLEL, len(requests))
    longest = max(len(r.prompt) for r in requests)
    banned = model.unused_tokens()
    waiting, free = deque(requests), list(range(n_seq))
    running: dict[int, Request] = {}
    with EvalContext(
        model, n_ctx=n_seq * room, n_batch=max(longest, n_seq), n_seq=n_seq, threads=threads
    ) as context:

        def accept(sequence: int, logits: Floats) -> None:
            request = running[sequence]
            logits[banned] = -np.inf
            token = _draw(logits, request.random)
            request.generated.append(token)
            if token in model.eog_ids or len(request.generated) == request.max_new:
                del running[sequence]
                free.append(sequence)
                on_finished(request)

        while waiting or running:
            while waiting and free:
                sequence, request = free.pop(), waiting.popleft()
                running[sequence] = request
                context.clear(sequence)
                batch, last = Batch(context), len(request.prompt) - 1
                for position, token in enumerate(request.prompt):
                    batch.add(token, position, sequence, output=position == last)
                context.decode(batch)
                accept(sequence, context.logits()[0])
            batch = Batch(context)
            order = sorted(running)
            for sequence in order:
                request = running[sequence]
                position = len(request.prompt) + len(request.generated) - 1
                batch.add(request.generated[-1], position, sequence, output=True)
            if order:
                context.decode(batch)
                for sequence, logits in zip(order, context.logits(), strict=True):
                    accept(sequence, logits)


def _draw(logits: Floats, random: np.random.Generator) -> int:
    """A token drawn at temperature 1 among those that pass min-p."""
    top = logits.max()
    candidates = np.flatnonzero(logits >= top + np.log(MIN_P))
    cumulative = np.cumsum(np.exp(logits[candidates].astype(np.float64) - top))
    return int(candidates[np.searchsorted(cumulative, random.random() * cumulative[-1], side="right")])
