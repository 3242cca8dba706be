"""Ollama's API."""

from .answer import ollama_chat, ollama_generate
from .models import OLLAMA_VERSION, ShowRequest, model_details, model_tags, running_models, show
from .request import OllamaChatRequest, OllamaGenerateRequest
