import json
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from qwen_serve.bench.errors import BenchError, ServerError
from qwen_serve.bench.gates import chat_model
from qwen_serve.bench.gates.chat_model import Answer, ChatModel, split_thinking
from tests.bench.fake_server import Body, FakeReply, FakeServer, Script


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_model, "FIRST_DELAY", 0.001)


def instance(text: str, number: int = 0, **settings: Any) -> Instance:
    context = json.dumps([{"role": "user", "content": text}])
    arguments = (context, {"until": [], "do_sample": False, "temperature": 0.0, **settings})
    return Instance("generate_until", {}, arguments, 0, metadata=("task", number, 1))


def ask(server: FakeServer, **options: Any) -> Answer:
    model = ChatModel(server.url, **options)
    (text,) = model.generate_until([instance("Hello?")])
    assert text == model.answers["task", 0].text
    return model.answers["task", 0]


def saying(content: str, reasoning: str = "") -> Script:
    return Script(reply=lambda _: FakeReply(content, reasoning))


def test_lm_eval_finds_it_by_name() -> None:
    assert get_model("qwen-serve-chat") is ChatModel


def test_settings_travel_under_openais_names() -> None:
    with FakeServer(saying("Yes.")) as server:
        model = ChatModel(server.url, model="some model", thinking=False)
        model.generate_until([instance("Hello?", until=["Question:", "</s>"], max_gen_toks=77, top_p=0.9)])
        ((_, body),) = server.requests
    assert body == {
        "model": "some model",
        "messages": [{"role": "user", "content": "Hello?"}],
        "temperature": 0.0,
        "top_p": 0.9,
        "max_tokens": 77,
        "stop": ["Question:", "</s>"],
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_without_a_switch_none_is_sent() -> None:
    with FakeServer(saying("Yes.")) as server:
        ask(server)
        assert "chat_template_kwargs" not in server.requests[0][1]


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_and_answer_are_told_apart(stream: bool) -> None:
    with FakeServer(saying("The answer is (B).", "Is it (A)?")) as server:
        answer = ask(server, thinking=True, stream=stream)
        assert bool(server.requests[0][1].get("stream")) == stream
    assert (answer.reasoning, answer.text) == ("Is it (A)?", "The answer is (B).")
    assert (answer.finish_reason, answer.truncated, answer.retries) == ("stop", False, 0)
    assert answer.usage is not None and answer.usage.completion_tokens > 0


@pytest.mark.parametrize(
    ("text", "reasoning", "expected"),
    [
        ("An answer.", "", ("", "An answer.", False)),
        ("An answer.", "A thought.", ("A thought.", "An answer.", True)),
        ("", "A thought", ("A thought", "", False)),
        ("<think>\nA thought.\n</think>\n\nAn answer.", "", ("A thought.", "An answer.", True)),
        ("A thought.\n</think>\n\nAn answer.", "", ("A thought.", "An answer.", True)),
        ("<think>\nA thou", "", ("A thou", "", False)),
    ],
)
def test_servers_that_leave_the_thinking_inline(
    text: str, reasoning: str, expected: tuple[str, str, bool]
) -> None:
    assert split_thinking(text, reasoning) == expected


@pytest.mark.parametrize("inline", [False, True])
def test_thinking_cut_by_the_limit_is_no_answer(inline: bool) -> None:
    thought = "It may be (A) or (B) " * 3_000
    script = saying(thought) if inline else saying("", thought)
    with FakeServer(script) as server:
        answer = ask(server, thinking=True, stream=True)
    assert (answer.text, answer.truncated, answer.finish_reason) == ("", True, "length")
    assert answer.reasoning.startswith("It may be (A)")


def test_a_long_answer_without_thinking_is_still_an_answer() -> None:
    with FakeServer(saying("word " * 5_000)) as server:
        answer = ask(server, thinking=False)
    assert answer.text.startswith("word word") and answer.finish_reason == "length" and not answer.truncated


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_passing_failure_is_tried_again(status: int) -> None:
    left = 2

    def fail(path: str) -> int | None:
        nonlocal left
        left -= 1
        return status if left >= 0 else None

    with FakeServer(Script(reply=lambda _: FakeReply("Yes."), fail=fail)) as server:
        answer = ask(server, retries=2)
    assert (answer.text, answer.retries) == ("Yes.", 2)


def test_a_torn_stream_is_tried_again_then_an_error() -> None:
    script = Script(reply=lambda _: FakeReply("Yes."), end_streams=False)
    with FakeServer(script) as server:
        with pytest.raises(BenchError, match=r"ended without \[DONE\] \(tried 3 times\)"):
            ask(server, stream=True, retries=2)
        assert len(server.requests) == 3


def test_a_lasting_failure_names_itself() -> None:
    with (
        FakeServer(Script(fail=lambda _: 500)) as server,
        pytest.raises(BenchError, match=r"answered 500: scripted failure \(tried 4 times\)"),
    ):
        ask(server, retries=3)


def test_a_refused_request_is_not_tried_again() -> None:
    def refuse(path: str, body: Body) -> Body:
        return {**body, "messages": []}

    with FakeServer(Script(on_request=refuse)) as server:
        with pytest.raises(ServerError, match="answered 400"):
            ask(server, retries=3)
        assert len(server.requests) == 1


def test_answers_come_in_order_and_no_more_than_eight_at_once() -> None:
    most = 0

    def reply(body: Body) -> FakeReply:
        nonlocal most
        most = max(most, server.running + 1)
        return FakeReply(body["messages"][-1]["content"] + "!")

    with FakeServer(Script(reply=reply, first_token_delay=0.1, together=8)) as server:
        texts = ChatModel(server.url).generate_until([instance(f"word {n}", n) for n in range(40)])
    assert texts == [f"word {n}!" for n in range(40)]
    assert most == 8


def test_likelihoods_are_refused() -> None:
    with pytest.raises(BenchError, match="likelihoods"):
        ChatModel("http://127.0.0.1:9").loglikelihood([])
