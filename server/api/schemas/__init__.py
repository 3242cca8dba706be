"""What clients may send: one model a kind of request."""

from server.api.schemas.chat import ChatRequest
from server.api.schemas.completion import CompletionRequest
from server.api.schemas.generation import GenerationRequest
from server.api.schemas.tokens import DetokenizeRequest, TokenizeRequest

__all__ = ["ChatRequest", "CompletionRequest", "DetokenizeRequest", "GenerationRequest", "TokenizeRequest"]
