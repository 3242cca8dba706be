"""Tools: calls are shown and asked for, run in a sandbox or on MCP servers, and the model goes on."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.http_server import JsonHandler, serving
from tests.server.api.conftest import Start
from tests.server.api.fakes import FakeVocab
from tests.server.page.driving import answered, ask, bodies

RUN = """async (code) => {
  const { runCode } = await import("/page/sandbox.js");
  return runCode(code, new AbortController().signal);
}"""


def call(name: str, **given: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def script(first: str, then: str) -> Any:
    """Calls at first, and answers once there is a result."""

    def say(prompt: str) -> Any:
        last = prompt.rpartition("<|im_start|>user")[2]
        text = then if "<tool_response>" in last else first
        return FakeVocab().tokenize(f"Hm.\n</think>\n\n{text}", special=True)

    return say


def use_javascript(page: Any) -> None:
    page.locator("#model").get_by_text("fake").wait_for()
    page.keyboard.press("Alt+S")
    page.locator("#tools summary").click()
    page.check("#javascript")
    page.keyboard.press("Escape")
    page.locator("#tools-chip").wait_for()


@pytest.fixture
def mcp() -> Iterator[ThreadingHTTPServer]:
    """An MCP server with one tool, which answers with events or JSON in turn, and forgets a session once."""

    class Mcp(JsonHandler, BaseHTTPRequestHandler):
        sessions = iter(["one", "two", "three"])
        asked: list[dict[str, Any]] = []  # noqa: RUF012
        calls = 0
        go = threading.Event()

        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.asked.append({**message, "key": self.headers["authorization"]})
            headers: dict[str, str] = {}
            result: dict[str, Any] = {}
            match message["method"]:
                case "initialize":
                    headers["Mcp-Session-Id"] = next(Mcp.sessions)
                    result = {
                        "protocolVersion": "2025-06-18",
                        "capabilities": {},
                        "serverInfo": {"name": "x"},
                    }
                case "notifications/initialized":
                    return self.answer(202, b"")
                case "tools/list":
                    schema = {
                        "type": "object",
                        "properties": {"city": {"type": "string"}},
                        "required": ["city"],
                    }
                    result = {
                        "tools": [{"name": "get.weather", "description": "Weather", "inputSchema": schema}]
                    }
                case "tools/call":
                    Mcp.calls += 1
                    if Mcp.calls == 1:
                        return self.answer(404, b"{}")
                    if message["params"]["arguments"]["city"] == "Slow":
                        Mcp.go.wait(60)
                    result = {"content": [{"type": "text", "text": "<b>Rain</b>, 9 °C"}], "isError": False}
            body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
            if message["id"] % 2:
                return self.answer(200, body.encode(), **headers)
            events = f": hello\n\nevent: message\ndata: {body}\n\n"
            return self.answer(200, events.encode(), **{"Content-Type": "text/event-stream"}, **headers)

    with serving(Mcp) as server:
        yield server
        Mcp.go.set()


def test_javascript_is_asked_for_runs_and_its_result_is_told(start: Start, page: Any) -> None:
    server = start(script(call("run_javascript", code="17 * 23"), "It is 391."))
    page.goto(server.url)
    sent = bodies(page)
    use_javascript(page)
    page.set_viewport_size({"width": 390, "height": 400})
    answered(page, "17 * 23?")
    card = page.get_by_role("group", name="Call of run_javascript")
    assert card.locator("pre").inner_text() == "code: 17 * 23"
    assert sent[0]["tools"][0]["function"]["name"] == "run_javascript"
    assert len(sent) == 1, "it waits to be allowed"
    ends = """one => one.scrollHeight > one.clientHeight
      && one.scrollHeight - one.scrollTop - one.clientHeight < 60"""
    assert page.locator("#scroll").evaluate(ends), "its buttons are in view"
    page.reload()
    card.get_by_role("button", name="Run", exact=True).click()
    page.locator(".message.assistant .markdown").get_by_text("It is 391.").wait_for()
    assert card.locator("details pre").inner_text() == "391"
    told = sent[1]["messages"]
    assert [message["role"] for message in told] == ["user", "assistant", "tool"]
    assert told[1]["tool_calls"][0]["function"] == {
        "name": "run_javascript",
        "arguments": '{"code": "17 * 23"}',
    }
    assert told[2] == {"role": "tool", "tool_call_id": told[1]["tool_calls"][0]["id"], "content": "391"}
    page.locator("#tools-chip").click()
    answered(page, "And without?")
    assert "tools" not in sent[2]


def test_a_call_that_is_not_allowed_is_told_and_one_passed_over_too(start: Start, page: Any) -> None:
    page.goto(start(script(call("run_javascript", code="1"), "Then not.")).url)
    sent = bodies(page)
    use_javascript(page)
    answered(page, "One?")
    page.get_by_role("button", name="Do not run").click()
    page.locator(".message.assistant .markdown").get_by_text("Then not.").wait_for()
    assert sent[1]["messages"][-1]["content"] == "The user did not allow this call."
    answered(page, "Two?")
    answered(page, "Three?")
    assert sent[3]["messages"][-2]["content"] == "This call was not run."
    assert page.get_by_text("It was not run.").count() == 1


def test_the_sandbox_has_no_network_no_origin_and_an_end(start: Start, page: Any) -> None:
    url = start("x").url.rstrip("/")
    page.goto(url)
    for code, text in (
        ("2n ** 70n", "1180591620717411303424"),
        ("const a = [3, 1, 2]; a.sort(); return a", "[1,2,3]"),
        ("console.log('one', {two: 2}); return 3", 'one {"two":2}\n3'),
        ("new Date(Date.UTC(2024, 1, 29)).toISOString()", "2024-02-29T00:00:00.000Z"),
    ):
        assert page.evaluate(RUN, code) == {"failed": False, "text": text}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for code in (
            f"fetch('http://127.0.0.1:{port}/').then((r) => r.status)",
            f"fetch('{url}/v1/models').then((r) => r.status)",
            f"importScripts('http://127.0.0.1:{port}/x.js')",
            f"importScripts('{url}/page/elements.js')",
            f"import('{url}/page/elements.js')",
            f"new Promise((_, no) => {{ new WebSocket('ws://127.0.0.1:{port}').onerror = no; }})",
            f"const r = new XMLHttpRequest(); r.open('GET', 'http://127.0.0.1:{port}', false); r.send()",
            "indexedDB.open('qwen-serve')",
            "caches.keys()",
            "localStorage.length",
            "document.title = 'owned'",
            "throw new Error('no')",
            "nope(",
        ):
            assert page.evaluate(RUN, code)["failed"], code
        listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert page.evaluate(RUN, "for (;;) {}")["text"] == "It did not end within 10 seconds."
    assert page.evaluate("document.querySelectorAll('iframe').length") == 0
    assert page.title() != "owned"


def test_an_mcp_server_is_added_and_called(start: Start, page: Any, mcp: ThreadingHTTPServer) -> None:
    origin = f"http://127.0.0.1:{mcp.server_port}"
    page.goto(start(script(call("get_weather", city="Slow"), "Wet."), mcp_origins=origin).url)
    sent = bodies(page)
    page.locator("#model").get_by_text("fake").wait_for()
    page.keyboard.press("Alt+S")
    page.locator("#tools summary").click()
    page.fill("#mcp-url", "http://127.0.0.1:1/mcp")
    page.click("#mcp-add-button")
    page.locator("#mcp-error").get_by_text("--mcp-origins").wait_for()
    page.fill("#mcp-url", f"{origin}/mcp")
    page.fill("#mcp-key", "Bearer theirs")
    page.keyboard.press("Enter")
    page.locator("#mcp-servers").get_by_text("1 tools: get.weather").wait_for()
    page.keyboard.press("Escape")
    answered(page, "Weather?")
    assert sent[0]["tools"][0]["function"]["name"] == "get_weather"
    card = page.get_by_role("group", name="Call of get_weather")
    assert f"{origin}/mcp" in card.inner_text()
    card.get_by_role("button", name="Run", exact=True).click()
    page.get_by_label("Stop", exact=True).click()
    card.get_by_text("The user stopped it.").wait_for()
    assert len(sent) == 1, "it does not go on"
    mcp.RequestHandlerClass.go.set()  # type: ignore[attr-defined]
    page.get_by_label("Answer again").click()
    card.get_by_role("button", name="Run", exact=True).click()
    page.locator(".message.assistant .markdown").get_by_text("Wet.").wait_for()
    assert card.locator("details pre").inner_text() == "<b>Rain</b>, 9 °C"
    asked = mcp.RequestHandlerClass.asked  # type: ignore[attr-defined]
    assert {message["key"] for message in asked} == {"Bearer theirs"}
    assert [message["method"] for message in asked].count("initialize") == 2, (
        "a session that is gone is begun anew"
    )
    page.reload()
    page.locator("#tools-chip").wait_for()
    page.keyboard.press("Alt+S")
    page.locator("#tools summary").click()
    page.get_by_label(f"Remove {origin}/mcp").click()
    page.keyboard.press("Escape")
    page.locator("#tools-chip").wait_for(state="hidden")


def test_mcp_servers_are_off_by_default(start: Start, page: Any) -> None:
    page.goto(start("x").url)
    page.locator("#model").get_by_text("fake").wait_for()
    page.keyboard.press("Alt+S")
    page.locator("#tools summary").click()
    page.get_by_text("MCP servers are off").wait_for()
    assert not page.locator("#mcp-url").is_visible()
    assert not page.locator("#tools-chip").is_visible()


def test_calls_are_kept_in_files(start: Start, page: Any, tmp_path: Any) -> None:
    page.goto(start(script(call("run_javascript", code="6 * 7"), "Forty-two.")).url)
    use_javascript(page)
    ask(page, "6 * 7?").get_by_role("button", name="Run", exact=True).click()
    page.locator(".message.assistant .markdown").get_by_text("Forty-two.").wait_for()
    with page.expect_download() as saved:
        page.click("#export")
    saved.value.save_as(tmp_path / "all.json")
    page.set_input_files("#import-file", tmp_path / "all.json")
    page.locator(".conversation").nth(1).wait_for()
    card = page.get_by_role("group", name="Call of run_javascript")
    assert card.locator("details pre").inner_text() == "42"


@pytest.mark.slow
def test_axe_finds_nothing_at_calls_and_edits(start: Start, page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.base", reason="axe-playwright-python is not installed")
    source = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    page.goto(start(script(call("run_javascript", code="6 * 7"), "Forty-two.")).url)
    use_javascript(page)

    def found() -> list[str]:
        page.evaluate(source)
        violations = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
        return [f"{one['id']}: {one['nodes'][0]['html']}" for one in violations]

    run = ask(page, "6 * 7?").get_by_role("button", name="Run", exact=True)
    run.wait_for()
    assert not found()
    run.click()
    page.locator(".message.assistant .markdown").get_by_text("Forty-two.").wait_for()
    page.get_by_label("Edit what was said").click()
    assert not found()
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+S")
    page.locator("#tools summary").click()
    assert not found()
