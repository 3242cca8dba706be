"""Messages to tokens, and tokens to the parts of a message. Knows the engine, not HTTP.

The way in: `Prompter` checks a conversation (`messages`), marks what the caller wrote (`provenance`), renders
it (`template`) and tokenises it. The way out: `generate` submits the prompt and yields text (`stream`,
`stop`), which a `ReplyParser` splits into reasoning, answer and tool calls.
"""

from .errors import PromptError
from .generation import TextGeneration, generate
from .prompt import Prompter
from .reply import Content, Part, Reasoning, ReplyParser, ToolCall
from .stream import TextStream

__all__ = [
    "Content",
    "Part",
    "PromptError",
    "Prompter",
    "Reasoning",
    "ReplyParser",
    "TextGeneration",
    "TextStream",
    "ToolCall",
    "generate",
]
