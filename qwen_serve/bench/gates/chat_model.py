"""An lm-eval model for a server's chat endpoint, with or without streaming and thinking.

lm-eval's own ``local-chat-completions`` can neither stream nor separate thinking from the answer, and it
scores an unreadable reply as an empty one. Here a request that keeps failing ends the run.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from qwen_serve.bench.errors import BenchError, ServerError, UnreachableError
from qwen_serve.bench.load.client import Client, Completion, Usage
from qwen_serve.bench.load.generator import shown
from qwen_serve.bench.terminal import Bar

PATH = "/v1/chat/completions"
THINK_START, THINK_END = "<think>", "</think>"
# 200: an incomplete stream or body
TRANSIENT = {200, 408, 425, 429, 500, 502, 503, 504}
FIRST_DELAY = 0.5  # seconds before the second attempt; doubled for each one after it
MAX_DELAY = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply: thinking, scored text, finish reason, and costs.

    ``truncated``: the reply reached the token limit before the requested thinking had ended.
    """

    reasoning: str
    text: str
    finish_reason: str | None
    truncated: bool
    usage: Usage | None
    seconds: float
    retries: int


@register_model("qwen-serve-chat")
class ChatModel(LM):  # type: ignore[misc]
    """``/v1/chat/completions`` of one server. `answers`: all replies, by (task, document number).

    ``thinking`` None: requests have no such field. ``concurrency``: concurrent requests. ``retries``: further
    attempts after a transient failure (no connection, 429, 5xx, a broken stream). Other failures raise at
    once.
    """

    MULTIMODAL = True
    """lm-eval requires this attribute of a model that takes pictures."""

    def __init__(
        self,
        url: str,
        *,
        model: str = "default",
        thinking: bool | None = None,
        stream: bool = False,
        concurrency: int = 8,
        retries: int = 4,
        timeout: float = 3600.0,
        api_key: str | None = None,
        label: str = "answers",
    ) -> None:
        super().__init__()
        self.url = url
        self.model = model
        self.thinking = thinking
        self.stream = stream
        self.concurrency = concurrency
        self.retries = retries
        self.timeout = timeout
        self.api_key = api_key
        self.label = label
        self.answers: dict[tuple[str, int], Answer] = {}

    @property
    def tokenizer_name(self) -> str:
        """A name for lm-eval's cache keys; the server has the tokenizer."""
        return self.model

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The messages as JSON, since the server has the template. Raises BenchError for a prefilled
        answer."""
        if not add_generation_prompt:
            raise BenchError(
                "this task prefills the assistant's message, which a chat endpoint cannot continue"
            )
        return json.dumps(chat_history, ensure_ascii=False)

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Send all requests. Returns the texts to score, in order. Raises BenchError if a request fails."""
        answers = asyncio.run(self._ask_all(requests))
        for request, answer in zip(requests, answers, strict=True):
            self.answers[request.task_name, request.doc_id] = answer
        return [answer.text for answer in answers]

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Raises BenchError, since a chat endpoint gives no likelihood of a given text."""
        raise BenchError(
            "this task scores likelihoods, which a chat endpoint cannot give; choose one that generates"
        )

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Raises BenchError, as `loglikelihood` does."""
        raise BenchError(
            "this task scores likelihoods, which a chat endpoint cannot give; choose one that generates"
        )

    async def _ask_all(self, requests: Sequence[Instance]) -> list[Answer]:
        places = asyncio.Semaphore(self.concurrency)
        with Bar(self.label, total=len(requests), unit="answers") as bar:
            async with Client(self.url, timeout=self.timeout, api_key=self.api_key) as client:

                async def ask(request: Instance) -> Answer:
                    async with places:
                        answer = await self._ask(client, self._body(*request.args))
                    bar.advance()
                    return answer

                try:
                    async with asyncio.TaskGroup() as group:
                        tasks = [group.create_task(ask(request)) for request in requests]
                except BaseExceptionGroup as failures:
                    # the first failure is the cause: it cancelled the other requests
                    raise failures.exceptions[0] from failures
        return [task.result() for task in tasks]

    async def _ask(self, client: Client, body: Mapping[str, Any]) -> Answer:
        send = client.stream if self.stream else client.complete
        for attempt in range(self.retries + 1):
            try:
                return self._read(await send(PATH, body), attempt)
            except (ServerError, UnreachableError) as error:
                passing = isinstance(error, UnreachableError) or error.status in TRANSIENT
                if not passing:
                    raise
                if attempt == self.retries:
                    tried = f" (tried {attempt + 1} times)" if attempt else ""
                    raise BenchError(f"{error}{tried}") from error
            await asyncio.sleep(min(MAX_DELAY, FIRST_DELAY * 2**attempt))
        raise AssertionError("unreachable")

    def _body(
        self, messages: str, settings: Mapping[str, Any], media: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """A request's body from lm-eval's ``messages`` and generation settings, with OpenAI's names.
        ``media``: under "visual", the pictures of the last message as data URLs.
        """
        rest = dict(settings)
        stop = rest.pop("until", None) or []
        tokens = rest.pop("max_gen_toks", None)
        if not rest.pop("do_sample", False):
            rest["temperature"] = 0.0
        *before, last = json.loads(messages)
        last["content"] = shown(media.get("visual", ()), last["content"])
        body = {"model": self.model, "messages": [*before, last], **rest}
        if tokens is not None:
            body["max_tokens"] = tokens
        if stop:
            body["stop"] = [stop] if isinstance(stop, str) else stop
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        return body

    def _read(self, completion: Completion, retries: int) -> Answer:
        reasoning, text, ended = split_thinking(completion.text, completion.reasoning)
        cut = completion.finish_reason == "length"
        truncated = self.thinking is True and cut and not ended
        return Answer(
            reasoning=text if truncated and not reasoning else reasoning,
            # unfinished thinking is not scored
            text="" if truncated else text,
            finish_reason=completion.finish_reason,
            truncated=truncated,
            usage=completion.usage,
            seconds=completion.seconds,
            retries=retries,
        )


def split_thinking(text: str, reasoning: str) -> tuple[str, str, bool]:
    """(thinking, answer, whether the end of thinking was found).

    Some servers separate the two. Others leave ``...</think>`` in the text, without the opening tag if it is
    part of the template's prompt.
    """
    if reasoning:
        return reasoning, text, bool(text)
    thought, end, answer = text.partition(THINK_END)
    if end:
        return thought.removeprefix(THINK_START).strip(), answer.lstrip(), True
    if text.startswith(THINK_START):
        return text.removeprefix(THINK_START).strip(), "", False
    return "", text, False
