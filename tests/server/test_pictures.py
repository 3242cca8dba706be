"""Pictures in chats, from HTTP to the answer: nano's tower tells pictures of noise apart."""

import asyncio
import gc
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from qwen_serve.llamacpp import Model
from qwen_serve.llamacpp import vision as llamacpp_vision
from qwen_serve.server.api.limits import LARGE
from qwen_serve.server.chat.pictures import GivenPicture
from qwen_serve.server.engine import ModelLoadError
from qwen_serve.server.engine.admission import AdmissionControl
from qwen_serve.server.engine.pictures import Picture, row_ids
from tests.messages import user
from tests.server.engine.helpers import running
from tests.server.engine.test_pictures import Bare, Part
from tests.server.seeing import N, ask, body, content, needs_vision, noise, part, text
from tests.server.serving import Served, serving
from tests.waiting import until

pytestmark = needs_vision


async def test_an_answer_is_that_of_the_bare_context(seeing: Served, nano_f32: Path, mmproj: Path) -> None:
    """The template's text around each picture's rows, as libmtmd makes them, read by llama.cpp alone."""
    images = [noise(1), noise(2, 160, 160)]
    request = body(part(images[0]), text("What is on it?"), part(images[1]), text("And here?"))
    vocab, prompter = seeing.engine.vocab, seeing.backend.prompter
    ids = prompter.chat(request["messages"], pictures=[])
    prompt: list[Part] = [[]]
    bare = Bare(nano_f32)
    with (
        Model(nano_f32, n_gpu_layers=0) as model,
        llamacpp_vision.VisionTower(mmproj, model, threads=1, warm_up=False) as tower,
    ):
        left = [np.asarray(image) for image in images]
        for token in ids:
            if token == vocab.picture_id:
                prepared = tower.prepare(left.pop(0))
                rows = tower.encode(prepared)
                prompt += [Picture(row_ids(b"any", len(rows)), rows, prepared.positions, prepared.n_pos), []]
            else:
                last = prompt[-1]
                assert isinstance(last, list)
                last.append(token)
    assert not left
    expected = b"".join(map(vocab.token_bytes, bare.greedy(prompt, N))).decode("utf-8", "replace")
    bare.close()
    answer = await ask(seeing, request)
    assert content(answer) == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompt))


async def test_a_second_question_encodes_and_reads_no_picture(seeing: Served) -> None:
    encoder = seeing.engine.encoder
    assert encoder is not None
    shown, before = part(noise(3, 256, 256)), encoder.encoded
    first = await ask(seeing, body(shown, text("How many dots are there?")))
    second = await ask(seeing, body(shown, text("Which colour is the first?")))
    assert encoder.encoded == before + 1
    rows = 256 // 16 * 256 // 16
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < rows
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= rows
    # another picture at the same place is another prompt
    other = await ask(seeing, body(part(noise(4, 256, 256)), text("Which colour is the first?")))
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < rows


async def test_a_second_question_decodes_no_picture(seeing: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = part(noise(41))
    first = await ask(seeing, body(shown, text("How many dots are there?")))

    def decoded(picture: GivenPicture, *_: Any) -> Any:
        raise picture.wrong("was decoded")

    monkeypatch.setattr(GivenPicture, "pixels", decoded)
    again = await ask(seeing, body(shown, text("How many dots are there?")))
    assert content(again) == content(first)
    for request in (
        body(shown, cache_salt="theirs"),
        body(part(noise(41), detail="low")),
        body(part(noise(42))),
    ):
        assert "was decoded" in (await ask(seeing, request, 400))["error"]["message"]


async def test_who_may_not_share_prefixes_cannot_tell_what_was_shown(seeing: Served) -> None:
    encoder = seeing.engine.encoder
    assert encoder is not None
    request = body(part(noise(40)), text("What is it?"))
    before = encoder.encoded
    for salt in ("ours", "ours", "theirs"):
        await ask(seeing, {**request, "cache_salt": salt})
    assert encoder.encoded == before + 2


async def test_no_text_or_known_picture_waits_for_pictures(
    seeing: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where more are encoded than there are threads, and not behind a large body."""
    encoder = seeing.engine.encoder
    assert encoder is not None
    known = body(part(noise(19)), text("What is it?"))
    first = await ask(seeing, known)
    go, began = threading.Event(), threading.Semaphore(0)
    encode, bodies = encoder.encode, seeing.service.bodies

    def slow(*given: Any) -> Picture:
        began.release()
        assert go.wait(60)
        return encode(*given)

    monkeypatch.setattr(encoder, "encode", slow)
    large = part(Image.fromarray(np.random.default_rng(12).integers(0, 256, (300, 400, 3), np.uint8)))
    requests = [body(part(noise(seed)), text("What is it?")) for seed in range(20, 26)]
    asked = [asyncio.create_task(ask(seeing, request)) for request in [*requests, body(large)]]
    for _ in range(4):
        assert await asyncio.to_thread(began.acquire, timeout=20)
    await until(lambda: bodies.held >= LARGE)
    try:
        for padding in (0, LARGE):
            request = body(text("Hello."), unread="x" * padding)
            answer = await asyncio.wait_for(ask(seeing, request), 20)
            assert answer["usage"]["completion_tokens"] == N
        assert content(await asyncio.wait_for(ask(seeing, known), 20)) == content(first)
        assert bodies.held  # what pictures take is counted until they are encoded
        assert gc.isenabled()
    finally:
        go.set()
    await asyncio.gather(*asked)
    assert not bodies.held


async def test_a_request_that_is_refused_encodes_nothing(
    seeing: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = seeing.engine.encoder
    assert encoder is not None
    before = encoder.encoded
    monkeypatch.setattr(seeing.engine, "_admission", AdmissionControl(0, 0))
    error = (await ask(seeing, body(part(noise(30)), text("What is it?")), 429))["error"]
    assert error["code"] == "queue_full"
    monkeypatch.undo()
    many = body(*[part(noise(n, 800, 800)) for n in range(4)])  # 2,500 tokens each
    for request in (many, {**many, "messages": [*body(part(noise(31)))["messages"], *many["messages"]]}):
        assert "8192" in (await ask(seeing, request, 400))["error"]["message"]
    assert encoder.encoded == before
    assert not seeing.service.bodies.held


async def test_a_client_that_leaves_has_no_further_picture_encoded(
    seeing: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = seeing.engine.encoder
    assert encoder is not None
    go, began, before = threading.Event(), threading.Event(), encoder.encoded
    encode = encoder.encode

    def slow(*given: Any) -> Picture:
        began.set()
        assert go.wait(60)
        return encode(*given)

    monkeypatch.setattr(encoder, "encode", slow)
    asked = asyncio.create_task(ask(seeing, body(part(noise(32)), part(noise(33)), text("Compare them."))))
    assert await asyncio.to_thread(began.wait, 20)
    try:
        asked.cancel()
        await until(lambda: not seeing.service.bodies.held)
    finally:
        go.set()
    monkeypatch.undo()
    await ask(seeing, body(part(noise(34)), text("What is it?")))
    assert encoder.encoded == before + 1, "nor the first, which was not yet prepared"


async def test_together_as_alone(seeing: Served) -> None:
    requests = [
        body(part(noise(5)), text("What is this?")),
        body(text("What is 2+2?")),
        body(part(noise(6, 64, 320)), part(noise(7)), text("Compare them.")),
        body(text("Look:"), part(noise(8, 320, 64))),
    ]
    alone = [content(await ask(seeing, request)) for request in requests]
    together = await asyncio.gather(*(ask(seeing, request) for request in requests * 2))
    assert [content(answer) for answer in together] == alone * 2


async def test_beside_schemas_choices_and_logprobs(seeing: Served) -> None:
    shown = part(noise(9))
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    fields = {"response_format": wanted, "max_tokens": 40, "n": 2, "logprobs": True, "ignore_eos": False}
    answer = await ask(seeing, body(shown, text("How many?"), **fields))
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        assert choice["message"]["content"].startswith("{")
        assert choice["logprobs"]["content"]


async def test_beside_thinking_and_tools(seeing: Served) -> None:
    shown = part(noise(13))
    thought = await ask(
        seeing, body(shown, text("How many?"), chat_template_kwargs={"enable_thinking": True})
    )
    assert thought["choices"][0]["message"]["reasoning_content"]
    assert thought["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert thought["usage"]["prompt_tokens_details"]["image_tokens"]
    colour = {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}}, "required": ["c"]}
    tool = {"type": "function", "function": {"name": "paint", "parameters": colour}}
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    request = {**body(shown, text("Which colour?"), **fields), "max_tokens": 200, "ignore_eos": False}
    [choice] = (await ask(seeing, request))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["c"] in ("red", "blue")


async def test_the_smallest_picture(seeing: Served) -> None:
    answers = []
    for colour in ("red", "blue"):
        dot = part(Image.new("RGB", (1, 1), colour))
        answer = await ask(seeing, body(dot, text("What is it?"), max_tokens=1, logprobs=True))
        assert answer["usage"]["prompt_tokens_details"]["image_tokens"] >= 1
        answers.append(answer["choices"][0]["logprobs"]["content"][0]["logprob"])
    assert answers[0] != answers[1]


async def test_in_a_tools_answer(seeing: Served) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        user("Look at it."),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [text("Here:"), part(noise(10))]},
    ]
    answers = []
    for seed in (10, 11):
        messages[2]["content"] = [text("Here:"), part(noise(seed))]
        answer = await ask(seeing, {"messages": messages, "max_tokens": 1, "logprobs": True})
        assert answer["usage"]["prompt_tokens"] > 48
        answers.append(answer["choices"][0]["logprobs"]["content"][0]["logprob"])
    assert abs(answers[0] - answers[1]) > 1e-4


async def test_control_tokens_in_text_stay_text(seeing: Served) -> None:
    """What a user writes stands for no picture."""
    marks = "<|vision_start|><|image_pad|><|vision_end|>"
    await ask(seeing, body(text(marks)))
    await ask(seeing, body(text(f"{marks} and"), part(noise(1)), text(marks)))


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an address": (
        body({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}),
        "addresses are not fetched",
        "messages[0].content[0].image_url.url",
    ),
    "a text": (
        body({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}),
        "is no picture of a known format",
        "messages[0].content[0].image_url.url",
    ),
    "cut": (
        body(part(noise(1)), text("x"), truncate_prompt_tokens=20),
        "a prompt with pictures is not cut",
        "truncate_prompt_tokens",
    ),
    "scored": (body(part(noise(1)), text("x"), prompt_logprobs=1), "rows of pictures have no log", ""),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_refused_is_named(case: str, seeing: Served) -> None:
    request, message, param = REFUSED[case]
    error = (await ask(seeing, request, 400))["error"]
    assert message in error["message"]
    if param:
        assert error["param"] == param


async def test_it_says_that_it_sees(seeing: Served) -> None:
    async with httpx.AsyncClient(base_url=seeing.url, timeout=60) as http:
        assert (await http.get("/props")).json()["modalities"] == {"vision": True, "audio": False}


async def test_without_a_tower_pictures_are_refused(nano_f32: Path) -> None:
    with serving(nano_f32, ctx_size=1024) as served:
        error = (await ask(served, body(part(noise(1))), 400))["error"]
    assert "'image_url'; only 'text' and 'file' are served" in error["message"]


def test_a_file_that_is_no_tower(nano_f32: Path) -> None:
    with (
        pytest.raises(ModelLoadError, match=r"architecture 'qwen35'; want an mmproj"),
        running(nano_f32, mmproj=nano_f32),
    ):
        pass


def test_the_plan_counts_the_tower(nano_f32: Path, mmproj: Path) -> None:
    with running(nano_f32) as engine:
        before = engine.plan.usages[-1]
    with running(nano_f32, mmproj=mmproj) as engine:
        after = engine.plan.usages[-1]
        assert str(mmproj) in str(engine.plan)
    assert 0 < after.weights - before.weights <= mmproj.stat().st_size
    assert after.vision > before.vision == 0
    assert before.pictures == 0
    assert after.pictures > 256 * 2**20  # what is cached, and what requests may hold
    assert after.hidden == before.hidden
