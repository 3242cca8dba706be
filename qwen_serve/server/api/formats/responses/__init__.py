"""OpenAI's Responses."""

from .answer import respond
from .request import ResponsesRequest

__all__ = ["ResponsesRequest", "respond"]
