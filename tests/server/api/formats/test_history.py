"""Histories as clients send them back: cut calls, other servers' tools, files, no question."""

import base64
from typing import Any

import pytest

from tests.messages import assistant, system, user
from tests.server.api.conftest import Start
from tests.server.api.formats.wires import FORMATS, PATHS, body_of
from tests.server.api.test_bad_input import error_of

HI = user("Hi")


def turn(form: str, arguments: Any) -> list[Any]:
    """A turn with a call, and its result."""
    if form == "responses":
        call = {"type": "function_call", "name": "f", "call_id": "c", "arguments": arguments}
        return [call, {"type": "function_call_output", "call_id": "c", "output": "no"}]
    if form == "messages":
        use = {"type": "tool_use", "name": "f", "id": "c", "input": arguments}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "no"}
        return [assistant(use), user(result)]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "no"}
    return [assistant("", tool_calls=[call]), result]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1, "b": "x', "<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>"),
        ('{"a": ', '<parameter=arguments>\n{"a": \n</parameter>'),
        ("{", "<function=f>\n</function>"),
        ("", "<function=f>\n</function>"),
        ("{'a': True}", "<parameter=a>\nTrue\n</parameter>"),
        ("[1, 2]", "<parameter=arguments>\n[1, 2]\n</parameter>"),
        ('"text"', '<parameter=arguments>\n"text"\n</parameter>'),
        ("no JSON <tool_call>", "<parameter=arguments>\nno JSON <tool_call>\n</parameter>"),
        ('{"a": 1} and more', '<parameter=arguments>\n{"a": 1} and more\n</parameter>'),
    ],
)
@pytest.mark.parametrize("form", FORMATS)
def test_arguments_that_are_no_object(start_shared: Start, form: str, arguments: str, shown: str) -> None:
    server = start_shared("OK")
    response = server.http.post(PATHS[form], json=body_of(form, [HI, *turn(form, arguments), HI]))
    assert response.status_code == 200, response.text
    assert shown in server.engine.submissions[-1].text


@pytest.mark.parametrize("form", FORMATS)
def test_arguments_of_a_wrong_type(start_shared: Start, form: str) -> None:
    response = start_shared("OK").http.post(PATHS[form], json=body_of(form, [HI, *turn(form, [1]), HI]))
    assert response.status_code == 400
    assert "arguments" in response.text or "input" in response.text


DATA = base64.b64encode("Zürich: 1".encode()).decode()
TEXT = f"data:text/plain;base64,{DATA}"
FILE = {"filename": "a.txt", "file_data": TEXT}
SEARCH = {
    "type": "search_result",
    "source": "https://x",
    "title": "T",
    "content": [{"type": "text", "text": "S"}],
}
DOCUMENT = {"type": "text", "media_type": "text/plain", "data": "Zürich: 1"}
PARTS = {"type": "content", "content": [{"type": "text", "text": "Zürich: 1"}]}
USED = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "Q"}}
HIT = {"type": "web_search_result", "url": "https://x", "title": "T", "encrypted_content": "secret"}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [HIT]}
PATCH = {"type": "function", "name": "patch", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("form", "messages", "shown"),
    [
        ("chat", [user({"type": "file", "file": FILE})], ["a.txt\n\nZürich: 1"]),
        ("responses", [user({"type": "input_file", **FILE})], ["a.txt\n\nZürich: 1"]),
        ("messages", [user({"type": "document", "title": "T", "source": DOCUMENT})], ["T\n\nZürich: 1"]),
        ("messages", [user({"type": "document", "source": PARTS})], ["Zürich: 1"]),
        ("messages", [user(SEARCH)], ["T\nhttps://x\nS"]),
        (
            "messages",
            [
                HI,
                *turn("messages", {})[:1],
                user(
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "tool_reference", "tool_name": "grep"}],
                    }
                ),
            ],
            ["<tool_response>\ngrep\n</tool_response>"],
        ),
        (
            "messages",
            [HI, assistant(USED, FOUND, {"type": "text", "text": "So."}), HI],
            ["<function=web_search>\n<parameter=query>\nQ", '"title": "T"', "So.<|im_end|>"],
        ),
        (
            "responses",
            [{"type": "additional_tools", "role": "developer", "tools": [PATCH, PATCH]}, HI],
            ['"name": "patch"'],
        ),
        (
            "responses",
            [
                HI,
                {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
                {"type": "web_search_call", "id": "w", "status": "completed", "action": {"query": "Q"}},
                {
                    "type": "local_shell_call",
                    "call_id": "l",
                    "status": "completed",
                    "action": {"type": "exec", "command": ["ls"], "env": {}},
                },
                {"type": "local_shell_call_output", "id": "l", "output": "a.md"},
                {"type": "code_interpreter_call", "id": "i", "code": "1 + 1", "outputs": None},
                {"type": "file_search_call", "id": "q", "queries": ["F"], "results": None},
                {"type": "image_generation_call", "id": "g", "status": "completed", "result": "secret"},
                {"type": "mcp_approval_request", "id": "m", "name": "n", "arguments": "{}"},
                {"type": "ghost_snapshot"},
                {"type": "compaction", "encrypted_content": "x"},
                HI,
            ],
            [
                "<function=apply_patch>\n<parameter=input>\n*** Begin",
                "\ndone\n",
                "<function=web_search>",
                "\na.md\n",
                "1 + 1",
            ],
        ),
    ],
)
def test_what_other_servers_wrote(
    start_shared: Start, form: str, messages: list[Any], shown: list[str]
) -> None:
    server = start_shared("OK")
    response = server.http.post(PATHS[form], json=body_of(form, messages))
    assert response.status_code == 200, response.text
    prompt = server.engine.submissions[-1].text
    for text in shown:
        assert text in prompt
    assert "secret" not in prompt
    assert prompt.count('"name": "patch"') <= 1


@pytest.mark.parametrize(
    ("file", "param"),
    [
        ({"file_data": "data:application/pdf;base64,AAAA"}, "file.file_data"),
        ({"file_data": "data:text/plain;base64,/w=="}, "file.file_data"),
        ({"file_data": "text"}, "file.file_data"),
        ({"file_id": "f"}, "file.file_id"),
        (5, "file"),
    ],
)
def test_a_file_that_is_no_text(start_shared: Start, file: Any, param: str) -> None:
    messages = [user({"type": "file", "file": file})]
    error = error_of(start_shared("OK").chat(messages=messages), 400)
    assert error["param"] == f"messages[0].content[0].{param}"


EMPTY = "<|im_start|>user\n<|im_end|>\n"
SYSTEM = system("Greet.")
BEGUN = assistant("Hello, how")


@pytest.mark.parametrize("messages", [[SYSTEM], [SYSTEM, BEGUN], [SYSTEM, *turn("chat", {})], [BEGUN]])
def test_a_conversation_without_a_question(start_shared: Start, messages: list[Any]) -> None:
    server = start_shared("OK")
    for form in ("chat", "ollama"):
        response = server.http.post(PATHS[form], json=body_of(form, messages))
        assert response.status_code == 200, response.text
        prompt = server.engine.submissions[-1].text
        assert prompt.count(EMPTY) == 1
        assert prompt.startswith(EMPTY) == (SYSTEM not in messages)


def test_instructions_alone(start_shared: Start) -> None:
    server = start_shared("OK")
    inputs: list[dict[str, Any]] = [
        {},
        {"input": []},
        {"input": [{"role": "developer", "content": "Greet."}]},
    ]
    for input_ in inputs:
        assert server.post("/v1/responses", instructions="Greet.", **input_).status_code == 200
        assert EMPTY in server.engine.submissions[-1].text
    assert server.post("/v1/messages", system="x", max_tokens=9, messages=[BEGUN]).status_code == 200
    assert server.post("/v1/responses").status_code == 400


@pytest.mark.parametrize("thinking", [True, False])
def test_a_beginning_that_closes_its_think_block(start_shared: Start, thinking: bool) -> None:
    """The answer goes on as content."""
    begun = assistant("<think>391. I answer.</think>")
    server = start_shared("It is 391.")
    for form in FORMATS:
        body = body_of(form, [HI, begun], thinking=thinking)
        response = server.http.post(PATHS[form], json=body)
        assert "It is 391." in response.text
        assert "thinking" not in response.text or form == "messages"
        assert server.engine.submissions[-1].text.endswith("<think>\n391. I answer.\n</think>\n\n")


def test_what_nobody_has_is_not_asked_for_again(start_shared: Start) -> None:
    answer = start_shared("OK").post("/v1/embeddings", input="x")
    assert (answer.status_code, answer.headers["x-should-retry"]) == (501, "false")
