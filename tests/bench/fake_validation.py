"""The contract's rules for a request, for the fake server."""

from collections.abc import Mapping, Sequence
from typing import Any

ROLES = {"system", "developer", "user", "assistant", "tool"}
# field: (kind, lowest, highest)
NUMBERS: Mapping[str, tuple[type, float, float]] = {
    "max_tokens": (int, 0, 10**12),
    "n_predict": (int, -1, 10**12),
    "min_tokens": (int, 0, 10**12),
    "top_logprobs": (int, 0, 20),
    "prompt_logprobs": (int, 0, 20),
    "max_completion_tokens": (int, 1, 10**12),
    "n": (int, 1, 128),
    "seed": (int, -(2**63), 2**63),
    "top_k": (int, 0, 10**9),
    "temperature": (float, 0, 100),
    "top_p": (float, 1e-9, 1),
    "min_p": (float, 0, 1),
    "presence_penalty": (float, -2, 2),
    "frequency_penalty": (float, -2, 2),
    "repetition_penalty": (float, 1e-9, 100),
    "repeat_penalty": (float, 1e-9, 100),
}
BOOLEANS = ("stream", "ignore_eos", "echo", "include_stop_str_in_output")


class BadRequest(Exception):
    """Answered with ``status`` and the OpenAI error object."""

    def __init__(self, message: str, param: str | None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status


def validate(path: str, body: Any, vocabulary_size: int) -> None:
    """Raise BadRequest for a body that the contract refuses."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be an object", None)
    chat = path == "/v1/chat/completions" or (path == "/invocations" and "messages" in body)
    if chat:
        _messages(body.get("messages"))
        if body.get("continue_final_message") and body["messages"][-1]["role"] != "assistant":
            raise BadRequest("continue_final_message: no assistant's message", "continue_final_message")
    else:
        _prompt(body.get("prompt"), vocabulary_size)
    for name, (kind, lowest, highest) in NUMBERS.items():
        value = body.get(name)
        kinds = (int,) if kind is int else (int, float)
        if name in body and (
            isinstance(value, bool) or not isinstance(value, kinds) or not lowest <= value <= highest
        ):
            raise BadRequest(f"{name}: want {kind.__name__} from {lowest} to {highest}", name)
    for name in BOOLEANS:
        if not isinstance(body.get(name, False), bool):
            raise BadRequest(f"{name}: want a boolean", name)
    if not isinstance(body.get("stream_options", {}), dict):
        raise BadRequest("stream_options: want an object", "stream_options")
    salt = body.get("cache_salt", "none")
    if not isinstance(salt, str) or not salt:
        raise BadRequest("cache_salt: want a text", "cache_salt")
    _tokens(body, chat=chat)
    stop = body.get("stop", [])
    if not isinstance(stop, str) and not _all(stop, str):
        raise BadRequest("stop: want a string or a list of strings", "stop")


def _tokens(body: Mapping[str, Any], *, chat: bool) -> None:
    """Log-probabilities, and rules about single tokens."""
    if body.get("max_tokens") == 0 and not body.get("echo"):
        raise BadRequest("max_tokens: want at least 1", "max_tokens")
    logprobs = body.get("logprobs", False if chat else 0)
    if isinstance(logprobs, bool) is not chat or not 0 <= logprobs <= 20:
        raise BadRequest("logprobs: want a boolean in a chat, else 0 to 20", "logprobs")
    if body.get("top_logprobs") and not (chat and logprobs):
        raise BadRequest("top_logprobs: needs logprobs", "top_logprobs")
    if not isinstance(body.get("logit_bias", {}), dict):
        raise BadRequest("logit_bias: want an object", "logit_bias")
    for name, kind in (("allowed_token_ids", int), ("stop_token_ids", int), ("bad_words", str)):
        if not _all(body.get(name, []), kind):
            raise BadRequest(f"{name}: want a list of {kind.__name__}", name)
    if body.get("best_of", body.get("n", 1)) != body.get("n", 1):
        raise BadRequest("best_of: want n", "best_of")


def _messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: want a list with at least one message", "messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise BadRequest(f"messages[{i}].role: want one of {sorted(ROLES)}", f"messages[{i}].role")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue
        parts = content if _all(content, dict) and content else [{}]
        if not isinstance(content, str) and not all(part.get("type") == "text" for part in parts):
            raise BadRequest(f"messages[{i}].content: want a string or parts", f"messages[{i}].content")


def _prompt(prompt: Any, vocabulary_size: int) -> None:
    if isinstance(prompt, str) or (prompt and _all(prompt, str)):
        return
    rows = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else [prompt]
    if not all(_all(row, int) and row and all(0 <= i < vocabulary_size for i in row) for row in rows):
        raise BadRequest("prompt: want a string, strings, token ids, or lists of token ids", "prompt")


def _all(values: Any, kind: type) -> bool:
    return (
        isinstance(values, Sequence) and not isinstance(values, str) and all(type(v) is kind for v in values)
    )
