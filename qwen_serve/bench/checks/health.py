"""Readiness, the model card, metrics, unknown routes."""

import re

from qwen_serve.bench.checks.base import (
    INVOCATIONS,
    FailedError,
    SkippedError,
    Target,
    check,
    expect,
    expect_equal,
)
from qwen_serve.bench.load.counters import parse_counters


@check("GET /ping answers 200 once the model is loaded")
async def ping(target: Target) -> None:
    reply = await target.client.request("GET", "/ping")
    expect_equal(reply.status, 200, "status")


@check("GET /health is an alias of /ping")
async def health(target: Target) -> None:
    reply = await target.client.request("GET", "/health")
    expect_equal(reply.status, 200, "status")


@check("GET /v1/models lists the model as an OpenAI model card")
async def models(target: Target) -> None:
    reply = await target.client.request("GET", "/v1/models")
    expect_equal(reply.status, 200, "status")
    answer = reply.json()
    expect_equal(answer.get("object"), "list", "object")
    cards = answer.get("data")
    expect(isinstance(cards, list) and cards, "data: want a list with the model's card")
    expect_equal(cards[0].get("object"), "model", "data[0].object")
    expect(isinstance(cards[0].get("id"), str) and cards[0]["id"], "data[0].id: want a name")
    expect(isinstance(cards[0].get("created"), int), "data[0].created: want a Unix time")
    expect(isinstance(cards[0].get("owned_by"), str), "data[0].owned_by: want a string")


@check("GET /metrics answers Prometheus text")
async def metrics(target: Target) -> None:
    reply = await target.client.request("GET", "/metrics")
    expect_equal(reply.status, 200, "status")
    kind = reply.headers.get("Content-Type", "")
    expect(kind.startswith("text/plain"), f"Content-Type: want text/plain, got {kind!r}")
    try:
        expect(parse_counters(reply.text), "no samples")
    except ValueError as error:
        raise FailedError(f"not Prometheus text: {error}") from error


@check("an unknown path answers 404")
async def unknown_path(target: Target) -> None:
    reply = await target.client.request("GET", "/no-such-path")
    expect_equal(reply.status, 404, "status")


@check("GET on a POST endpoint answers 405 or 404")
async def wrong_method(target: Target) -> None:
    reply = await target.client.request("GET", INVOCATIONS)
    expect(reply.status in (404, 405), f"status: want 405, got {reply.status}")


@check("a request's X-Request-Id comes back; without one, there is a new one each time")
async def request_id(target: Target) -> None:
    given = await target.client.request("GET", "/v1/models", headers={"X-Request-Id": "check-17"})
    expect_equal(given.headers.get("X-Request-Id"), "check-17", "X-Request-Id")
    made = [(await target.client.request("GET", "/v1/models")).headers.get("X-Request-Id") for _ in range(2)]
    expect(all(made) and made[0] != made[1], f"X-Request-Id: want two different ones, got {made}")


@check("GET / is a page that loads nothing from other hosts")
async def page(target: Target) -> None:
    reply = await target.client.request("GET", "/")
    if reply.status == 404:
        raise SkippedError("this server has no page")
    expect_equal(reply.status, 200, "status")
    kind = reply.headers.get("Content-Type", "")
    expect(kind.startswith("text/html"), f"Content-Type: want text/html, got {kind!r}")
    policy = reply.headers.get("Content-Security-Policy", "")
    expect("default-src" in policy, f"Content-Security-Policy: want one with default-src, got {policy!r}")
    elsewhere = re.findall(r'(?:src|href)="((?:https?:)?//[^"]+)"', reply.text)
    expect(not elsewhere, f"files from elsewhere: {elsewhere}")
