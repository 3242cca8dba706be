"""Log-probabilities of the fake model, in the shapes of the contract."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from tests.bench.fake_model import FakeVocabulary, logits_after

Entry = tuple[int, float, list[tuple[int, float]]]
"""A token, its log-probability, and the likeliest ones with theirs."""


def scores(vocabulary: FakeVocabulary, before: Sequence[int], tokens: Sequence[int], top: int) -> list[Entry]:
    """Of each of `tokens`, which follow the tokens `before`."""
    found = []
    for n, token in enumerate(tokens):
        logits = logits_after(vocabulary, [*before, *tokens[:n]])
        total = math.log(sum(map(math.exp, logits.values())))
        chances = {other: logit - total for other, logit in logits.items()}
        ranked = sorted(chances.items(), key=lambda item: -item[1])
        found.append((token, chances.get(token, -20.0), ranked[:top]))
    return found


def of_chat(vocabulary: FakeVocabulary, entries: list[Entry]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        text = vocabulary.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {**shown(token, logprob), "top_logprobs": [shown(*other) for other in top]}
        for token, logprob, top in entries
    ]
    return {"content": content, "refusal": None}


def of_text(
    vocabulary: FakeVocabulary, entries: list[Entry], start: int, prompt: list[Entry], *, as_ids: bool
) -> dict[str, Any]:
    """`choices[].logprobs` of a text completion; `start`: characters before its first token."""
    name: Callable[[int], str] = (
        (lambda token: f"token_id:{token}") if as_ids else lambda token: vocabulary.decode([token])
    )
    every = [*prompt, *entries]
    offsets = [start]
    for token, _, _ in every:
        offsets.append(offsets[-1] + len(vocabulary.decode([token])))
    logprobs: list[Any] = [logprob for _, logprob, _ in every]
    tops: list[Any] = [
        {name(one): chance for one, chance in [*top, (token, logprob)]} for token, logprob, top in every
    ]
    if prompt:
        logprobs[0] = tops[0] = None
    return {
        "tokens": [name(token) for token, _, _ in every],
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets[:-1],
    }


def of_prompt(vocabulary: FakeVocabulary, prompt: list[Entry]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`."""
    return [
        None,
        *(
            {
                str(one): {"logprob": chance, "rank": rank, "decoded_token": vocabulary.decode([one])}
                for rank, (one, chance) in enumerate([(token, logprob), *top], 1)
            }
            for token, logprob, top in prompt[1:]
        ),
    ]
