"""A scripted server for tests of the benchmarks' clients, in a thread of its own; it fails on demand. Each
character is a token. The answer to a prompt is the prompt's beginning.
"""

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from os.path import commonprefix
from time import time
from typing import Any
from uuid import uuid4

from aiohttp import web

from qwen_serve.bench.load.vocabulary import DIALECTS
from tests.in_thread import ServedInThread
from tests.waiting import until

Body = dict[str, Any]
CONTEXT = 16384
VOCABULARY = 128
"""Of the ids, those that prompts are drawn from."""
PREFILL = 5e-6  # seconds a prompt token
LONGEST = 256  # tokens of an answer without max_tokens: they are made before they are sent
MODEL = "fake"


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


@dataclass
class FakeReply:
    """The answer to a chat; both texts are cut at ``max_tokens``, as a model's are."""

    content: str
    reasoning: str = ""


def reply_to(body: Body) -> FakeReply:
    """The sum that a chat asks for, else the user's text."""
    question = text_of(body["messages"][-1].get("content"))
    match = re.search(r"(\d+)\s*\+\s*(\d+)", question)
    if match is None:
        return FakeReply(f"You said: {question}")
    total = int(match[1]) + int(match[2])
    thought = f"I add {match[1]} and {match[2]}, which gives {total}."
    return FakeReply(f"The answer is {total}.", thought if thinks(body) else "")


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
    together: int = 1  # no answer begins before so many requests run at once
    tokenizer: str | None = "llama-server"
    end_streams: bool = True
    requests_a_connection: float = math.inf  # then it is closed, without notice


@dataclass
class Generation:
    """An answer while it is generated."""

    prompt: str
    cached: int
    pieces: list[tuple[str, str]]
    """Field of the message, and token."""
    finish_reason: str

    @property
    def usage(self) -> Body:
        made = len(self.pieces)
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": made,
            "total_tokens": len(self.prompt) + made,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class FakeServer(ServedInThread):
    """``with FakeServer(Script()) as server: ... server.url``; ``server.requests``: (path, body) so far."""

    def __init__(self, script: Script | None = None, port: int = 0) -> None:
        super().__init__(port)
        self.script = script or Script()
        self.requests: list[tuple[str, Body]] = []
        self.running = self.peak = 0
        self._seen: list[str] = []
        self._on_connection: Counter[str] = Counter()

    @property
    def connections(self) -> int:
        """Number of connections that clients opened."""
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
            app.router.add_post("/detokenize", self._tokenize)
        return app

    @web.middleware
    async def _errors(
        self, request: web.Request, handler: Callable[[web.Request], Any]
    ) -> web.StreamResponse:
        peer = str(request.transport.get_extra_info("peername")) if request.transport else ""
        self._on_connection[peer] += 1
        if self._on_connection[peer] > self.script.requests_a_connection and request.transport:
            request.transport.abort()
        if (status := self.script.fail(request.path)) is not None:
            return _error(status, "scripted failure")
        response: web.StreamResponse = await handler(request)
        return response

    async def _ready(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        steps = '{kind="decode",rows="1"}'
        lines = ["# TYPE fake_running gauge", f"fake_running {self.running}"]
        for name, each in (("steps", 2), ("step_tokens", 6)):
            lines += [f"# TYPE qwen_{name} counter", f"qwen_{name}_total{steps} {each * len(self.requests)}"]
        return web.Response(text="\n".join([*lines, ""]))

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "meta": {"n_vocab": VOCABULARY, "n_ctx": CONTEXT}}
        return web.json_response({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        name, _ = DIALECTS[self.script.tokenizer or ""]
        body = await request.json()
        if request.path == "/detokenize":
            return web.json_response({name: decode(body["tokens"])})
        if name not in body:
            return _error(400, f"{name} is missing")
        return web.json_response({"tokens": encode(body[name])})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, body))
        body = self.script.on_request(request.path, body)
        if not body.get("messages") and not isinstance(body.get("prompt"), str):
            return _error(400, "prompt: want a string")
        made = self._generation(body)
        head = {"id": uuid4().hex, "created": int(time()), "model": body.get("model", MODEL)}
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await until(lambda: self.peak >= self.script.together, 20)
            await asyncio.sleep(
                self.script.first_token_delay + PREFILL * len(made.prompt)
            )  # as a server takes
            if body.get("stream"):
                return await self._stream(request, body, made, head)
            await asyncio.sleep(self.script.token_delay * (len(made.pieces) - 1))  # likewise
            return web.json_response(self.script.on_answer(request.path, head | _answer(made)))
        finally:
            self.running -= 1

    async def _stream(
        self, request: web.Request, body: Body, made: Generation, head: Body
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for event in self._events(body, made):
            scripted = self.script.on_event(request.path, head | event)
            if scripted is not None:
                await response.write(b"data: " + json.dumps(scripted).encode() + b"\n\n")
        if self.script.end_streams:
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _events(self, body: Body, made: Generation) -> AsyncIterator[Body]:
        for name, piece in made.pieces:
            yield {"choices": [{"text": piece} if name == "text" else {"delta": {name: piece}}]}
            await asyncio.sleep(self.script.token_delay)  # likewise
        yield {"choices": [{"delta": {}, "finish_reason": made.finish_reason}]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {"choices": [], "usage": made.usage}

    def _generation(self, body: Body) -> Generation:
        chat = "messages" in body
        said = (
            (f"{message['role']}: {text_of(message['content'])}\n" for message in body["messages"])
            if chat
            else ()
        )
        prompt = "".join(said) if chat else body["prompt"]
        shared = (commonprefix([prompt[:-1], seen]) for seen in self._seen)  # noqa: RUF071 - no path
        cached = max(map(len, shared), default=0)
        self._seen = [prompt, *self._seen[:64]]
        reply = self.script.reply(body) if chat else FakeReply("")
        tokens = [("reasoning_content", token) for token in reply.reasoning]
        tokens += [("content", token) for token in reply.content]
        limit = min(body.get("max_tokens", LONGEST), CONTEXT - len(prompt))
        if chat and not body.get("ignore_eos"):
            reason = "stop" if len(tokens) <= limit else "length"
        else:
            more = islice(cycle(prompt), max(0, limit - len(tokens)))
            tokens += [("content" if chat else "text", token) for token in more]
            reason = "length"
        return Generation(prompt, cached, tokens[:limit], reason)


def thinks(body: Body) -> bool:
    """Whether the request asks for thinking."""
    return bool((body.get("chat_template_kwargs") or {}).get("enable_thinking", body.get("thinking")))


def text_of(content: Any) -> str:
    """A message's text, from a string or from content parts."""
    return "".join(part.get("text", "") for part in content) if isinstance(content, list) else content or ""


def _answer(made: Generation) -> Body:
    texts = {"content": "", "reasoning_content": ""}
    for name, piece in made.pieces:
        texts[name] = texts.get(name, "") + piece
    part = {"text": texts["text"]} if "text" in texts else {"message": texts}
    return {"choices": [part | {"finish_reason": made.finish_reason}], "usage": made.usage}


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
