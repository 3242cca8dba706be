"""HTTP: schemas, routes, server-sent events and errors. Knows nothing of llama.cpp."""

from server.api.app import create_app
from server.api.service import Backend, Service

__all__ = ["Backend", "Service", "create_app"]
