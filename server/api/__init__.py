"""HTTP: OpenAI's endpoints over one engine. Knows nothing of llama.cpp.

A request's way: `routes` reads its body (`request`) as one of `protocol`'s models; `chat` or `completions`
makes a prompt of it and submits its choices (`serving`, `sampling`), and answers with an object or a stream
(`sse`). Around it: `connection` and `limits`, what clients may send and what that may take; `service`, the
model's life from loading to drained; `metrics`, `middleware`, `errors`.
"""

from qwen_serve.server.api.app import create_app
from qwen_serve.server.api.connection import BoundedConfig
from qwen_serve.server.api.service import Backend, Service

__all__ = ["Backend", "BoundedConfig", "Service", "create_app"]
