"""Actions of tests on the chat page."""

from typing import Any


def ask(page: Any, text: str) -> Any:
    """Type a message and send it. Returns the last answer."""
    answers = page.locator(".message.assistant").count()
    page.fill("#input", text)
    page.keyboard.press("Enter")
    answer = page.locator(".message.assistant").nth(answers)
    answer.wait_for()
    return answer


def bodies(page: Any) -> list[dict[str, Any]]:
    """The chat requests that the page sends from now on."""
    sent: list[dict[str, Any]] = []
    page.on("request", lambda r: sent.append(r.post_data_json) if r.url.endswith("/completions") else None)
    return sent


def answered(page: Any, text: str) -> Any:
    """Send a message and wait for the complete answer."""
    answer = ask(page, text)
    answer.locator(".figures").wait_for()
    return answer
