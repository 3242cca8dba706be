"""`cache_salt`, API keys and `cache_report`: sharing of prefixes, and its report."""

from typing import Any

from qwen_serve.server.api.tenant import salt_of
from tests.server.api.conftest import Server, Start


def salt(server: Server, *, headers: dict[str, str] | None = None, **body: Any) -> str:
    """The salt that the engine gets for a request."""
    answer = server.http.post("/v1/completions", json={"prompt": "Hi", **body}, headers=headers or {})
    assert answer.status_code == 200, answer.text
    return server.engine.submissions[-1].request.salt


def test_only_the_same_key_and_salt_share(start: Start) -> None:
    server = start("Hello")
    one, other = {"Authorization": "Bearer one"}, {"Authorization": "Bearer other"}
    salts = [
        salt(server, headers=headers, **({"cache_salt": given} if given else {}))
        for headers in ({}, one, other)
        for given in (None, "a", "b")
    ]
    assert salts[0] == ""
    assert len({*salts}) == 9
    assert salt(server, headers=one, cache_salt="a") == salts[4]
    assert salt(server, headers={"x-api-key": "one"}) == salts[3]
    assert not any(secret in "".join(salts) for secret in ("one", "other"))


def test_keys_share_where_they_are_told_to(start: Start) -> None:
    server = start("Hello", prefix_by_key=False)
    assert salt(server, headers={"Authorization": "Bearer one"}) == ""
    assert salt(server, headers={"Authorization": "Bearer one"}, cache_salt="a") == salt(
        server, cache_salt="a"
    )


def test_a_key_and_a_salt_do_not_run_together() -> None:
    assert salt_of("ab", "c") != salt_of("a", "bc")


def test_why_the_rest_was_not_cached_is_told_to_who_asks(start: Start) -> None:
    server = start("Hello")
    assert "cache_miss" not in server.chat().json()["usage"]["prompt_tokens_details"]
    told = server.chat(cache_report=True).json()["usage"]["prompt_tokens_details"]
    assert told["cache_miss"] == {"reason": "new", "position": 0}
    told = server.post("/v1/completions", prompt=["a", "b"], cache_report=True).json()["usage"]
    assert told["prompt_tokens_details"]["cache_miss"] == [{"reason": "new", "position": 0}] * 2


def test_a_prompt_that_is_not_to_be_cached_shares_with_nobody(start: Start) -> None:
    """`cache_prompt` is llama-server's field, which benchmarks send."""
    server = start("Hello")
    salts = {salt(server, cache_prompt=False, cache_salt=given) for given in (None, None, "a")}
    assert len(salts) == 3
    assert "" not in salts
    assert salt(server, cache_prompt=True) == ""
