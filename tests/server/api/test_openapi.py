"""/openapi.json describes the server, and requests generated from it never cause a server error.

FUZZ_CASES, in the environment, is the number of requests made for each endpoint (`make fuzz`).
"""

import os
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from openapi_spec_validator import validate
from schemathesis import Case, GenerationMode
from schemathesis.checks import load_all_checks, positive_data_acceptance

from tests.server.api.conftest import Server, Start

load_all_checks()

CASES = int(os.environ.get("FUZZ_CASES", "25"))
BODIES = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/invocations",
    "/tokenize",
    "/detokenize",
}


@pytest.fixture(scope="module")
def server(start_shared: Start) -> Iterator[Server]:
    call = "A reply.<tool_call>\n<function=f>\n</function>\n</tool_call>"
    yield start_shared(call, capacity=100_000, max_queue=100_000)


ENDPOINTS = [("POST", path) for path in sorted(BODIES)] + [
    ("GET", path) for path in ("/ping", "/health", "/metrics", "/v1/models", "/v1/models/{model}")
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
def test_requests_made_from_the_description(
    server: Server, method: str, path: str, mode: GenerationMode
) -> None:
    description = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operation = description[path][method]
    if mode is GenerationMode.NEGATIVE and path not in BODIES:
        pytest.skip("there is nothing to get wrong")

    @settings(
        max_examples=CASES if path in BODIES else 10,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        # what the description cannot say may still be refused: a prompt longer than the context, say
        case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=60)

    run()


@pytest.mark.parametrize("key", [None, "secret"])
def test_the_description_is_valid(start_shared: Start, key: str | None) -> None:
    server = start_shared("x", api_key=key)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    made = server.http.get("/openapi.json", headers=headers).json()
    validate(made)  # references too
    assert made["paths"].keys() > BODIES
    for path in BODIES:
        operation = made["paths"][path]["post"]
        assert {"200", "400", "401", "403", "413", "415", "429", "503"} <= operation["responses"].keys()
        assert ("security" in operation) is bool(key)
    assert list(made["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    assert "422" not in str(made)
    assert "security" not in made["paths"]["/ping"]["get"]


def test_the_description_comes_from_the_models(server: Server) -> None:
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    prompt = schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert {"type": "string", "minLength": 1} in prompt
    stop = schemas["CompletionRequest"]["properties"]["stop"]["anyOf"]
    assert {option["type"] for option in stop} == {"string", "array", "null"}
    assert schemas["ChatRequest"]["properties"]["messages"]["items"] == {
        "$ref": "#/components/schemas/MessageInput"
    }
