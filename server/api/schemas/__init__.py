"""What clients may send: one model a kind of request."""

from server.api.schemas.chat import ChatRequest
from server.api.schemas.completion import CompletionRequest
from server.api.schemas.generation import GenerationRequest

__all__ = ["ChatRequest", "CompletionRequest", "GenerationRequest"]
