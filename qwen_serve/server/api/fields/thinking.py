"""Fields for thinking and its length, in every client's format."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from qwen_serve.server.api.errors import bad_request
from qwen_serve.server.api.service import Backend
from qwen_serve.server.chat import Prompter
from qwen_serve.server.engine import ThinkingLimits
from qwen_serve.server.settings import Settings

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

EFFORTS: dict[str, int | None] = {
    "none": 0,
    "minimal": 256,
    "low": 1024,
    "medium": 4096,
    "high": 16384,
    "xhigh": 32768,
    "max": None,
}
"""Effort -> budget in tokens; None: no budget."""

BUDGETS = (
    *("thinking_budget", "thinking_token_budget", "reasoning_budget"),
    *("thinking_budget_tokens", "reasoning_budget_tokens"),
)
"""The budget in tokens under Qwen's, vLLM's and llama-server's names."""

LONGEST_MESSAGE = 4096
"""Most characters inserted into the reasoning at the end of its budget."""

ANSWER_SHARE = 4
"""A budget leaves 1/ANSWER_SHARE of `max_tokens` for the answer."""

BRIDGE = "\n\nMy time to think is up, so I give the answer that follows from what I have so far.\n"
CLOSE = "\n</think>\n\n"
"""Closes a think block at the end of its budget: with a message, or without one if there is no room for
it."""


def _template_kwargs(value: Any) -> Any:
    if isinstance(value, dict) and not isinstance(value.get("enable_thinking"), bool | None):
        raise ValueError("enable_thinking must be true or false")
    return value


def _thinking(value: Any) -> Any:
    """Anthropic's form of true and false."""
    if isinstance(value, bool):
        return {"type": "enabled" if value else "disabled"}
    if not isinstance(value, dict | None):
        raise ValueError('must be true, false, or {"type": "enabled", "budget_tokens": 1024}')
    return value


def _no_summary(value: Any) -> None:
    if value:
        raise ValueError("summaries are not supported; the reasoning comes as it is")


class TemplateInput(BaseModel):
    """Variables of the chat template."""

    model_config = ConfigDict(extra="allow")

    enable_thinking: bool | None = None


class ThinkingInput(BaseModel):
    """Anthropic's form."""

    model_config = ConfigDict(strict=True)

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0)


class ReasoningInput(BaseModel):
    """The form of OpenRouter and the Responses API."""

    model_config = ConfigDict(strict=True, extra="forbid")

    effort: ReasoningEffort | None = None
    max_tokens: int | None = Field(None, ge=0)
    enabled: bool | None = None
    summary: Annotated[None, BeforeValidator(_no_summary, json_schema_input_type=None)] = None
    generate_summary: Annotated[None, BeforeValidator(_no_summary, json_schema_input_type=None)] = None


class ThinkingFields(BaseModel):
    """A chat request's fields for its think block."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    chat_template_kwargs: Annotated[
        dict[str, Any] | None, BeforeValidator(_template_kwargs, json_schema_input_type=TemplateInput | None)
    ] = None
    enable_thinking: bool | None = None
    thinking: Annotated[
        ThinkingInput | None, BeforeValidator(_thinking, json_schema_input_type=bool | ThinkingInput | None)
    ] = None
    reasoning: ReasoningInput | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_budget: int | None = Field(None, ge=-1)
    thinking_token_budget: int | None = Field(None, ge=-1)
    reasoning_budget: int | None = Field(None, ge=-1)
    thinking_budget_tokens: int | None = Field(None, ge=-1)
    reasoning_budget_tokens: int | None = Field(None, ge=-1)
    reasoning_budget_message: str | None = Field(None, max_length=LONGEST_MESSAGE)
    """Inserted into the think block before the budget closes it."""
    thinking_repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    preserve_thinking: bool | None = None
    """Qwen's, for templates that read it: whether the prompt has the reasoning of all turns."""

    def template_variables(self, prompter: Prompter) -> dict[str, Any]:
        """The request's variables for the template. An effort that the template does not take becomes the
        next higher that it does, or else its highest. Raises ApiError 400 for a value in
        `chat_template_kwargs`."""
        given = dict(self.chat_template_kwargs or {})
        if prompter.efforts and (effort := given.get("reasoning_effort")) is not None:
            if not prompter.takes_effort(effort):
                where = "chat_template_kwargs.reasoning_effort"
                words = ", ".join(prompter.efforts)
                raise bad_request(where, f"this model's template takes {words}")
        elif prompter.efforts and (effort := self._effort()) not in (None, "none"):
            order = list(EFFORTS)
            higher = [one for one in prompter.efforts if order.index(one) >= order.index(str(effort))]
            given["reasoning_effort"] = [*higher, prompter.efforts[-1]][0]
        if self.preserve_thinking is not None:
            given.setdefault("preserve_thinking", self.preserve_thinking)
        return given

    def thinks(self, default: bool) -> bool:
        """Whether the request asks for thinking; if its fields disagree, the most specific one decides.

        A budget of 0 asks for no thinking. Any other budget asks for it, unless another field decides.
        """
        if self.budget() == 0:
            return False
        effort = self._effort()
        spellings = (
            (self.chat_template_kwargs or {}).get("enable_thinking"),
            self.enable_thinking,
            None if self.thinking is None else self.thinking.type != "disabled",
            None if self.reasoning is None else self.reasoning.enabled,
            None if effort is None else effort != "none",
            True if (self.budget() or 0) > 0 else None,
        )
        return bool(next((spelling for spelling in spellings if spelling is not None), default))

    def budget(self) -> int | None:
        """The request's explicit budget in tokens; None if it sets none, -1 for no limit. Raises ApiError 400
        if it sets two that differ."""
        given: dict[str, int | None] = {field: getattr(self, field) for field in BUDGETS}
        given["thinking.budget_tokens"] = self.thinking.budget_tokens if self.thinking else None
        given["reasoning.max_tokens"] = self.reasoning.max_tokens if self.reasoning else None
        found = {field: value for field, value in given.items() if value is not None}
        if len(set(found.values())) > 1:
            first, second, *_ = found
            raise bad_request(second, f"contradicts {first}; give one of them")
        return next(iter(found.values()), None)

    def _effort(self) -> str | None:
        inner = self.reasoning.effort if self.reasoning else None
        if inner is not None and self.reasoning_effort not in (None, inner):
            raise bad_request("reasoning_effort", "contradicts reasoning.effort; give one of them")
        return inner or self.reasoning_effort

    def thinking_limits(
        self, settings: Settings, backend: Backend, token_limit: int | None, *, calls: bool
    ) -> ThinkingLimits:
        """The limits of a thinking reply; `calls`: whether tools are offered.

        The request's budget takes precedence, then its effort's (unless the template takes efforts), then the
        server's. The budget is reduced if
        `token_limit` would leave less than a quarter for the answer.
        """
        budget = self.budget()
        effort = None if backend.prompter.efforts else self._effort()  # the template's, if it takes any
        if budget is None and effort is not None:
            budget = EFFORTS[effort] if EFFORTS[effort] is not None else -1
        if budget is None:
            budget = settings.thinking_budget
        penalty = self.thinking_repetition_penalty or 1.0
        limited = budget is not None and budget >= 0
        if not (limited or settings.loop_guard or penalty != 1.0):
            return ThinkingLimits(calls=calls)
        vocab = backend.engine.vocab
        bridge = vocab.tokenize(BRIDGE.removesuffix("\n") + CLOSE, special=True)
        if self.reasoning_budget_message is not None:
            said = backend.prompter.plain(self.reasoning_budget_message)
            bridge = [*said, *vocab.tokenize(CLOSE, special=True)]
        if limited and token_limit is not None:
            assert budget is not None
            room = token_limit - -(-token_limit // ANSWER_SHARE)
            if room < 2 * len(bridge):
                bridge = vocab.tokenize(CLOSE, special=True)
            budget = max(0, min(budget, room - len(bridge)))
        return ThinkingLimits(tuple(bridge), budget if limited else None, settings.loop_guard, penalty, calls)
