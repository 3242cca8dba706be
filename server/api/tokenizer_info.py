"""GET /tokenizer_info, as vLLM has it: for clients such as lm-eval (`tokenizer_backend=remote`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.api.service import Service


def tokenizer_info(service: Service) -> dict[str, Any]:
    """The tokenizer's special tokens, by their texts, and the template that chats are rendered with."""
    backend = service.backend
    vocab, metadata = backend.engine.vocab, backend.engine.metadata

    def text(token: str | int | None) -> str | None:
        return None if token is None else vocab.spelling(int(token)).decode("utf-8", "replace")

    return {
        "tokenizer_class": metadata.get("tokenizer.ggml.model"),
        "bos_token": text(vocab.bos_id),
        "eos_token": text(vocab.eos_id),
        "pad_token": text(metadata.get("tokenizer.ggml.padding_token_id")),
        "model_max_length": backend.engine.context_size,
        "chat_template": backend.prompter.template,
    }
