"""/ping and /health: whether requests can be answered now."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from server.api.service import service_of

router = APIRouter()


@router.head("/ping", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/ping")
@router.get("/health")
async def ping(http: Request) -> JSONResponse:
    """200 once the model is loaded and warmed up; 503 before that, while draining and after a failure."""
    status = service_of(http).status
    return JSONResponse({"status": status}, status_code=200 if status == "ready" else 503)
