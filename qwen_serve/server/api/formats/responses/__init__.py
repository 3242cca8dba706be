"""OpenAI's Responses."""

from .answer import respond
from .request import ResponsesRequest
