"""`priority`, `service_tier`, and a key's class and share: their effect on the engine's request and on the
answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from qwen_serve.server.api.tenant import NETWORK
from qwen_serve.server.engine import SchedulingParams
from tests.server.api.conftest import Server, Start
from tests.server.api.test_bad_input import error_of

KEYS = "gold class=priority share=2\nplain\nbulk class=flex share=0.5\n"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {**CHAT, "max_tokens": 5},
}


@pytest.fixture
def keyed(start: Start, tmp_path: Path) -> Server:
    (tmp_path / "keys").write_text(KEYS)
    return start("Hello", scheduling_policy="fair", api_key_file=tmp_path / "keys")


def asked(
    server: Server, path: str, key: str = "plain", **fields: Any
) -> tuple[dict[str, Any], SchedulingParams]:
    """(answer, scheduling parameters that the engine got)."""
    headers = {"Authorization": f"Bearer {key}"}
    answer = server.http.post(path, json={**BODIES[path], **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json(), server.engine.submissions[-1].request.scheduling


@pytest.mark.parametrize("path", BODIES)
def test_a_request_has_its_key_s_class_and_share(keyed: Server, path: str) -> None:
    told = {key: asked(keyed, path, key)[1] for key in ("gold", "plain", "bulk")}
    assert [(one.service_tier, one.share) for one in told.values()] == [
        ("priority", 2.0),
        ("default", 1.0),
        ("flex", 0.5),
    ]
    assert len({one.tenant for one in told.values()}) == 3
    assert not any(key in one.tenant for key, one in told.items())
    assert asked(keyed, path, "bulk")[1] == told["bulk"]


@pytest.mark.parametrize("authorization", ["Bearer made-up", "Basic made-up", "made-up"])
def test_a_key_that_is_not_known_hides_none_that_is(keyed: Server, authorization: str) -> None:
    headers = {"Authorization": authorization, "X-Api-Key": "bulk"}
    assert keyed.http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
    told = keyed.engine.submissions[-1].request.scheduling
    assert (told.service_tier, told.share, told.tenant) == ("flex", 0.5, "key 2")


def test_a_key_in_other_letters_has_its_class(start: Start, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("schl\u00fcssel class=flex\n", encoding="utf-8")
    server = start("Hello", scheduling_policy="fair", api_key_file=tmp_path / "keys")
    headers = {b"X-Api-Key": "schl\u00fcssel".encode()}
    assert server.http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
    assert server.engine.submissions[-1].request.scheduling.service_tier == "flex"


@pytest.mark.parametrize("path", BODIES)
def test_priority_is_vllm_s(keyed: Server, path: str) -> None:
    assert asked(keyed, path, priority=-3)[1].priority == -3
    assert asked(keyed, path)[1].priority == 0
    headers = {"Authorization": "Bearer plain"}
    for wrong in ("1", 1.5, True, 2**31):
        answer = keyed.http.post(path, json={**BODIES[path], "priority": wrong}, headers=headers)
        assert "priority" in answer.json()["error"]["message"]
        assert answer.status_code == 400


@pytest.mark.parametrize("path", list(BODIES)[:3])
def test_the_tier_that_a_request_is_served_in_is_told(keyed: Server, path: str) -> None:
    for key, wanted, served in (
        ("gold", "auto", "priority"),
        ("gold", "default", "default"),
        ("plain", "auto", "default"),
        ("plain", "flex", "flex"),
        ("bulk", "auto", "flex"),
    ):
        answer, told = asked(keyed, path, key, service_tier=wanted)
        assert answer["service_tier"] == told.service_tier == served


def test_the_tier_is_told_in_a_stream_and_only_where_it_was_asked_for(keyed: Server) -> None:
    assert "service_tier" not in asked(keyed, "/v1/chat/completions")[0]
    assert "service_tier" not in asked(keyed, "/v1/completions")[0]
    body = {**CHAT, "stream": True, "service_tier": "flex"}
    answer = keyed.http.post("/v1/chat/completions", json=body, headers={"X-Api-Key": "plain"})
    lines = answer.text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks
    assert all(chunk["service_tier"] == "flex" for chunk in chunks)


def test_anthropic_s_tiers(keyed: Server) -> None:
    for key, wanted, served in (
        ("gold", "auto", "priority"),
        ("gold", "standard_only", "standard"),
        ("plain", "auto", "standard"),
        ("bulk", "auto", "batch"),
    ):
        answer, _ = asked(keyed, "/v1/messages", key, service_tier=wanted)
        assert answer["usage"]["service_tier"] == served
    body = {**CHAT, "service_tier": "standard_only"}
    headers = {"X-Api-Key": "plain"}
    assert keyed.http.post("/v1/messages/count_tokens", json=body, headers=headers).status_code == 200


@pytest.mark.parametrize(("key", "wanted"), [("plain", "priority"), ("bulk", "default")])
def test_a_better_tier_than_the_key_s_is_refused(keyed: Server, key: str, wanted: str) -> None:
    body, headers = {**CHAT, "service_tier": wanted}, {"X-Api-Key": key}
    error = error_of(keyed.http.post("/v1/chat/completions", json=body, headers=headers), 400)
    assert error["param"] == "service_tier"
    assert f'not "{wanted}"' in error["message"]
    assert not keyed.engine.submissions
    rendered = keyed.http.post("/v1/chat/completions/render", json=body, headers=headers)
    assert rendered.status_code == 200, "nothing is queued there"


def test_an_unknown_tier_is_refused(keyed: Server) -> None:
    for path, wrong in (("/v1/chat/completions", "gold"), ("/v1/messages", "flex")):
        body = {**BODIES[path], "service_tier": wrong}
        answer = keyed.http.post(path, json=body, headers={"X-Api-Key": "gold"})
        assert answer.status_code == 400
        assert "service_tier" in answer.json()["error"]["message"]


def test_first_come_first_served_refuses_priorities_and_serves_every_tier_as_default(start: Start) -> None:
    server = start("Hello", scheduling_policy="fcfs")
    error = error_of(server.chat(priority=1), 400)
    assert error["param"] == "priority"
    assert "--scheduling-policy" in error["message"]
    assert server.chat(priority=0, service_tier="priority").json()["service_tier"] == "default"


def test_without_keys_an_address_is_a_tenant_and_every_tier_open(start: Start) -> None:
    server = start("Hello", scheduling_policy="priority")
    assert server.chat(service_tier="priority").json()["service_tier"] == "priority"
    for key in ("made up", "another"):
        server.http.post("/v1/chat/completions", json=CHAT, headers={"X-Api-Key": key})
    assert {one.request.scheduling.tenant for one in server.engine.submissions} == {"127.0.0.1"}
    assert NETWORK == 64


def test_without_keys_nobody_is_served_first_for_saying_so(start: Start) -> None:
    """By the policy unless set, which is fair between addresses; behind others one may go."""
    server = start("Hello")
    for asked, served in (("priority", "default"), ("auto", "default"), ("flex", "flex")):
        assert server.chat(service_tier=asked).json()["service_tier"] == served
    assert server.chat(priority=-3).status_code == 200, "before others of the same address"


def test_a_proxy_on_this_machine_says_whose_address_it_is(start: Start) -> None:
    server = start("Hello")
    for told, tenant in (("203.0.113.9", "203.0.113.9"), ("10.9.9.9, 2001:db8::1:2:3:4", "20010db800000000")):
        answer = server.http.post("/v1/completions", json={"prompt": "Hi"}, headers={"X-Forwarded-For": told})
        assert answer.status_code == 200
        assert server.engine.submissions[-1].request.scheduling.tenant == tenant
