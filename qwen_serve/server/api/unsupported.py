"""Endpoints of other servers that this one does not offer: they answer 501."""

from starlette.routing import compile_path

UNSUPPORTED = {
    "embeddings": "/v1/embeddings /embeddings /embedding /pooling /api/embed /api/embeddings",
    "reranking, scoring and classification": "/v1/rerank /v2/rerank /rerank /v1/reranking /reranking "
    "/v1/score /score /classify",
    "images": "/v1/images/{rest:path}",
    "audio": "/v1/audio/{rest:path}",
    "moderation": "/v1/moderations",
    "loading and unloading LoRA adapters": "/v1/load_lora_adapter /v1/unload_lora_adapter "
    "/load_lora_adapter /unload_lora_adapter",
    "files, batches and fine-tuning": "/v1/files /v1/files/{rest:path} /v1/batches /v1/batches/{rest:path} "
    "/v1/messages/batches /v1/messages/batches/{rest:path} /v1/fine_tuning/{rest:path}",
    "kept responses and conversations": "/v1/responses/{rest:path} /v1/conversations "
    "/v1/conversations/{rest:path} /v1/assistants /v1/threads",
    "infilling": "/infill",
    "pulling, creating, copying, pushing and deleting models": "/api/pull /api/create /api/copy /api/push "
    "/api/delete /api/blobs/{rest:path}",
}
"""Feature -> its paths on other servers, unless this server has an endpoint there."""

INSTEAD = {
    "pulling, creating, copying, pushing and deleting models": "one server has one model, which it is "
    "started with: `qwen-serve serve MODEL` takes a GGUF, a checkpoint or a hub id",
    "loading and unloading LoRA adapters": "the server is started with them (--lora NAME=FILE.gguf), and "
    "requests name them",
    "embeddings": "serve a model of embeddings beside it, such as Qwen3-Embedding "
    "(`llama-server --embeddings`)",
    "reranking, scoring and classification": "serve a reranker beside it, such as Qwen3-Reranker "
    "(`llama-server --reranking`)",
    "infilling": "llama.vim and llama.vscode complete code with a model that was trained for it; serve one, "
    "such as Qwen2.5-Coder, beside it with llama-server, and give them that address",
}
"""Feature -> the alternative here, if there is one."""

_PATTERNS = [(compile_path(path)[0], what) for what, paths in UNSUPPORTED.items() for path in paths.split()]


def unsupported_endpoint(path: str) -> str | None:
    """What other servers offer at a path that this server does not have, and the alternative here. None if
    other servers have nothing there either."""
    what = next((what for pattern, what in _PATTERNS if pattern.match(path)), None)
    if what is None:
        return None
    instead = f"; {INSTEAD[what]}" if what in INSTEAD else ""
    return f"{what}: not supported by this server{instead}"
