"""The API's contract: every check of `qwen-bench conformance` passes against a live server, and each theme's
checks fail if a rule is broken."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from qwen_serve.bench.checks.base import CHECKS, Check, Target
from qwen_serve.bench.checks.conformance import Outcome, context_of, run_check
from qwen_serve.bench.cli import main
from qwen_serve.bench.load.client import Client
from qwen_serve.bench.load.vocabulary import find_vocabulary
from qwen_serve.bench.store import load
from tests.marks import slow_but
from tests.messages import user
from tests.server.broken import Body, Break, Broken
from tests.server.serving import EXACT, ServerProcess

BY_NAME = {check.name: check for check in CHECKS}
SECONDS = 300


@pytest.fixture(scope="module")
def url(nano_f32: Path) -> Iterator[str]:
    sizes = ("--parallel", "4", "--ctx-size", "8192", "--max-body-mib", "1")
    with ServerProcess("--model", nano_f32, *sizes, *EXACT) as server:
        yield server.wait_ready()


async def outcome(url: str, check: Check) -> Outcome:
    async with Client(url, timeout=SECONDS) as client:
        vocabulary, context = await find_vocabulary(None, client, None), await context_of(client)
        return await run_check(check, Target(client, vocabulary, context, 256, 2 * 2**20), SECONDS)


LONG = "concurrency.no_starving"  # reads as long a prompt as the context holds


@pytest.mark.parametrize(
    "name", [pytest.param(LONG, marks=pytest.mark.slow), *(name for name in BY_NAME if name != LONG)]
)
async def test_the_contract_is_kept(url: str, name: str) -> None:
    found = await outcome(url, BY_NAME[name])
    assert found.status == "pass", found.detail


def without(*fields: str) -> Callable[[str, Body], Body]:
    """Remove these fields from requests, as if the server ignored them."""
    return lambda _, body: {name: value for name, value in body.items() if name not in fields}


def mended(field: str, bad: Any, good: Any) -> Callable[[str, Body], Body]:
    """Replace invalid values of a field silently, as a lenient server would."""
    return lambda _, body: {**body, field: good} if body.get(field) == bad else body


def answer_with(**changes: Any) -> Callable[[str, Body], Body]:
    return lambda _, answer: {**answer, **changes}


def usage_with(**changes: Any) -> Callable[[str, Body], Body]:
    return lambda _, answer: (
        {**answer, "usage": {**answer["usage"], **changes}} if "usage" in answer else answer
    )


def choice_with(**changes: Any) -> Callable[[str, Body], Body]:
    def change(_: str, answer: Body) -> Body:
        if "choices" not in answer:
            return answer
        return {**answer, "choices": [{**choice, **changes} for choice in answer["choices"]]}

    return change


def answer_first(_: str, event: Body) -> Body:
    """Swap content and reasoning in a stream."""
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        if "reasoning_content" in delta:
            delta["content"] = delta.pop("reasoning_content")
        elif delta.get("content"):
            delta["reasoning_content"] = delta.pop("content")
    return event


def torn_call(_: str, event: Body) -> Body:
    """Cut off a tool call's arguments in a reply whose finish reason is tool_calls."""
    for choice in event["choices"]:
        function = {"name": "get_weather", "arguments": "{"}
        choice["delta"] = {"tool_calls": [{"index": 0, "id": "call_1", "function": function}]}
        choice["finish_reason"] = "tool_calls"
    return event


def refused_arguments(_: str, body: Body) -> Body:
    """Give earlier calls arguments of a type that no server takes."""
    given = body.get("messages", body.get("input"))
    for message in given if isinstance(given, list) else []:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = [1]
        if message.get("type") == "function_call":
            message["arguments"] = [1]
    return body


def nonce_in_front(_: str, body: Body) -> Body:
    """Give each prompt another beginning, so that nothing is cached."""
    return {**body, "system": [{"type": "text", "text": f"{uuid4().hex} "}, *body.get("system", [])]}


def without_event(kind: str) -> Callable[[str, Body], Body | None]:
    return lambda _, event: None if event.get("type") == kind else event


FORMATS: tuple[str, ...] = (
    "response_format",
    "json_schema",
    "guided_json",
    "structured_outputs",
    "guided_regex",
    "regex",
)
FORMATS += ("ebnf", "grammar", "guided_grammar", "guided_choice", "structural_tag", "tool_choice")
THINKING = ("thinking", "chat_template_kwargs", "reasoning_effort")
BUDGETS = ("thinking_budget", "thinking_token_budget", "reasoning_budget", "thinking_budget_tokens")

DEFECTS: dict[str, tuple[Break, list[str]]] = {
    "not ready": (Break(fail=lambda path: 503 if path == "/ping" else None), ["health.ping"]),
    "no request ids": (Break(request_ids=False), ["health.request_id"]),
    "wrong object": (Break(answer=answer_with(object="x")), ["shapes.completions", "responses.shape"]),
    "no choices": (Break(answer=answer_with(choices=[])), ["shapes.completions"]),
    "totals do not add up": (Break(answer=usage_with(total_tokens=1)), ["shapes.chat", "responses.shape"]),
    "claims too many tokens": (
        Break(answer=usage_with(completion_tokens=99)),
        ["shapes.completion_count", "shapes.finish_length", "thinking.counted"],
    ),
    "claims too few prompt tokens": (
        Break(answer=usage_with(prompt_tokens=1)),
        ["shapes.prompt_count", "prompts.token_ids", "chat.no_injection"],
    ),
    "a model name of its own": (
        Break(answer=answer_with(model="mine")),
        ["shapes.model_echo", "concurrency.answers"],
    ),
    "always length": (Break(answer=choice_with(finish_reason="length")), ["shapes.finish_stop"]),
    "one seed for all": (Break(request=lambda _, body: {**body, "seed": 1}), ["parameters.no_seed"]),
    "ignores sampling": (
        Break(request=without("top_k", "top_p", "min_p", "seed", "frequency_penalty", "presence_penalty")),
        ["parameters.narrow", "parameters.seed", "parameters.additive_penalties"],
    ),
    "ignores stop": (Break(request=without("stop")), ["parameters.stop", "streaming.stop"]),
    "ignores ignore_eos": (Break(request=without("ignore_eos")), ["parameters.ignore_eos"]),
    "ignores rules about tokens": (
        Break(request=without("logit_bias", "allowed_token_ids", "bad_words", "stop_token_ids", "n_predict")),
        [
            "tokens.logit_bias",
            "tokens.allowed",
            "tokens.bad_words",
            "tokens.stop_token_ids",
            "tokens.n_predict",
        ],
    ),
    "no log-probabilities": (
        Break(answer=choice_with(logprobs=None), event=choice_with(logprobs=None)),
        ["logprobs.chat", "logprobs.completion", "logprobs.echo", "logprobs.streamed"],
    ),
    "ignores n and echo": (
        Break(request=without("n", "echo")),
        ["prompts.n", "prompts.echo", "chat.n", "streaming.choices"],
    ),
    "ignores tools": (Break(request=without("tools")), ["chat.prompt_grows", "structured.forced"]),
    "closes what the client began": (
        Break(request=without("continue_final_message", "add_generation_prompt")),
        ["chat.prefill_user"],
    ),
    "tears a call's arguments": (Break(event=torn_call), ["chat.streamed_calls"]),
    "thinks always": (
        Break(request=lambda _, body: {**body, "thinking": True, "reasoning_effort": None}),
        ["thinking.off"],
    ),
    "never thinks": (
        Break(request=without(*THINKING, "reasoning")),
        ["thinking.on", "thinking.streamed_order", "messages.thinking", "responses.reasoning"],
    ),
    "answers before it reasons": (Break(event=answer_first), ["thinking.streamed_order"]),
    "follows no format": (
        Break(request=without(*FORMATS)),
        ["structured.schema", "structured.others", "structured.structural_tags", "structured.forced"],
    ),
    "ignores budgets": (Break(request=without(*BUDGETS, "reasoning_budget_tokens")), ["structured.budget"]),
    "no [DONE]": (Break(done=False), ["streaming.form", "streaming.joins"]),
    "many ids": (Break(event=lambda _, event: {**event, "id": uuid4().hex}), ["streaming.form"]),
    "usage in every chunk": (Break(event=answer_with(usage={"total_tokens": 2})), ["streaming.no_usage"]),
    "shares its cache": (Break(request=without("cache_salt")), ["cache.salt", "cache.bad_salt"]),
    "lenient": (Break(request=mended("max_tokens", 0, 1)), ["errors.max_tokens_zero"]),
    "lenient about messages": (
        Break(request=mended("messages", [], [user("")])),
        ["errors.messages_empty", "streaming.bad_request"],
    ),
    "5xx": (
        Break(fail=lambda path: 500 if path.startswith("/v1/c") else None),
        ["errors.prompt_number", "errors.json_broken", "errors.still_well"],
    ),
    "strict about histories": (
        Break(request=refused_arguments),
        ["agents.chat_history", "agents.responses_history", "agents.not_offered"],
    ),
    "blocks stay open": (Break(event=without_event("content_block_stop")), ["messages.events"]),
    "a nonce in front": (Break(request=nonce_in_front), ["messages.nonce"]),
    "no deltas": (Break(event=without_event("response.output_text.delta")), ["responses.events"]),
    "miscounts": (
        Break(answer=lambda path, answer: {**answer, "count": 1, "input_tokens": 1}),
        ["messages.count_tokens", "endpoints.tokenize_prompt"],
    ),
    "refuses without a word": (Break(answer=answer_with(error={"message": "No"})), ["endpoints.embeddings"]),
}


LONG_DEFECTS = {
    "a nonce in front",
    "ignores sampling",
    "follows no format",
    "one seed for all",
    "shares its cache",
}


@pytest.mark.parametrize("defect", slow_but(DEFECTS.keys() - LONG_DEFECTS, DEFECTS))
async def test_a_broken_rule_fails_its_checks(url: str, defect: str) -> None:
    how, names = DEFECTS[defect]
    with Broken(url, how) as server:
        found = {name: await outcome(server.url, BY_NAME[name]) for name in names}
    assert {name: one.status for name, one in found.items()} == dict.fromkeys(names, "FAIL"), found


def test_each_theme_has_a_check_that_is_seen_to_fail() -> None:
    seen = {name.partition(".")[0] for _, names in DEFECTS.values() for name in names}
    assert seen == {name.partition(".")[0] for name in BY_NAME}
    assert len(BY_NAME) == len(CHECKS)


async def test_without_a_tokenizer_some_checks_are_skipped(url: str) -> None:
    with Broken(url, Break(fail=lambda path: 404 if "tokenize" in path else None)) as server:
        statuses = [
            (await outcome(server.url, BY_NAME[f"shapes.{name}"])).status for name in ("prompt_count", "chat")
        ]
    assert statuses == ["skip", "pass"]


def test_the_command(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--url", url, "--name", "nano", "--out", str(tmp_path)]
    assert main(["conformance", *options, "--only", "health.*", "--skip", "health.metrics"]) == 0
    shown = capsys.readouterr().out
    assert "1/7 pass  health.ping" in shown
    assert "health.metrics" not in shown
    assert "Conformance of nano" in shown
    results = load([tmp_path])
    assert set(results.of(metric="passed")["value"]) == {1.0}
    assert len(results.of(metric="seconds")) == 7


def test_a_failure_is_the_exit_status(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = Break(answer=answer_with(id=""), fail=lambda path: 404 if "tokenize" in path else None)
    names = ("shapes.chat", "shapes.prompt_count", "health.ping")
    with Broken(url, how) as server:
        options = ["--url", server.url, "--out", str(tmp_path)]
        assert main(["conformance", *options, *(word for name in names for word in ("--only", name))]) == 1
    shown = capsys.readouterr().out
    assert "FAILED shapes.chat: id: got ''" in shown
    results = load([tmp_path])
    passed = results.of(metric="passed")
    assert dict(zip(passed["cell"], passed["value"], strict=True)) == {"health.ping": 1.0, "shapes.chat": 0.0}
    assert results.of(metric="skipped")["cell"].tolist() == ["shapes.prompt_count"]


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
