"""Where the server listens, over TLS or on a Unix socket too, and what it says of who can reach it."""

import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from qwen_serve.server.__main__ import BAD_SETTINGS
from qwen_serve.server.listening import ListenError, exposures, listen
from qwen_serve.server.settings import Settings
from qwen_serve.server.settings_sources import load_settings
from tests.server.serving import ServerProcess, certificate

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
    pem, key = certificate(tmp_path)
    with ServerProcess("--model", nano_q4_k_m, *SMALL, "--ssl-certfile", pem, "--ssl-keyfile", key) as server:
        url = server.url
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=pem)
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


def settings_for(tmp_path: Path, **chosen: object) -> Settings:
    model = tmp_path / "model.gguf"
    model.touch()
    return Settings(model=model, **chosen)  # type: ignore[arg-type]


def test_a_certificate_that_is_none(nano_q4_k_m: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "certificate.pem"
    wrong.write_text("none")
    flags = ("--ssl-certfile", wrong, "--ssl-keyfile", wrong)
    with ServerProcess("--model", nano_q4_k_m, *SMALL, *flags) as server:
        assert server.wait() == BAD_SETTINGS
        assert "--ssl-certfile" in server.log
        assert "Traceback" not in server.log


def test_a_name_with_several_addresses_has_one_port(tmp_path: Path) -> None:
    sockets = listen(settings_for(tmp_path, host="localhost", port=0))
    assert len({found.getsockname()[1] for found in sockets}) == 1
    for found in sockets:
        with socket.create_connection(found.getsockname()[:2], timeout=5):
            found.close()


@pytest.mark.parametrize(
    ("host", "why"), [("nosuch.invalid", "--host nosuch.invalid"), ("192.0.2.1", "assign")]
)
def test_an_address_that_is_not_ours(tmp_path: Path, host: str, why: str) -> None:
    with pytest.raises(ListenError, match=why):
        listen(settings_for(tmp_path, host=host, port=0))


def test_a_unix_socket_is_taken_from_the_dead_alone(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    settings = settings_for(tmp_path, uds=path)
    with listen(settings)[0]:
        with pytest.raises(ListenError, match="another process listens there"):
            listen(settings)
        path.chmod(0o600)
    assert path.is_socket(), "left behind, as by a server that was killed"
    with listen(settings)[0], socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    path.write_text("somebody's file")
    with pytest.raises(ListenError, match=r"--uds .*server.sock"):
        listen(settings)
    assert path.read_text() == "somebody's file"


def test_who_can_reach_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, keys, config = tmp_path / "model.gguf", tmp_path / "keys", tmp_path / "config.toml"
    model.touch()
    keys.write_text("secret")
    config.write_text('api_key = "secret"')

    def said(*flags: str | Path) -> list[str]:
        settings, sources, _ = load_settings(["--model", str(model), *map(str, flags)])
        return exposures(settings, sources)

    for path in (keys, config):
        path.chmod(0o600)
    assert said() == said("--host", "::1") == said("--host", "localhost") == []
    assert said("--host", "0.0.0.0", "--uds", tmp_path / "socket") == []
    for host in ("0.0.0.0", "::", "192.168.0.7", "my.example"):
        assert "no API key is set" in "".join(said("--host", host))
        assert said("--host", host, "--api-key-file", keys) == said("--host", host, "--config", config) == []
    for path in (keys, config):
        path.chmod(0o640)
    assert said("--api-key-file", keys) == said("--config", config) == []
    for path in (keys, config):
        path.chmod(0o644)
    assert f"can read {keys}" in "".join(said("--api-key-file", keys))
    assert f"can read {config}" in "".join(said("--config", config))
    monkeypatch.setenv("QWEN_API_KEY", "secret")
    assert said() == []
