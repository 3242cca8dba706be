"""HTTP: OpenAI's endpoints over one engine. Knows nothing of llama.cpp.

`routes` reads a request's body (`request`) into the model of its format (`formats`, which share `fields`).
The format builds a prompt, submits its choices (`serving`), and answers with an object or a stream (`sse`).
`connection` and `limits` bound what clients may send and what it may cost. `service` is the model's life from
loading to drained. `middleware`, `errors` and `observe` surround every request.
"""

from qwen_serve.server.api.app import create_app
from qwen_serve.server.api.connection import BoundedConfig
from qwen_serve.server.api.service import Backend, Service

__all__ = ["Backend", "BoundedConfig", "Service", "create_app"]
