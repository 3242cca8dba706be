"""HTTP: OpenAI's endpoints over one engine. Knows nothing of llama.cpp.

A request's way: `routes` has its body read (`request`) as the model of its format (`formats`, with the
`fields` that they share); the format makes a prompt of it, submits its choices (`serving`), and answers with
an object or a stream (`sse`). Around it: `connection` and `limits`, what clients may send and what that may
take; `service`, the model's life from loading to drained; `middleware`, `errors`, `observe`.
"""

from qwen_serve.server.api.app import create_app
from qwen_serve.server.api.connection import BoundedConfig
from qwen_serve.server.api.service import Backend, Service

__all__ = ["Backend", "BoundedConfig", "Service", "create_app"]
