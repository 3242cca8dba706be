"""Messages to tokens, and tokens to the parts of a message. This package uses the engine, but no HTTP.

`Prompter` checks a conversation (`messages`), marks the caller's text (`provenance`), renders it (`template`)
and tokenizes it. `TextGeneration` turns the generated tokens into text (`detokenizer`), and `Reply` splits
the text into reasoning, answer and tool calls (`tool_calls`).
"""

from .detokenizer import Detokenizer, StopStrings
from .errors import PromptError
from .generation import TextGeneration
from .messages import plain_text
from .prompt import Prompter, ReplyOptions, check_conversation
from .reply import NOTHING_YET, Arguments, Content, Part, Reasoning, Reply, ReplyParser, ToolCall
