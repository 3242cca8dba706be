"""Ollama's API."""

from .answer import ollama_chat, ollama_generate
from .models import OLLAMA_VERSION, ShowRequest, model_details, model_tags, running_models, show
from .request import OllamaChatRequest, OllamaGenerateRequest

__all__ = [
    "OLLAMA_VERSION",
    "OllamaChatRequest",
    "OllamaGenerateRequest",
    "ShowRequest",
    "model_details",
    "model_tags",
    "ollama_chat",
    "ollama_generate",
    "running_models",
    "show",
]
