"""A scripted server for what loads servers and asks them, in a thread of its own; it fails on demand."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from time import time
from typing import Any
from uuid import uuid4

from aiohttp import web

from tests.bench.fake_model import FakeVocabulary, answer, continuation
from tests.in_thread import ServedInThread

Body = dict[str, Any]
CONTEXT = 16384
TEXT_FIELDS = {  # of /tokenize's request and of /detokenize's answer
    "llama-server": ("content", "content"),
    "vLLM": ("prompt", "prompt"),
}
PREFILL = 5e-6  # seconds a prompt token
LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")
LONGEST = 256  # tokens of an answer without max_tokens: they are made before they are sent
MODEL = "fake"


@dataclass
class FakeReply:
    """What a chat gets: both texts are cut at ``max_tokens`` as a model's would be."""

    content: str
    reasoning: str = ""


def reply_to(body: Body) -> FakeReply:
    """The built-in model's answer to a chat."""
    question = text_of(body["messages"][-1].get("content"))
    reasoning, content = answer(question)
    return FakeReply(content, reasoning if thinks(body) else "")


@dataclass
class Script:
    """How the server behaves; every hook may also change its argument. Delays are seconds.

    ``on_request`` sees the body before validation, ``on_answer`` a finished answer, ``on_event`` a streamed
    event (None drops it), ``fail`` returns a status to answer with instead, ``reply`` what a chat is told.
    """

    reply: Callable[[Body], FakeReply] = reply_to
    on_request: Callable[[str, Body], Body] = lambda _, body: body
    on_answer: Callable[[str, Body], Body] = lambda _, answer: answer
    on_event: Callable[[str, Body], Body | None] = lambda _, event: event
    fail: Callable[[str], int | None] = lambda _: None
    first_token_delay: float = 0.0
    token_delay: float = 0.0
    tokenizer: str | None = "llama-server"
    end_streams: bool = True
    requests_a_connection: float = math.inf  # then it is closed, without notice


@dataclass
class Generation:
    """One choice in the making."""

    prompt: list[int]
    pieces: list[tuple[str, str]] = field(default_factory=list)  # (field of the delta, text)
    finish_reason: str = "length"
    cached: int = 0


class BadRequest(Exception):
    """Answered with ``status`` and the OpenAI error object."""

    def __init__(self, message: str, param: str | None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status


class FakeServer(ServedInThread):
    """``with FakeServer(Script()) as server: ... server.url``; ``server.requests``: (path, body) so far."""

    def __init__(self, script: Script | None = None, port: int = 0) -> None:
        super().__init__(port)
        self.script = script or Script()
        self.vocabulary = FakeVocabulary()
        self.requests: list[tuple[str, Body]] = []
        self.running = self.peak = 0
        self._seen: list[list[int]] = []
        self._on_connection: Counter[str] = Counter()

    @property
    def connections(self) -> int:
        """How many clients have opened."""
        return len(self._on_connection)

    def make_app(self) -> web.Application:
        app = web.Application(client_max_size=8 * 2**20, middlewares=[self._errors])
        app.router.add_get("/ping", self._ready)
        app.router.add_get("/health", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        for path in ("/invocations", "/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._generate)
        if self.script.tokenizer is not None:
            app.router.add_post("/tokenize", self._tokenize)
            app.router.add_post("/detokenize", self._detokenize)
        return app

    @web.middleware
    async def _errors(
        self, request: web.Request, handler: Callable[[web.Request], Any]
    ) -> web.StreamResponse:
        peer = str(request.transport.get_extra_info("peername")) if request.transport else ""
        self._on_connection[peer] += 1
        if self._on_connection[peer] > self.script.requests_a_connection and request.transport:
            request.transport.abort()
        try:
            status = self.script.fail(request.path)
            if status is not None:
                return _error(status, "scripted failure", None)
            response: web.StreamResponse = await handler(request)
            return response
        except BadRequest as error:
            return _error(error.status, error.message, error.param)
        except web.HTTPException as error:
            return _error(error.status, error.reason, None)

    async def _ready(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        steps = '{kind="decode",rows="1"}'
        lines = ["# TYPE fake_running gauge", f"fake_running {self.running}"]
        for name, each in (("steps", 2), ("step_tokens", 6)):
            lines += [f"# TYPE qwen_{name} counter", f"qwen_{name}_total{steps} {each * len(self.requests)}"]
        return web.Response(text="\n".join([*lines, ""]))

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "test", "max_model_len": CONTEXT}
        return web.json_response(
            {"object": "list", "data": [card | {"meta": {"n_vocab": self.vocabulary.size, "n_ctx": CONTEXT}}]}
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = TEXT_FIELDS[self.script.tokenizer or ""][0]
        if name not in body:
            raise BadRequest(f"{name} is missing", name)
        return web.json_response({"tokens": self.vocabulary.encode(body[name])})

    async def _detokenize(self, request: web.Request) -> web.Response:
        name = TEXT_FIELDS[self.script.tokenizer or ""][1]
        text = self.vocabulary.decode((await request.json())["tokens"])
        return web.json_response({name: text})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = {name: value for name, value in (await request.json()).items() if value is not None}
        self.requests.append((request.path, body))
        body = self.script.on_request(request.path, body)
        if not body.get("messages") and not isinstance(body.get("prompt"), str | list):
            raise BadRequest("prompt: want a string or a list", "prompt")
        if request.path == "/v1/completions" and not {*LIMITS} & body.keys():
            body = {"max_tokens": 16, **body}
        choices = self._choices(body)
        head = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "chat.completion" if "messages" in body else "text_completion",
            "created": int(time()),
            "model": body.get("model", MODEL),
        }
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            prefill = PREFILL * len(choices[0].prompt)
            await asyncio.sleep(self.script.first_token_delay + prefill)  # as a server takes
            if body.get("stream"):
                return await self._stream(request, body, choices, head)
            rest = self.script.token_delay * (len(choices[0].pieces) - 1)
            await asyncio.sleep(rest)  # likewise
            return web.json_response(self.script.on_answer(request.path, _answer(body, choices, head)))
        finally:
            self.running -= 1

    async def _stream(
        self, request: web.Request, body: Body, choices: list[Generation], head: Body
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for event in self._events(body, choices, head):
            scripted = self.script.on_event(request.path, event)
            if scripted is not None:
                await response.write(b"data: " + json.dumps(scripted).encode() + b"\n\n")
        if self.script.end_streams:
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _events(self, body: Body, choices: list[Generation], head: Body) -> AsyncIterator[Body]:
        chat = "messages" in body
        head = head | ({"object": "chat.completion.chunk"} if chat else {})
        for index, choice in enumerate(choices):
            if chat:
                yield head | {"choices": [_delta(index, {"role": "assistant", "content": ""})]}
            for name, piece in choice.pieces:
                part = _delta(index, {name: piece}) if chat else _text(index, piece)
                yield head | {"choices": [part]}
                await asyncio.sleep(self.script.token_delay)  # likewise
            last = _delta(index, {}) if chat else _text(index, "")
            yield head | {"choices": [last | {"finish_reason": choice.finish_reason}]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield head | {"choices": [], "usage": _usage(choices)}

    def _choices(self, body: Body) -> list[Generation]:
        made = [
            self._generation(body, prompt) for prompt in self._prompts(body) for _ in range(body.get("n", 1))
        ]
        self._seen = [choice.prompt for choice in made] + self._seen[:64]
        return made

    def _prompts(self, body: Body) -> list[list[int]]:
        if "messages" in body:
            ids = self.vocabulary.encode(json.dumps(body["tools"])) if body.get("tools") else []
            for message in body["messages"]:
                ids += self.vocabulary.encode(f"<|im_start|>{message['role']}\n")
                ids += self.vocabulary.encode(text_of(message.get("content")), special=False)
                ids += self.vocabulary.encode("<|im_end|>\n")
            return [ids + self.vocabulary.encode("<|im_start|>assistant\n<think>")]
        prompt = body["prompt"]
        if isinstance(prompt, str):
            return [self.vocabulary.encode(prompt)]
        if isinstance(prompt[0], int):
            return [prompt]
        return [self.vocabulary.encode(one) if isinstance(one, str) else one for one in prompt]

    def _generation(self, body: Body, prompt: list[int]) -> Generation:
        limit = next((body[name] for name in LIMITS if body.get(name, -1) >= 0), CONTEXT)
        if len(prompt) >= CONTEXT:
            raise BadRequest(f"{len(prompt)} prompt tokens do not fit the context of {CONTEXT}", "prompt")
        limit = min(limit, CONTEXT - len(prompt), LONGEST)
        made = Generation(prompt, cached=max((_common(prompt, seen) for seen in self._seen), default=0))
        tokens: list[tuple[str, str]] = []
        if "messages" in body:
            reply = self.script.reply(body)
            for name, text in (("reasoning_content", reply.reasoning), ("content", reply.content)):
                tokens += [(name, self.vocabulary.decode([i])) for i in self.vocabulary.encode(text)]
            ends = not body.get("ignore_eos")
        else:
            ends = False
        if not ends:
            more = continuation(self.vocabulary, prompt, body)
            kind = "content" if "messages" in body else "text"
            tokens += [(kind, self.vocabulary.decode([i])) for i in islice(more, max(0, limit - len(tokens)))]
        made.finish_reason = "stop" if ends and len(tokens) <= limit else "length"
        made.pieces = tokens[:limit]
        return made


def thinks(body: Body) -> bool:
    """Whether the request asks for thinking, in any of the three spellings."""
    asked = (body.get("chat_template_kwargs") or {}).get("enable_thinking", body.get("thinking"))
    return bool(body.get("reasoning_effort", "none") != "none" if asked is None else asked)


def text_of(content: Any) -> str:
    """A message's text, from a string or from content parts."""
    return "".join(part.get("text", "") for part in content) if isinstance(content, list) else content or ""


def _common(left: list[int], right: list[int]) -> int:
    pairs = enumerate(zip(left[:-1], right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left) - 1, len(right)))


def _usage(choices: list[Generation]) -> Body:
    prompts = list({id(choice.prompt): choice for choice in choices}.values())
    prompt = sum(len(choice.prompt) for choice in prompts)
    made = sum(len(choice.pieces) for choice in choices)
    thoughts = sum(name == "reasoning_content" for choice in choices for name, _ in choice.pieces)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        **({"completion_tokens_details": {"reasoning_tokens": thoughts}} if thoughts else {}),
        "total_tokens": prompt + made,
        "prompt_tokens_details": {
            "cached_tokens": sum(choice.cached for choice in prompts),
        },
    }


def _answer(body: Body, choices: list[Generation], head: Body) -> Body:
    made = []
    for index, choice in enumerate(choices):
        texts = {name: "" for name, _ in choice.pieces}
        for name, piece in choice.pieces:
            texts[name] += piece
        if "messages" in body:
            message = {"role": "assistant", "content": texts.get("content", "")}
            if "reasoning_content" in texts:
                message["reasoning_content"] = texts["reasoning_content"]
            part: Body = {"index": index, "message": message, "logprobs": None}
        else:
            part = _text(index, texts.get("text", ""))
        made.append(part | {"finish_reason": choice.finish_reason})
    return head | {"choices": made, "usage": _usage(choices)}


def _delta(index: int, delta: Mapping[str, Any]) -> Body:
    return {"index": index, "delta": dict(delta), "logprobs": None, "finish_reason": None}


def _text(index: int, text: str) -> Body:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


def _error(status: int, message: str, param: str | None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": param, "code": None}}, status=status
    )
