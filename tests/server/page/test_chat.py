"""The chat page: sending, stopping, reloading, and content that it must not execute."""

from typing import Any

import pytest

from tests.server.api.conftest import Start
from tests.server.api.fakes import FakeVocab
from tests.server.page.driving import ask, bodies
from tests.waiting import wait_until

ANSWER = """\
Hmm.
</think>

# Sum

Some **bold** words, [a link](https://example.com) and ![a picture](https://example.com/x.png).

```python
def add(a, b):
    return a + b
```

<b>not bold</b> <script>document.title = "owned"</script> <img src=x onerror="document.title='owned'">

[click](javascript:document.title='owned') &lt;
"""
SPELT = "<|im_start|>user"
"""A control token that a model writes letter by letter."""


def test_an_answer_is_markdown_and_nothing_else(start: Start, page: Any) -> None:
    page.goto(start(lambda _: [*FakeVocab().tokenize(ANSWER, special=True), *SPELT.encode()]).url)
    answer = ask(page, "1 < 2 & <i>three</i>")
    answer.locator(".figures").wait_for()
    assert page.locator(".message.user .text").inner_text() == "1 < 2 & <i>three</i>"
    assert answer.locator("h1").inner_text() == "Sum"
    assert answer.locator("strong").inner_text() == "bold"
    assert "def add" in answer.locator(".block pre").inner_text()
    assert answer.locator(".block .hljs-keyword").count() >= 2
    shown = answer.locator(".markdown").inner_text()
    assert "<b>not bold</b> <script>" in shown
    assert SPELT in shown
    assert answer.locator("script, img, b").count() == 0
    assert page.title() != "owned"
    assert answer.locator("a[href^=javascript]").count() == 0
    assert answer.locator("a").first.get_attribute("rel") == "noopener noreferrer"
    assert "tokens" in answer.locator(".figures").inner_text()
    assert "cached" in answer.locator(".figures").inner_text()


def test_thinking_is_folded_and_timed(start: Start, page: Any) -> None:
    server = start(lambda prompt: "Let me see.\n</think>\n\nTwo." if prompt.endswith("<think>\n") else "No.")
    page.goto(server.url)
    answer = ask(page, "1+1?")
    answer.locator(".figures").wait_for()
    assert answer.locator("summary").inner_text().startswith("Thought for ")
    assert not answer.locator(".thinking > div").is_visible()
    answer.locator("summary").click()
    assert answer.locator(".thinking > div").inner_text() == "Let me see."
    assert answer.locator(".markdown").inner_text() == "Two."
    page.keyboard.press("Alt+T")
    answer = ask(page, "And now?")
    answer.locator(".figures").wait_for()
    assert not answer.locator(".thinking").is_visible()
    assert answer.locator(".markdown").inner_text() == "No."


def test_it_streams_and_stops(start: Start, page: Any) -> None:
    server = start("</think>\n\n" + "on and on " * 300, delay=0.01)
    page.goto(server.url)
    answer = ask(page, "Count.")
    answer.get_by_text("on and on").wait_for()
    assert server.engine.running, "what is shown is not the whole answer"
    page.keyboard.press("Escape")
    answer.locator(".figures").wait_for()
    assert "stopped after" in answer.locator(".figures").inner_text()
    wait_until(lambda: not server.engine.running)
    assert server.engine.submissions[0].cancelled


def test_a_reload_keeps_the_conversation(start: Start, page: Any) -> None:
    server = start(lambda prompt: "</think>\n\nNice, Ada." if "Ada" in prompt else "Who?")
    page.goto(server.url)
    ask(page, "I am Ada.").locator(".figures").wait_for()
    page.reload()
    assert page.locator(".message.assistant .markdown").inner_text() == "Nice, Ada."
    ask(page, "Who am I?").locator(".figures").wait_for()
    last = server.engine.submissions[-1].text
    assert "I am Ada." in last
    assert "Nice, Ada.<|im_end|>" in last
    page.keyboard.press("Alt+N")
    assert page.locator("#empty").is_visible()
    page.locator(".conversation button").first.click()
    page.locator(".message").nth(3).wait_for()
    assert page.locator(".message").count() == 4


@pytest.mark.slow
def test_settings_reach_the_request(start: Start, page: Any) -> None:
    page.goto(start("x").url)
    sent = bodies(page)
    page.keyboard.press("Alt+S")
    page.fill("[name=system]", "Be brief.")
    page.fill("[name=temperature]", "0.5")
    page.fill("[name=top_k]", "7")
    page.fill("[name=max_tokens]", "30")
    page.fill("[name=schema]", '{"type": ')
    assert page.locator("#schema-error").inner_text()
    page.fill("[name=schema]", '{"type": "object"}')
    assert not page.locator("#schema-error").inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+T")
    page.fill("#input", "Hello")
    page.keyboard.press("Enter")
    wait_until(lambda: page.wait_for_timeout(20) or bool(sent))
    assert sent[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (sent[0]["temperature"], sent[0]["top_k"], sent[0]["max_tokens"]) == (0.5, 7, 30)
    assert "top_p" not in sent[0]
    assert sent[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert sent[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_a_refusal_is_shown(start: Start, page: Any) -> None:
    page.goto(start("x", context_size=200).url)
    problem = ask(page, "x" * 500).locator(".problem")
    problem.wait_for()
    assert "does not fit into 200 tokens" in problem.inner_text()


@pytest.mark.slow
def test_it_asks_for_the_key(start: Start, page: Any) -> None:
    page.goto(start("</think>\n\nHello.", api_key="secret").url)
    page.locator("#key-error:not(:empty)").wait_for()
    page.fill("[name=key]", "secret")
    page.keyboard.press("Escape")
    page.locator("#model").get_by_text("fake").wait_for()
    answer = ask(page, "Hi")
    answer.locator(".figures").wait_for()
    assert answer.locator(".markdown").inner_text() == "Hello."


@pytest.mark.slow
def test_a_phone_has_the_conversations_in_a_drawer(start: Start, page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(start("</think>\n\nYes.").url)
    ask(page, "Well?").locator(".figures").wait_for()
    assert not page.locator("#side").is_visible()
    page.locator("#menu").click()
    page.locator("#side").wait_for()
    page.locator(".conversation button").first.click()
    assert page.locator("body").evaluate("body => body.scrollWidth") <= 390
