"""The endpoints, a file for each kind, each with its `router`."""

from server.api.routes import generation, health, metrics, models, tokens

ROUTERS = (health.router, metrics.router, models.router, generation.router, tokens.router)

__all__ = ["ROUTERS"]
