"""Writes calibration and evaluation text: prompts with the model's own answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen_serve.convert.calibration.prompts import ChatTemplate, load_prompts
from qwen_serve.convert.calibration.sampler import Request, complete
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.progress import Progress

if TYPE_CHECKING:
    from pathlib import Path

    from qwen_serve.convert.calibration.prompts import Purpose
    from qwen_serve.llamacpp.evaluation import Runtime
    from qwen_serve.llamacpp.model import Model

TEXT_VERSION = 1
"""Raise it when the same model would write different text, because of other prompts, sampler or lengths."""

# 64 chunks of 512 tokens (8 for a search), and one more for the incomplete last chunk
MIN_TOKENS = {"calibration": 65 * 512, "search": 9 * 512, "evaluation": 65 * 512}
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
        source = model.metadata().get("tokenizer.chat_template")
        if not source:
            raise ConvertError(
                f"{gguf}: no tokenizer.chat_template, so the model cannot be prompted to write its own text; "
                "add chat_template.jinja to the checkpoint, or use --calibration FILE and --no-kld"
            )
        template = ChatTemplate(source)
        rendered = [model.tokenize(template.render(prompt), ends=True) for prompt in prompts]
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
    out.write_text(text, encoding="utf-8")


def _conversation(model: Model, request: Request) -> str:
    # the limit may be inside a character, whose beginning is then dropped
    return model.detokenize([*request.prompt, *request.generated]).decode("utf-8", "ignore") + "\n"
