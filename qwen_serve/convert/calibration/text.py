"""Writes calibration and evaluation text: prompts with the model's own answers.

What is fitted to the model's own text alone holds worse on text of other kinds. So calibration text goes on
with `mixture.txt`, code and data in 20 languages (no Python) and some prose, and with pseudo-random tokens:
half of them are the text's own in another order, half are drawn from the whole vocabulary. A search reads the
documents of the mixture that calibration does not.
"""

from pathlib import Path
from typing import Final

import numpy as np

from qwen_serve.convert.calibration.prompts import SEARCH_STEP, ChatTemplate, Purpose, load_prompts
from qwen_serve.convert.calibration.sampler import Request, complete
from qwen_serve.convert.progress import Progress
from qwen_serve.llamacpp.evaluation import Runtime
from qwen_serve.llamacpp.model import Model

TEXT_VERSION = 3
"""Raise it when the same model would write different text, because of other prompts, sampler or lengths."""

MIXTURE = Path(__file__).with_name("mixture.txt")

# 64 chunks of 512 tokens, and one more for the incomplete last chunk; half of a search's 8 are of the mixture
MIN_TOKENS = {"calibration": 65 * 512, "search": 4 * 512, "evaluation": 65 * 512}
RANDOM_TOKENS: Final = {"calibration": 32 * 512, "search": 0, "evaluation": 0}
"""Pseudo-random tokens in addition.

With these, the squared errors that compensation leaves in nano's matrix products at Q2_K and Q4_K are 9 to
26% less on prose, code and chat, and 3 to 4% more on the model's own text. Twice as many lose another 4%
there, and gain less than 3% on most others.
"""

MAX_NEW, MAX_NEW_THINKING = 256, 384
SEEDS = {"calibration": 20250, "search": 27183, "evaluation": 31337}


def write_text(gguf: Path, out: Path, *, purpose: Purpose, runtime: Runtime) -> None:
    """Writes at least `MIN_TOKENS` (by purpose) tokens of conversations that the model in `gguf` generates.

    Every prompt is answered once. While the text is too short, prompts are answered again, with other
    answers. Special tokens are written as text, so that parsing special tokens gives the conversations again.

    Raises:
        ConvertError: the file has no chat template, or one that does not work.
        LlamaError: the model cannot be loaded or run.
    """
    prompts, wanted = load_prompts(purpose), MIN_TOKENS[purpose]
    with runtime.load(gguf) as model:
        template = ChatTemplate.of(model)
        rendered = [
            model.tokenize(template.render(prompt.messages, thinking=prompt.thinking), ends=True)
            for prompt in prompts
        ]
        text, n_tokens, answered = "", 0, 0
        written = finished = shown = 0
        with Progress(f"Writing {purpose} text", wanted, "tokens") as progress:

            def show(request: Request) -> None:
                nonlocal written, finished, shown
                written += len(request.prompt) + len(request.generated)
                finished += 1
                # complete once the text is long enough and every prompt has an answer
                due = min(written, wanted, wanted * finished // len(prompts))
                progress.advance(due - shown)
                shown = due

            while n_tokens < wanted:
                count = len(prompts)
                if answered:
                    count = min(count, 1 + answered * (wanted - n_tokens) // n_tokens)
                requests = [
                    Request(
                        prompt=rendered[i],
                        max_new=MAX_NEW_THINKING if prompts[i].thinking else MAX_NEW,
                        seed=(SEEDS[purpose], answered + i),
                    )
                    for i in range(count)
                ]
                complete(model, requests, show, threads=runtime.n_threads)
                text += "".join(_conversation(model, request) for request in requests)
                n_tokens, answered = len(model.tokenize(text, ends=True)), answered + count
        text += "\n".join(load_mixture(purpose))
        text += _pseudo_random(model, text, RANDOM_TOKENS[purpose], SEEDS[purpose])
    out.write_text(text, encoding="utf-8")


def load_mixture(purpose: Purpose) -> list[str]:
    """The documents of the mixture for one purpose: a search reads every fourth, calibration the others."""
    documents = MIXTURE.read_text(encoding="utf-8").split("\f\n")
    match purpose:
        case "search":
            return documents[SEARCH_STEP - 1 :: SEARCH_STEP]
        case "calibration":
            return [document for i, document in enumerate(documents, 1) if i % SEARCH_STEP]
        case "evaluation":
            return []


def _pseudo_random(model: Model, text: str, n_tokens: int, seed: int) -> str:
    """About so many tokens: half of the text in another order, half of the vocabulary."""
    draw = np.random.default_rng(seed)
    usable = np.setdiff1d(np.arange(model.n_vocab), model.unused_tokens())
    ids = np.array(model.tokenize(text, ends=True))
    drawn = np.concatenate([draw.permutation(ids)[: n_tokens // 2], draw.choice(usable, n_tokens // 2)])
    return model.detokenize(drawn.tolist()).decode("utf-8", "ignore")


def _conversation(model: Model, request: Request) -> str:
    # the limit may be inside a character, whose beginning is then dropped
    return model.detokenize([*request.prompt, *request.generated]).decode("utf-8", "ignore") + "\n"
