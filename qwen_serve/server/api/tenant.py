"""Tenants: which requests share prefixes, and whose share of the server a request uses."""

import hashlib
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from uuid import uuid4

from qwen_serve.server.api.context import RequestContext
from qwen_serve.server.api.errors import bad_request, refused
from qwen_serve.server.api.fields.generation import GenerationRequest
from qwen_serve.server.api.fields.lora import adapters_of
from qwen_serve.server.engine import TIERS, Adapters, SchedulingParams, ServiceTier
from qwen_serve.server.engine.request import PRIVATE


@dataclass(frozen=True, slots=True)
class Placement:
    """Whom a request shares prefixes with, and when it runs; of all its answers."""

    salt: str
    """Requests with the same salt share prefixes and pictures."""
    scheduling: SchedulingParams
    adapters: Adapters


NETWORK = 64
"""Bits of an IPv6 address that identify a client, since a client has all addresses of such a network."""


def salt_of(key: str, cache_salt: str | None) -> str:
    """The salt of all requests that may share prefixes. It reveals neither the key nor `cache_salt`."""
    if not key and not cache_salt:
        return ""
    both = hashlib.sha256()
    for part in (key, cache_salt or ""):
        both.update(hashlib.sha256(part.encode("utf-8", "surrogatepass")).digest())
    return both.hexdigest()


def placement_of(context: RequestContext, request: GenerationRequest) -> Placement:
    """Needs no model. Raises ApiError 400 and 404 for fields that contradict the server's settings or the API
    key."""
    return Placement(
        sharing_of(context, request),
        scheduling_of(context, request),
        adapters_of(context.service.settings, request.model, request.lora or []),
    )


def sharing_of(context: RequestContext, request: GenerationRequest) -> str:
    """The salt of a request's prefixes and pictures."""
    key = context.key if context.service.settings.prefix_by_key else ""
    # with a random salt the request shares no prefix, neither of others nor its own
    if request.cache_prompt is False:
        return PRIVATE + uuid4().hex
    return salt_of(key, request.cache_salt)


def scheduling_of(context: RequestContext, request: GenerationRequest) -> SchedulingParams:
    """A request's tenant and its priority in the queue. Raises ApiError 400 for a priority that is not
    allowed."""
    service = context.service
    policy = service.settings.scheduling_policy
    number, key = service.keys.get(context.key, (None, None))
    if policy == "fcfs" and request.priority:
        raise refused("priority", "needs --scheduling-policy priority or fair; this server's is fcfs")
    anybody = policy == "priority" and not service.keys  # trusted, as in vLLM
    best: ServiceTier = key.service_tier if key else "priority" if anybody else "default"
    asked = request.service_tier
    if asked is None or asked == "auto":
        tier: ServiceTier = key.service_tier if key else "default"
    else:
        tier = asked
    if policy == "fcfs" or (not service.keys and TIERS.index(tier) < TIERS.index(best)):
        tier = "default"
    elif TIERS.index(tier) < TIERS.index(best):
        may = " and ".join(f'"{one}"' for one in TIERS[TIERS.index(best) :])
        raise bad_request("service_tier", f'this API key is of "{best}", which has {may}, not "{tier}"')
    return SchedulingParams(
        tenant=_address(context) if key is None else f"key {number}",
        share=1.0 if key is None else key.share,
        service_tier=tier,
        priority=request.priority or 0,
    )


def _address(context: RequestContext) -> str:
    """The client's address; "" through a Unix socket."""
    client = context.http.client
    try:
        address = ip_address(client.host) if client else None
    except ValueError:
        return ""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return f"{int(address) >> (128 - NETWORK):x}"
    return str(address or "")
