"""How a request's body may be coded for its transfer (RFC 9112, section 6.1)."""

import pytest

from tests.server.api.conftest import Start
from tests.server.api.test_connection import connected, everything, send_as_far_as_possible


@pytest.mark.parametrize(
    ("codings", "status"),
    [
        (["gzip, chunked"], b"501"),
        (["gzip", "chunked"], b"501"),
        (["identity"], b"501"),
        (["chunked, gzip"], b"400"),
        (["chunked, chunked"], b"400"),
        (["Chunked"], b"200"),
    ],
)
def test_a_body_in_another_coding_is_not_read_as_it_is(
    start_shared: Start, codings: list[str], status: bytes
) -> None:
    body = '{"prompt": "Hi", "max_tokens": 1}'
    lines = "".join(f"Transfer-Encoding: {coding}\r\n" for coding in codings)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Connection: close\r\n"
    with connected(start_shared("x")) as client:
        send_as_far_as_possible(client, [f"{head}{lines}\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n".encode()])
        answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 " + status)
