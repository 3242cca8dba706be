"""Where the server listens: over TLS, or on a Unix socket."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.server.serving import ServerProcess

SMALL = ("--parallel", "1", "--ctx-size", "512")


def answers(client: httpx.Client) -> Callable[[], bool]:
    """Whether the server is ready; false while nothing listens yet."""

    def ask() -> bool:
        try:
            return client.get("/ping").status_code == 200
        except httpx.TransportError:
            return False

    return ask


def test_tls(nano_q4_k_m: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    with ServerProcess(
        "--model", nano_q4_k_m, *SMALL, "--ssl-certfile", certificate, "--ssl-keyfile", key
    ) as server:
        url = server.url
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=url, verify=context) as client:
            server.wait_for(answers(client))
            assert client.get("/v1/models").status_code == 200


def test_a_unix_socket(nano_q4_k_m: Path, tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with ServerProcess("--model", nano_q4_k_m, *SMALL, "--uds", path) as server:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://server") as client:
            server.wait_for(answers(client))
            assert client.get("/v1/models").status_code == 200
        server.process.terminate()
        assert server.wait() == 0
        assert not path.exists()
