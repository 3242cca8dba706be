"""The endpoints, a file for each kind, each with its `router`."""

from server.api.routes import generation, health, metrics, models, tokens

ROUTERS = (generation.router, tokens.router, health.router, metrics.router, models.router)
"""Looked through in this order: what is asked for most comes first."""

__all__ = ["ROUTERS"]
