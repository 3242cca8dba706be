"""/v1/chat/completions, and /invocations with `messages`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from server.api.schemas.generation import GenerationRequest
from server.api.schemas.unsupported import NEUTRAL

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _template_kwargs(value: Any) -> Any:
    if isinstance(value, dict) and not isinstance(value.get("enable_thinking"), bool | None):
        raise ValueError("enable_thinking must be true or false")
    return value


def _thinking(value: Any) -> bool | None:
    """A flag, or the object that some clients send in its place: {"type": "enabled" | "disabled"}."""
    if isinstance(value, dict) and value.get("type") in ("enabled", "disabled"):
        return bool(value["type"] == "enabled")
    if not isinstance(value, bool | None):
        raise ValueError('must be true, false, or {"type": "enabled"} or {"type": "disabled"}')
    return value


def _tool_choice(value: Any) -> Any:
    if value not in (None, "none", "auto"):
        raise ValueError('must be "none" or "auto"; a call cannot be forced on this server')
    return value


class ChatRequest(GenerationRequest):
    """A conversation. The insides of messages and tools are checked where they are rendered."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {**NEUTRAL, "echo": (False,)}

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Literal["none", "auto"] | None, BeforeValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_template_kwargs)] = None
    thinking: Annotated[bool | None, BeforeValidator(_thinking)] = None
    reasoning_effort: ReasoningEffort | None = None

    def thinks(self, default: bool) -> bool:
        """Whether thinking is asked for; where the spellings disagree, the most specific one decides."""
        enabled = (self.chat_template_kwargs or {}).get("enable_thinking")
        if enabled is None:
            enabled = self.thinking
        if enabled is None and self.reasoning_effort is not None:
            enabled = self.reasoning_effort != "none"
        return default if enabled is None else bool(enabled)

    @property
    def whole(self) -> bool:
        """As everywhere, but a single tool call ends an answer that may have only one."""
        return super().whole and self.parallel_tool_calls is not False

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools the model is told of."""
        return None if self.tool_choice == "none" else self.tools or None
