"""Anthropic's Messages."""

from .answer import count_tokens, messages
from .request import CountTokensRequest, MessagesRequest
