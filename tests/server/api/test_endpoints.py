"""The server's description of itself, and its answers for endpoints that it lacks."""

from pathlib import Path

import pytest

from qwen_serve.server.api.routes import endpoints
from qwen_serve.server.api.unsupported import UNSUPPORTED
from tests.server.api.conftest import TEMPLATE, Server, Start
from tests.server.api.test_bad_input import error_of


@pytest.fixture(scope="module")
def server(start_shared: Start) -> Server:
    return start_shared("x", alias="fake")


def test_props_are_llama_servers(server: Server) -> None:
    props = server.http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["default_generation_settings"]["params"]["temperature"] == 0.0
    assert props["total_slots"] == server.engine.settings.parallel
    assert props["chat_template"] == TEMPLATE.read_text(encoding="utf-8")
    assert props["model_alias"] == "fake"
    assert Path(props["model_path"]).name == "fake.gguf"
    assert props["modalities"] == {"vision": False, "audio": False}
    assert (props["bos_token"], props["eos_token"]) == ("", "<|im_end|>")
    assert props["build_info"].startswith("qwen-serve ")


def test_the_version_is_that_of_the_description(server: Server) -> None:
    version = server.http.get("/version").json()["version"]
    assert version == server.http.get("/openapi.json").json()["info"]["version"]


PATHS = [
    path.replace("{rest:path}", "some/thing") for paths in UNSUPPORTED.values() for path in paths.split()
]


@pytest.mark.parametrize("path", PATHS)
def test_what_is_not_offered_is_said_to_be_so(server: Server, path: str) -> None:
    for method in ("GET", "POST", "PUT", "OPTIONS", "PURGE"):
        answer = server.http.request(method, path)
        assert answer.status_code == 501
        if path.startswith("/api/"):
            assert f"{method} {path}" in answer.json()["error"]
            continue
        error = error_of(answer, 501) if "/v1/messages" not in path else None
        assert f"{method} {path}" in answer.json()["error"]["message"]
        assert error is None or (error["type"], error["code"]) == ("not_supported_error", "not_supported")


@pytest.mark.parametrize(
    ("path", "model"),
    [("/infill", "Qwen2.5-Coder"), ("/v1/embeddings", "Qwen3-Embedding"), ("/rerank", "Qwen3-Reranker")],
)
def test_a_model_that_does_it_is_named(server: Server, path: str, model: str) -> None:
    assert model in error_of(server.post(path, input_prefix="a", input_suffix="b"), 501)["message"]


def test_an_unknown_path_is_named_with_those_that_there_are(server: Server) -> None:
    for method, path in (("POST", "/v1/chat/completion"), ("GET", "/v2/models"), ("DELETE", "/nothing")):
        message = error_of(server.http.request(method, path), 404)["message"]
        assert message.startswith(f"{method} {path}: there is no such path")
        for known in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/models/{model}", "/ping"):
            assert f"{known}," in message or message.endswith(known)
        assert "/v1/embeddings" not in message
        assert "/openapi.json" not in message


def test_a_wrong_method_is_named_with_the_right_one(server: Server) -> None:
    message = error_of(server.http.get("/v1/chat/completions"), 405)["message"]
    assert message == "GET /v1/chat/completions: this method is not allowed here; use POST"
    assert "GET" in error_of(server.http.post("/v1/models"), 405)["message"]


def test_head_is_get_without_a_body(server: Server) -> None:
    paths = {route.path_format for route in endpoints() if "GET" in (route.methods or ())} | {
        "/",
        "/page/style.css",
    }
    assert len(paths) > 9
    for path in paths | {"/v1/models/nothing", "/openapi.json"}:
        path = path.replace("{model}", "fake")
        got, head = server.http.get(path), server.http.head(path)
        assert (head.status_code, head.content) == (got.status_code, b""), path
        assert head.headers.keys() == got.headers.keys(), path
        for name in head.headers.keys() - {"date", "x-request-id", "content-length"}:
            assert head.headers[name] == got.headers[name], (path, name)
        assert int(head.headers["content-length"]) > 0


METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PURGE"}


def test_every_path_refuses_every_other_method(server: Server) -> None:
    """`Allow` lists the path's methods. No path is taken for another server's endpoint."""
    methods: dict[str, set[str]] = {"/": {"GET", "HEAD"}}
    for route in endpoints():
        methods.setdefault(route.path_format.replace("{model}", "fake"), set()).update(route.methods or ())
    for path, allowed in methods.items():
        for method in METHODS - allowed:
            answer = server.http.request(method, path)
            assert answer.status_code == 405, (method, path)
            if path != "/":
                assert set(answer.headers["allow"].split(", ")) == allowed, (method, path)


def test_a_file_of_the_page_is_only_read(server: Server) -> None:
    answer = server.http.put("/page/style.css")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
