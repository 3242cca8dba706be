"""Messages to prompt tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from .errors import PromptError
from .messages import check_messages, check_tools, plain_text, separate_reasoning
from .provenance import AddedTokens, choose_sentinel
from .template import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from server.engine import Vocab


class Options(TypedDict, total=False):
    """What goes into a prompt beside the messages."""

    tools: Sequence[Mapping[str, Any]] | None
    """OpenAI's objects."""
    enable_thinking: bool
    template_kwargs: Mapping[str, Any] | None
    """The request's chat_template_kwargs; their `enable_thinking` gives way to the one here."""
    add_generation_prompt: bool


class Prompter:
    """Renders and tokenises conversations, safe against injected control tokens.

    For content without the text of an added token the ids are those of rendering and tokenising in one piece.
    Where content contains such text (`<|im_end|>`, `<think>`, ...) it becomes plain tokens. How:
    `provenance`.
    """

    def __init__(self, vocab: Vocab, template_source: str) -> None:
        self._vocab = vocab
        self.template = template_source
        """Jinja."""
        self._template = ChatTemplate(template_source)
        self._added = AddedTokens(vocab.added_tokens)
        self.can_think = self._leaves_thinking_open()
        """Whether a reply begins with reasoning when thinking is on; a no-think template closes the block."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        check: Callable[[int], None] = lambda _: None,
        **options: Unpack[Options],
    ) -> list[int]:
        """The token ids of a conversation (OpenAI's messages), ready for the assistant's reply.

        `check` is told of ids as they come, as `Vocab.tokenize` does it. Raises PromptError, and what `check`
        raises.
        """
        ids: list[int] = []
        for piece in self._pieces(messages, check, **options):
            ids += self._vocab.tokenize(piece, special=True, check=check)
        bos = self._vocab.bos_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[Options]) -> str:
        """The text that `chat` tokenises. Raises PromptError."""
        return "".join(self._pieces(messages, lambda _: None, **options))

    def raw(self, text: str, check: Callable[[int], None] = lambda _: None) -> list[int]:
        """The token ids of a text as it is; added tokens in it are parsed, as llama-server does here."""
        ids = self._vocab.tokenize(text, special=True, check=check)
        bos = self._vocab.bos_id
        return ids if bos is None else [bos, *ids]

    def _pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        check: Callable[[int], None],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> Iterator[str]:
        extra = {**(template_kwargs or {}), "enable_thinking": enable_thinking}
        try:
            given = check_messages(messages), check_tools(tools), extra
            sentinel = choose_sentinel(given, self._template.source)
            for message in given[0]:
                self._separate_reasoning(message, sentinel)
            marked_messages, marked_tools, marked_extra = self._added.mark(given, sentinel)
        except RecursionError:
            raise PromptError("the request is nested too deeply", "messages") from None
        variables = {
            "messages": marked_messages,
            "tools": marked_tools,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._added.cut(self._template.render(variables, marked_extra, check), sentinel)

    def _leaves_thinking_open(self) -> bool:
        if "<think>" not in self._template.source:
            return False
        try:
            text = self.render([{"role": "user", "content": "Hi"}], enable_thinking=True)
        except PromptError:
            return True  # a template that wants more than this; it does know think blocks
        return not text.rstrip().endswith("</think>")

    def _separate_reasoning(self, message: dict[str, Any], sentinel: str) -> None:
        """Take an assistant's inline think block apart: once marked, the template can not find it."""
        if message["role"] != "assistant" or "reasoning_content" in message:
            return
        if "reasoning_content" not in self._template.source:
            return  # this template would drop what is moved there
        parts = separate_reasoning(plain_text(message["content"]))
        if parts is not None:
            reasoning, answer = parts
            # The template trims before it takes the block out, not after: a sentinel stops the trim.
            indented = answer[:1].isspace()
            message.update(reasoning_content=reasoning, content=sentinel + answer if indented else answer)
