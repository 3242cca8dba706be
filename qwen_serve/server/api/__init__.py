"""HTTP: endpoints over one engine. This package does not use llama.cpp.

`routes` reads a request's body (`request`) into the model of its format (`formats`, which share `fields`).
The format builds a prompt, submits its choices (`serving`), and answers with an object or a stream (`sse`).
`connection` and `limits` restrict what clients send and what it costs. `service` loads, unloads and drains
the model. `middleware`, `errors` and `observe` handle what all requests have in common.
"""

from qwen_serve.server.api.app import create_app
from qwen_serve.server.api.connection import BoundedConfig
from qwen_serve.server.api.service import Backend, Service
