"""Messages to prompt tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from qwen_serve.server.engine import Vocab
from qwen_serve.server.engine.vocab import token_of

from .errors import PromptError
from .markup import Tags
from .messages import begun_reply, check_messages, check_tools, plain_text, separate_reasoning
from .pictures import GivenPicture
from .provenance import AddedTokens, choose_sentinel
from .template import ChatTemplate

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""Names of reasoning efforts, from the least to the most."""


class ReplyOptions(TypedDict, total=False):
    """How a prompt ends and the reply begins."""

    enable_thinking: bool
    add_generation_prompt: bool
    continue_final_message: bool
    """Whether the last message, an assistant's, is the beginning of the reply. The prompt then ends with it,
    without an end of the turn."""


class Options(ReplyOptions, total=False):
    """Inputs of a prompt besides the messages."""

    tools: Sequence[Mapping[str, Any]] | None
    """OpenAI's objects."""
    template_kwargs: Mapping[str, Any] | None
    """The request's chat_template_kwargs. `enable_thinking` of these options takes precedence."""
    pictures: list[GivenPicture] | None
    """Receives the messages' pictures, in order; None for a model without vision."""


def check_conversation(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    continue_final_message: bool,
) -> None:
    """Raise PromptError for everything that is wrong whatever the model and the template."""
    try:
        checked = check_messages(messages, [])
        check_tools(tools)
    except RecursionError:
        raise PromptError("messages", "the request is nested too deeply") from None
    if continue_final_message:
        _final(checked)


class Prompter:
    """Renders and tokenizes conversations, safe against injected control tokens.

    If the content has no text of an added token (`<|im_end|>`, `<think>`, ...), its ids are those of
    rendering and tokenizing in one piece. Otherwise that text becomes plain tokens; `provenance` explains
    how.
    """

    def __init__(self, vocab: Vocab, template_source: str) -> None:
        self._vocab = vocab
        self.template = template_source
        """The template's source."""
        self._template = ChatTemplate(template_source)
        self._added = AddedTokens(vocab.added_tokens)
        found = {tag: token_of(vocab, tag) for tag in Tags()}
        self.tags = {token: tag for tag, token in found.items() if token is not None}
        """The tokens that are tags of a reply (`markup`)."""
        self.spelt_tags = [tag for tag in Tags() if tag in template_source and tag not in self.tags.values()]
        """The tags of replies that are no tokens."""
        self.closes_thinking = Tags().end_think in template_source
        """Whether the prompt closes the think block of a reply that does not think."""
        self._needs_question = False
        self.can_think = self._leaves_thinking_open()
        """Whether a reply begins with reasoning if thinking is on; a no-think template closes the block."""
        self._needs_question = self._refuses_without_a_question()
        self.efforts = [effort for effort in EFFORTS if self.takes_effort(effort)]
        """The reasoning efforts that the template takes, as newer ones do; from the least to the most."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        check: Callable[[int], None] = lambda _: None,
        **options: Unpack[Options],
    ) -> list[int]:
        """The token ids of a conversation (OpenAI's messages), ready for the assistant's reply.

        `check` is called with ids as they come, as in `Vocab.tokenize`. Raises PromptError, and what `check`
        raises.
        """
        ids: list[int] = []
        for piece in self._pieces(messages, check, **options):
            ids += self._vocab.tokenize(piece, special=True, check=check)
        bos = self._vocab.bos_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[Options]) -> str:
        """The text that `chat` tokenizes. Raises PromptError."""
        return "".join(self._pieces(messages, lambda _: None, **options))

    def reply_reasons(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> bool:
        """Whether the reply begins inside the think block. Raises PromptError.

        A continued reply begins there exactly if its last message has reasoning and no answer yet, whether or
        not thinking is enabled.
        """
        if not self.can_think:
            return False
        if continue_final_message:
            reasoning, _, closed = begun_reply(_final(check_messages(messages, [])))
            return not closed and (bool(reasoning) or enable_thinking)
        return enable_thinking and add_generation_prompt

    def raw(self, text: str, check: Callable[[int], None] = lambda _: None) -> list[int]:
        """The token ids of a text as it is; added tokens in it are parsed, as llama-server does here."""
        ids = self._vocab.tokenize(text, special=True, check=check)
        bos = self._vocab.bos_id
        return ids if bos is None else [bos, *ids]

    def takes_effort(self, effort: object) -> bool:
        """Whether the template reads `reasoning_effort`, and takes this value."""
        if "reasoning_effort" not in self._template.variables:
            return False
        question = [{"role": "user", "content": "Hi"}]
        try:
            self.render(question, enable_thinking=True, template_kwargs={"reasoning_effort": effort})
        except PromptError:
            return False
        return True

    def plain(self, text: str) -> list[int]:
        """The token ids of a text in which added tokens are plain text."""
        sentinel = choose_sentinel(text)
        pieces = self._added.cut(self._added.mark(text, sentinel), sentinel)
        return [token for piece in pieces for token in self._vocab.tokenize(piece, special=False)]

    def _pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        check: Callable[[int], None],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        pictures: list[GivenPicture] | None = None,
    ) -> Iterator[str]:
        try:
            checked = check_messages(messages, pictures)
            begun = begun_reply(_final(checked)) if continue_final_message else ("", "", False)
            reasoning, answer, closed = begun
            if reasoning and not self.can_think:
                reasoning = ""
            if self._needs_question and all(message["role"] != "user" for message in checked):
                checked.insert(checked[0]["role"] == "system", {"role": "user", "content": ""})
            if reasoning or closed:
                enable_thinking = bool(reasoning)
            extra = {**(template_kwargs or {}), "enable_thinking": enable_thinking}
            given = checked, check_tools(tools), extra, reasoning, answer
            sentinel = choose_sentinel(given, self._template.source)
            for message in checked:
                self._separate_reasoning(message, sentinel)
            marked_messages, marked_tools, marked_extra, reasoning, answer = self._added.mark(given, sentinel)
        except RecursionError:
            raise PromptError("messages", "the request is nested too deeply") from None
        variables = {
            "messages": marked_messages[:-1] if continue_final_message else marked_messages,
            "tools": marked_tools,
            "add_generation_prompt": add_generation_prompt or continue_final_message,
        }
        rendered = self._template.render(variables, marked_extra, check)
        if reasoning:
            rendered += "" if rendered.rstrip().endswith("<think>") else "<think>\n"
            rendered += reasoning.strip() + "\n</think>\n\n" if closed else reasoning.lstrip()
        return self._added.cut(rendered + answer, sentinel)

    def _leaves_thinking_open(self) -> bool:
        if "<think>" not in self._template.source:
            return False
        try:
            text = self.render([{"role": "user", "content": "Hi"}], enable_thinking=True)
        except PromptError:
            return True  # the template needs other variables, too; but it knows think blocks
        return not text.rstrip().endswith("</think>")

    def _refuses_without_a_question(self) -> bool:
        """Whether the template wants a user's message, as Qwen3.5's does. An empty one is then added to a
        conversation without any."""
        try:
            self.render([{"role": "system", "content": "Hi"}])
        except PromptError:
            return True
        return False

    def _separate_reasoning(self, message: dict[str, Any], sentinel: str) -> None:
        """Moves an assistant's inline think block out of the content, since the template cannot find it once
        the content is marked."""
        if message["role"] != "assistant" or "reasoning_content" in message:
            return
        if "reasoning_content" not in self._template.source:
            return  # this template would drop the reasoning
        parts = separate_reasoning(plain_text(message["content"]))
        if parts is not None:
            reasoning, answer = parts
            # the template trims before it removes the block, not after; a sentinel prevents the trim
            indented = answer[:1].isspace()
            message.update(reasoning_content=reasoning, content=sentinel + answer if indented else answer)


def _final(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last of the checked messages. Raises PromptError if it cannot be continued."""
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        wrong = "calls tools" if last["role"] == "assistant" else f"is of the role {last['role']}"
        raise PromptError(
            "continue_final_message", f"the last message {wrong}; it must be an assistant's text"
        )
    return last
