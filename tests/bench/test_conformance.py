"""A server that keeps the contract passes; each broken rule fails the checks that are made for it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from qwen_serve.bench.checks.base import CHECKS, Target
from qwen_serve.bench.checks.conformance import run_check
from qwen_serve.bench.cli import main
from qwen_serve.bench.load.client import Client
from qwen_serve.bench.load.vocabulary import find_vocabulary
from qwen_serve.bench.store import load
from tests.bench.fake_server import CONTEXT, Body, FakeReply, FakeServer, Script

BY_NAME = {check.name: check for check in CHECKS}


async def outcomes(server: FakeServer, names: list[str]) -> dict[str, str]:
    """Run the named checks: name to "pass", "skip", or "FAIL: why"."""
    found = {}
    async with Client(server.url, timeout=60) as client:
        target = Target(client, await find_vocabulary(None, client, None), CONTEXT, 256, 9 * 2**20)
        for name in names:
            outcome = await run_check(BY_NAME[name], target, 60)
            found[name] = (
                f"{outcome.status}: {outcome.detail}" if outcome.status == "FAIL" else outcome.status
            )
    return found


@pytest.fixture(scope="module")
def good_server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


BEYOND_THE_FAKE = {
    *(name for name in BY_NAME if name.startswith("structured.")),
    *("errors.schema_not", "errors.regex_open", "errors.choice_empty", "errors.grammar_open"),
    *("errors.response_format_xml", "errors.tool_choice_alone", "errors.reasoning_effort_unknown"),
    *("errors.thinking_budget_negative", "errors.thinking_budget_of_a_completion"),
}
"""The fake server follows no grammar and counts no thoughts: these are seen to pass against the real one, and
here to fail."""


async def test_a_server_without_structured_output_fails(good_server: FakeServer) -> None:
    found = await outcomes(good_server, sorted(BEYOND_THE_FAKE))
    assert [name for name, status in found.items() if status == "pass"] == []


async def test_a_server_that_keeps_the_contract_passes(good_server: FakeServer) -> None:
    found = await outcomes(good_server, [name for name in BY_NAME if name not in BEYOND_THE_FAKE])
    assert {name: status for name, status in found.items() if status != "pass"} == {}


def test_names_are_unique_and_every_rule_is_in_words() -> None:
    assert len(BY_NAME) == len(CHECKS)
    assert all(check.what for check in CHECKS)


def without(*fields: str) -> Callable[[str, Body], Body]:
    """Requests lose these fields: the server ignores them."""
    return lambda _, body: {name: value for name, value in body.items() if name not in fields}


def mended(field: str, bad: Any, good: Any) -> Callable[[str, Body], Body]:
    """Bad values of a field are quietly mended: the server is lenient."""
    return lambda _, body: {**body, field: good} if field in body and body[field] == bad else body


def answer_with(**changes: Any) -> Callable[[str, Body], Body]:
    return lambda _, answer: {**answer, **changes}


def usage_with(**changes: Any) -> Callable[[str, Body], Body]:
    return lambda _, answer: {**answer, "usage": {**answer["usage"], **changes}}


def choice_with(**changes: Any) -> Callable[[str, Body], Body]:
    return lambda _, answer: {**answer, "choices": [{**choice, **changes} for choice in answer["choices"]]}


def inline_thinking(_: str, answer: Body) -> Body:
    """Reasoning in the content, as a server without a parser gives it."""
    for choice in answer["choices"]:
        message = choice.get("message", {})
        thought = message.pop("reasoning_content", None)
        if thought:
            message["content"] = f"<think>{thought}</think>{message['content']}"
    return answer


def everything_at_once() -> Callable[[str, Body], Body | None]:
    """Text pieces are held back: only the first one comes, with nothing behind it."""
    seen: dict[str, int] = {}

    def drop(_: str, event: Body) -> Body | None:
        for choice in event["choices"]:
            if choice.get("text"):
                seen[event["id"]] = seen.get(event["id"], 0) + 1
                return event if seen[event["id"]] == 1 else None
        return event

    return drop


def event_usage(_: str, event: Body) -> Body:
    return {**event, "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}


def answer_first(_: str, event: Body) -> Body:
    """Content and reasoning swap places in a stream."""
    for choice in event["choices"]:
        delta = choice.get("delta", {})
        if "reasoning_content" in delta:
            delta["content"] = delta.pop("reasoning_content")
        elif delta.get("content"):
            delta["reasoning_content"] = delta.pop("content")
    return event


def torn_call(_: str, event: Body) -> Body:
    """A tool call whose arguments have no end, in a reply that says it has one."""
    for choice in event["choices"]:
        function = {"name": "get_weather", "arguments": "{"}
        choice["delta"] = {"tool_calls": [{"index": 0, "id": "call_1", "function": function}]}
        choice["finish_reason"] = "tool_calls"
    return {**event, "choices": event["choices"][:1]}


def first_system(_: str, body: Body) -> Body:
    """Late system messages are dropped."""
    messages = body.get("messages", [])
    kept = [message for i, message in enumerate(messages) if not i or message["role"] != "system"]
    return {**body, "messages": kept}


def nonce_in_front(_: str, body: Body) -> Body:
    """The prompt begins anew with each request."""
    return {**body, "system": [{"type": "text", "text": f"{uuid4().hex} "}, *body.get("system", [])]}


def without_event(kind: str) -> Callable[[str, Body], Body | None]:
    return lambda _, event: None if event.get("type") == kind else event


DEFECTS: list[tuple[str, Script, list[str]]] = [
    (
        "not ready",
        Script(fail=lambda path: 503 if path in ("/ping", "/health") else None),
        ["health.ping", "health.health"],
    ),
    ("no model card", Script(fail=lambda path: 404 if path == "/v1/models" else None), ["health.models"]),
    ("no metrics", Script(fail=lambda path: 404 if path == "/metrics" else None), ["health.metrics"]),
    (
        "wrong object",
        Script(on_answer=answer_with(object="completion")),
        ["shapes.completions", "shapes.chat"],
    ),
    ("no id", Script(on_answer=answer_with(id="")), ["shapes.completions", "shapes.invocations_prompt"]),
    ("no choices", Script(on_answer=answer_with(choices=[])), ["shapes.completions"]),
    (
        "created long ago",
        Script(on_answer=answer_with(created=1)),
        ["shapes.chat", "shapes.invocations_messages"],
    ),
    (
        "total does not add up",
        Script(on_answer=usage_with(total_tokens=1)),
        ["shapes.completions", "shapes.chat"],
    ),
    ("no cached tokens", Script(on_answer=usage_with(prompt_tokens_details=None)), ["shapes.completions"]),
    (
        "claims too many tokens",
        Script(on_answer=usage_with(completion_tokens=99)),
        ["shapes.completion_count", "shapes.finish_length", "thinking.counted"],
    ),
    (
        "claims too few prompt tokens",
        Script(on_answer=usage_with(prompt_tokens=1)),
        ["shapes.prompt_count", "shapes.raw", "prompts.token_ids", "chat.no_injection"],
    ),
    (
        "own model name",
        Script(on_answer=answer_with(model="mine")),
        ["shapes.model_echo", "concurrency.answers"],
    ),
    (
        "always stop",
        Script(on_answer=choice_with(finish_reason="stop")),
        ["shapes.finish_length", "thinking.truncated"],
    ),
    (
        "always length",
        Script(on_answer=choice_with(finish_reason="length")),
        ["shapes.finish_stop", "parameters.stop"],
    ),
    (
        "unknown reason",
        Script(on_answer=choice_with(finish_reason="eos")),
        ["shapes.completions", "shapes.chat"],
    ),
    (
        "ignores temperature",
        Script(on_request=lambda _, body: {**body, "temperature": 1.5}),
        ["parameters.greedy", "streaming.joins"],
    ),
    ("ignores top_k", Script(on_request=without("top_k")), ["parameters.narrow"]),
    ("ignores top_p", Script(on_request=without("top_p")), ["parameters.narrow"]),
    ("ignores min_p", Script(on_request=without("min_p")), ["parameters.narrow"]),
    ("ignores seed", Script(on_request=without("seed")), ["parameters.seed"]),
    (
        "one seed for all",
        Script(on_request=lambda _, body: {**body, "seed": 1}),
        ["parameters.seed", "parameters.no_seed"],
    ),
    (
        "ignores penalties",
        Script(on_request=without("frequency_penalty", "presence_penalty")),
        ["parameters.additive_penalties"],
    ),
    (
        "ignores repeat_penalty",
        Script(on_request=without("repeat_penalty")),
        ["parameters.repetition_penalty"],
    ),
    (
        "ignores both spellings",
        Script(on_request=without("repeat_penalty", "repetition_penalty")),
        ["parameters.repetition_penalty"],
    ),
    (
        "ignores stop",
        Script(on_request=without("stop")),
        ["parameters.stop", "streaming.stop", "parameters.max_tokens_unbounded"],
    ),
    (
        "ignores ignore_eos",
        Script(on_request=without("ignore_eos")),
        ["parameters.ignore_eos", "shapes.finish_length"],
    ),
    (
        "ignores max_completion_tokens",
        Script(on_request=without("max_completion_tokens")),
        ["parameters.max_completion_tokens"],
    ),
    (
        "max_tokens is 16 by default",
        Script(on_request=lambda _, body: {"max_tokens": 16, **body}),
        ["parameters.max_tokens_unbounded"],
    ),
    (
        "no default limit",
        Script(on_request=lambda _, body: {"n_predict": -1, **body}),
        ["tokens.default_limit"],
    ),
    ("ignores n_predict", Script(on_request=without("n_predict")), ["tokens.n_predict"]),
    ("ignores min_tokens", Script(on_request=without("min_tokens")), ["tokens.min_tokens"]),
    ("ignores logit_bias", Script(on_request=without("logit_bias")), ["tokens.logit_bias"]),
    ("ignores allowed tokens", Script(on_request=without("allowed_token_ids")), ["tokens.allowed"]),
    ("ignores bad words", Script(on_request=without("bad_words")), ["tokens.bad_words"]),
    ("ignores stop tokens", Script(on_request=without("stop_token_ids")), ["tokens.stop_token_ids"]),
    (
        "never includes a stop",
        Script(on_request=without("include_stop_str_in_output")),
        ["tokens.stop_token_ids", "tokens.included_stop"],
    ),
    (
        "no log-probabilities",
        Script(on_answer=choice_with(logprobs=None)),
        ["logprobs.chat", "logprobs.completion", "logprobs.echo", "logprobs.generated_and_given"],
    ),
    ("no alternatives", Script(on_request=without("top_logprobs")), ["logprobs.chat"]),
    ("no streamed log-probabilities", Script(on_event=choice_with(logprobs=None)), ["logprobs.streamed"]),
    ("ignores n", Script(on_request=without("n")), ["prompts.n", "chat.n", "streaming.choices"]),
    (
        "ignores echo",
        Script(on_request=without("echo")),
        ["prompts.echo", "prompts.unicode", "streaming.characters"],
    ),
    ("ignores tools", Script(on_request=without("tools")), ["chat.prompt_grows"]),
    (
        "thinks always",
        Script(
            on_request=lambda _, body: {
                **body,
                "thinking": True,
                "chat_template_kwargs": None,
                "reasoning_effort": None,
            }
        ),
        ["thinking.off"],
    ),
    (
        "never thinks",
        Script(on_request=without("thinking", "chat_template_kwargs", "reasoning_effort")),
        ["thinking.on", "thinking.on_invocations", "thinking.streamed_order", "thinking.truncated"],
    ),
    ("one spelling only", Script(on_request=without("reasoning_effort")), ["thinking.on"]),
    ("tags in the content", Script(on_answer=inline_thinking), ["thinking.on", "thinking.on_invocations"]),
    ("answers before it reasons", Script(on_event=answer_first), ["thinking.streamed_order"]),
    ("empty answers", Script(reply=lambda _: FakeReply("")), ["thinking.off"]),
    ("no [DONE]", Script(end_streams=False), ["streaming.form", "streaming.joins"]),
    ("many ids", Script(on_event=lambda _, event: {**event, "id": str(id(event))}), ["streaming.form"]),
    ("usage in every chunk", Script(on_event=event_usage), ["streaming.no_usage", "streaming.usage"]),
    ("no timings", Script(on_request=without("timings_per_token")), ["streaming.timings"]),
    ("no usage chunk", Script(on_request=without("stream_options")), ["streaming.usage"]),
    ("text is lost", Script(on_event=everything_at_once()), ["streaming.joins", "streaming.incremental"]),
    ("lenient about zero", Script(on_request=mended("max_tokens", 0, 1)), ["errors.max_tokens_zero"]),
    (
        "lenient about numbers",
        Script(on_request=mended("prompt", 5, "5")),
        ["errors.prompt_number", "streaming.bad_request"],
    ),
    (
        "lenient about messages",
        Script(on_request=mended("messages", [], [{"role": "user", "content": ""}])),
        ["errors.messages_empty", "streaming.bad_request"],
    ),
    ("no request ids", Script(request_ids=False), ["health.request_id"]),
    ("a page with files from elsewhere", Script(page='<script src="//cdn.example/x.js">'), ["health.page"]),
    (
        "closes what the client began",
        Script(on_request=without("continue_final_message", "add_generation_prompt")),
        ["chat.prefill", "chat.prefill_user"],
    ),
    ("tears a call's arguments", Script(on_event=torn_call), ["chat.streamed_calls"]),
    ("forgets late system messages", Script(on_request=first_system), ["chat.system_messages"]),
    ("a type of its own", Script(on_answer=answer_with(type="completion")), ["messages.shape"]),
    ("blocks stay open", Script(on_event=without_event("content_block_stop")), ["messages.events"]),
    ("ignores stop_sequences", Script(on_request=without("stop_sequences")), ["messages.stop_reasons"]),
    ("miscounts", Script(on_answer=answer_with(input_tokens=1, count=1)), ["messages.count_tokens"]),
    ("never thinks in messages", Script(on_request=without("thinking")), ["messages.thinking"]),
    ("a nonce in front", Script(on_request=nonce_in_front), ["messages.nonce"]),
    (
        "a limit of its own",
        Script(on_request=lambda _, body: {"max_tokens": 16, **body}),
        ["messages.refusals"],
    ),
    ("not a response", Script(on_answer=answer_with(object="answer")), ["responses.shape"]),
    ("no deltas", Script(on_event=without_event("response.output_text.delta")), ["responses.events"]),
    (
        "ignores max_output_tokens",
        Script(on_request=without("max_output_tokens")),
        ["responses.incomplete"],
    ),
    ("never reasons", Script(on_request=without("reasoning")), ["responses.reasoning"]),
    ("tells no alternatives", Script(on_request=without("top_logprobs")), ["responses.logprobs"]),
    ("ignores instructions", Script(on_request=without("instructions")), ["responses.items"]),
    ("pretends to remember", Script(on_request=without("previous_response_id")), ["responses.refusals"]),
    (
        "counts wrongly",
        Script(on_answer=answer_with(count=1)),
        ["endpoints.tokenize_prompt", "endpoints.tokenize_messages"],
    ),
    (
        "says nothing of itself",
        Script(on_answer=answer_with(total_slots=0, version="", id="other")),
        ["endpoints.props", "endpoints.version", "endpoints.model"],
    ),
    (
        "refuses without a word",
        Script(on_answer=answer_with(error={"message": "Not Found"})),
        ["endpoints.embeddings"],
    ),
    (
        "5xx",
        Script(fail=lambda path: 500 if path.startswith("/v1/c") else None),
        ["errors.prompt_number", "errors.json_broken", "errors.still_well", "shapes.chat"],
    ),
]


@pytest.mark.parametrize(("script", "names"), [row[1:] for row in DEFECTS], ids=[row[0] for row in DEFECTS])
async def test_a_broken_rule_fails_its_checks(script: Script, names: list[str]) -> None:
    with FakeServer(script) as server:
        found = await outcomes(server, names)
    assert {name: status[:4] for name, status in found.items()} == dict.fromkeys(names, "FAIL"), found
    assert not any("malformed answer" in status for status in found.values()), found


async def test_without_a_tokenizer_some_checks_are_skipped() -> None:
    with FakeServer(Script(tokenizer=None)) as server:
        found = await outcomes(
            server, ["shapes.prompt_count", "prompts.token_ids_equal_string", "shapes.chat"]
        )
    assert list(found.values()) == ["skip", "skip", "pass"]


def test_the_command(good_server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--url", good_server.url, "--name", "fake", "--out", str(tmp_path)]
    assert main(["conformance", *options, "--only", "health.*", "--skip", "health.metrics"]) == 0
    shown = capsys.readouterr().out
    assert "1/7 pass  health.ping" in shown
    assert "health.metrics" not in shown
    assert "Conformance of fake (fake)" in shown
    results = load([tmp_path])
    passed = results.of(metric="passed")
    assert set(passed["value"]) == {1.0}
    assert passed["cell"].tolist()[:2] == ["health.ping", "health.health"]
    assert len(results.of(metric="seconds")) == 7


def test_a_failure_is_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(Script(on_answer=answer_with(id=""), tokenizer=None)) as server:
        options = ["--url", server.url, "--out", str(tmp_path), "--only", "shapes.chat"]
        assert main(["conformance", *options, "--only", "shapes.prompt_count", "--only", "health.ping"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL  shapes.chat" in shown
    assert "FAILED shapes.chat: id: got ''" in shown
    results = load([tmp_path])
    assert dict(results.of(metric="passed")[["cell", "value"]].itertuples(index=False)) == {
        "health.ping": 1.0,
        "shapes.chat": 0.0,
    }
    assert results.of(metric="skipped")["cell"].tolist() == ["shapes.prompt_count"]
    (manifest,) = results.manifests.values()
    assert manifest.status == "finished"


def test_bad_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path)]
    assert main(["conformance", "--skip", "no.such", *out]) == 1
    assert "no check is named 'no.such'" in capsys.readouterr().err
    assert main(["conformance", "--url", "http://127.0.0.1:9", *out]) == 1
    assert "cannot connect" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--list", "--only", "errors.*"]) == 0
    assert "errors.max_tokens_zero" in capsys.readouterr().out
