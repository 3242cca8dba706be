"""Access control: API keys, and browsers of other origins."""

from pathlib import Path

import pytest

from tests.server.api.conftest import Start
from tests.server.api.test_bad_input import error_of


def test_several_keys_from_a_file(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# the team's\nfirst-key\n\n second-key  # Ann\n")
    server = start("x", api_key="own-key", api_key_file=keys)
    for key in ("own-key", "first-key", "second-key"):
        for headers in (
            {"Authorization": f"Bearer {key}"},
            {"authorization": f"bearer {key}"},
            {"X-Api-Key": key},
        ):
            assert server.http.get("/v1/models", headers=headers).status_code == 200
    assert server.http.get("/v1/models", headers={"Authorization": "bearer own-key"}).status_code == 200
    assert error_of(server.http.get("/v1/models", headers={"X-Api-Key": ""}), 401)
    for key in ("first", "first-key,second-key", "Ann", "# the team's"):
        for headers in ({"Authorization": f"Bearer {key}"}, {"Authorization": key}, {"X-Api-Key": key}):
            assert error_of(server.http.get("/v1/models", headers=headers), 401)


def test_every_key_is_compared_whole(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time reveals nothing: every key is compared, each in constant time."""
    compared = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append(key)
        return given == key

    monkeypatch.setattr("qwen_serve.server.api.middleware.hmac.compare_digest", compare)
    keys = tmp_path / "keys"
    keys.write_text("a\nb\nc\n")
    server = start("x", api_key_file=keys)
    assert server.http.get("/v1/models", headers={"Authorization": "Bearer a"}).status_code == 200
    assert compared == [b"a", b"b", b"c"]


ASK = {
    "Origin": "https://page.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize("origins", ["https://page.example, http://localhost:3000", "*"])
def test_a_page_of_an_allowed_origin_may_call(start: Start, origins: str) -> None:
    server = start("x", allowed_origins=origins, api_key="key")
    preflight = server.http.options("/v1/chat/completions", headers=ASK)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] in ("https://page.example", "*")
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-private-network" not in preflight.headers
    private = {**ASK, "Access-Control-Request-Private-Network": "true"}  # as Chrome asks for localhost
    preflight = server.http.options("/v1/chat/completions", headers=private)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-private-network"] == "true"
    other = server.http.options("/v1/models", headers={**private, "Origin": "https://other.example"})
    assert origins == "*" or "access-control-allow-private-network" not in other.headers
    headers = {"Origin": "https://page.example"}
    refused = server.http.get("/v1/models", headers=headers)
    assert refused.status_code == 401
    assert "access-control-allow-origin" in refused.headers, "or the page could not read why"
    answer = server.http.get("/v1/models", headers={**headers, "Authorization": "Bearer key"})
    assert answer.status_code == 200
    assert "access-control-allow-origin" in answer.headers


@pytest.mark.parametrize("key", [{}, {"api_key": "key"}])
@pytest.mark.parametrize("origins", [{}, {"allowed_origins": "https://other.example"}])
def test_any_other_origin_may_not(start_shared: Start, key: dict[str, str], origins: dict[str, str]) -> None:
    """A browser asks without a key, and gets an answer that says what is missing: not a key."""
    server = start_shared("x", **key, **origins)
    preflight = server.http.options("/v1/models", headers=ASK)
    assert "access-control-allow-origin" not in preflight.headers
    assert "--allowed-origins" in error_of(preflight, 403)["message"]
    assert server.http.options("/v1/models").status_code == (401 if key else 405), "no preflight"
    answer = server.http.get("/v1/models", headers={"Origin": "https://page.example"})
    assert "access-control-allow-origin" not in answer.headers
