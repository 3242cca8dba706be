"""deploy/ without Docker or a cluster: its files agree with the server."""

import json
import re
import shlex
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from qwen_serve.server.cluster import ROUTER_FLAGS
from qwen_serve.server.settings import Settings
from tests.processes import run
from tests.server.api.conftest import starter
from tests.server.serving import certificate, served
from tests.waiting import wait_until

DEPLOY = Path(__file__).parent.parent / "deploy"


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def flags(arguments: list[str]) -> set[str]:
    return {argument for argument in arguments if "=" in argument}


def test_routers_are_set_alike_everywhere() -> None:
    wanted = {f"--{name}={value}" for name, value in ROUTER_FLAGS.items()}
    assert flags(load("compose.yaml")["services"]["router"]["command"]) == wanted
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    router = next(
        d for d in documents if d["kind"] == "Deployment" and d["metadata"]["name"] == "qwen-router"
    )
    arguments = router["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {flag for flag in flags(arguments) if "discovery" not in flag and "app=" not in flag} == wanted


def test_the_router_image_is_the_version_that_is_tested() -> None:
    pin = re.search(r"vllm-router==[\d.]+", (DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert pin
    assert pin[0] in (DEPLOY / "Dockerfile.router").read_text(encoding="utf-8")


def test_every_worker_is_routed_to_and_scraped() -> None:
    services = load("compose.yaml")["services"]
    workers = [name for name in services if name.startswith("worker-")]
    command = services["router"]["command"]
    assert [f"http://{name}:8080" for name in workers] == [a for a in command if a.startswith("http")]
    jobs = {
        job["job_name"]: job["static_configs"][0]["targets"]
        for job in load("prometheus.yaml")["scrape_configs"]
    }
    assert jobs["worker"] == [f"{name}:8080" for name in workers]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith("./") or (DEPLOY / source).is_file(), source


def test_one_server_with_its_dashboard() -> None:
    """compose.single.yaml: the image that make builds, its port, its scraper, files that are there."""
    services = load("compose.single.yaml")["services"]
    server = services["server"]
    make = ["make", "--no-print-directory", "-n", "image", "CUDA=0"]
    built = run(make, cwd=DEPLOY.parent, check=True).stdout
    words = shlex.split(built.replace("\\\n", " ").splitlines()[-1])
    assert server["image"] == f"${{IMAGE:-{words[words.index('-t') + 1]}}}"
    for name in ("Dockerfile.cpu", "Dockerfile.cuda"):
        text = (DEPLOY.parent / name).read_text(encoding="utf-8")
        assert f"\nCMD {json.dumps(server['command'])}\n" in text
        port = re.search(r"^EXPOSE (\d+)$", text, re.MULTILINE)
        assert port
        assert [f"${{PORT:-8080}}:{port[1]}"] == server["ports"]
        assert f"QWEN_PORT={port[1]}" in text
        (job,) = load("prometheus.single.yaml")["scrape_configs"]
        assert job["static_configs"] == [{"targets": [f"server:{port[1]}"]}]
    assert set(load("compose.gpu.yaml")["services"]) == {"server"}
    for name, service in services.items():
        if extended := service.get("extends"):
            assert name == extended["service"]
            assert name in load(extended["file"])["services"]
        for volume in service.get("volumes", []):
            source, target, _ = volume.split(":")
            assert (DEPLOY / source).is_file()
            assert target in [v.split(":")[1] for v in load("compose.yaml")["services"][name]["volumes"]]


def test_servers_may_do_nothing_but_serve() -> None:
    """Containers run without root, without capabilities, and with a read-only file system."""
    for name in ("compose.yaml", "compose.single.yaml"):
        servers = [s for s in load(name)["services"].values() if "qwen-serve" in s.get("image", "")]
        assert servers
        for server in servers:
            assert server["read_only"]
            assert server["cap_drop"] == ["ALL"]
            assert server["security_opt"] == ["no-new-privileges:true"]


def test_labels_and_accounts_of_the_manifest_belong_together() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")))
    deployments = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Deployment"}
    for spec in deployments.values():
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    service = next(d for d in documents if d["kind"] == "Service")
    assert service["spec"]["selector"] == {"app": "qwen-router"}
    router = deployments["qwen-router"]["template"]["spec"]
    assert "app=qwen-worker" in router["containers"][0]["args"]
    assert router["serviceAccountName"] in {
        d["metadata"]["name"] for d in documents if d["kind"] == "ServiceAccount"
    }


def test_the_dashboard_shows_metrics_that_there_are(nano_q4_k_m: Path) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "qwen-serve.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    wanted = {name for expression in expressions for name in re.findall(r"qwen_\w+", expression)}
    assert len(wanted) >= 10
    with served("--model", nano_q4_k_m, "--ctx-size", "1024", "--parallel", "2") as client:
        there = set(re.findall(r"^(qwen_\w+)", client.get("/metrics").text, re.MULTILINE))
    assert wanted <= there


@contextmanager
def proxied(folder: Path, upstream: str) -> Iterator[httpx.Client]:
    """nginx with deploy/nginx.conf, in which only addresses and paths are changed."""
    if (nginx := shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin")) is None:
        pytest.skip("nginx is not installed (apt-get install nginx-light)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pem, key = certificate(folder)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    ours = {
        "worker_processes auto;": f"daemon off; master_process off; pid {folder}/pid; error_log stderr;",
        "http {": "http { access_log off; "
        + " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds),
        "127.0.0.1:8080": upstream.removeprefix("http://"),
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/nginx/qwen.pem": str(pem),
        "/etc/nginx/qwen.key": str(key),
    }
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    for old, new in ours.items():
        assert text.count(f" {old}") + text.startswith(old) + text.count(f"\n{old}") == 1, old
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    command = [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
    subprocess.run([*command, "-t"], check=True)
    verify = ssl.create_default_context(cafile=pem)
    process = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=verify, timeout=30) as client:
            wait_until(lambda: answers(client))
            yield client
    finally:
        process.terminate()
        process.wait()


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/ping").status_code == 200
    except httpx.TransportError:
        return False


def test_nginx_passes_events_on_and_bounds_what_an_address_may_have(tmp_path: Path) -> None:
    config = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    each = int(re.findall(r"limit_conn connections (\d+)", config)[0])
    assert f"client_max_body_size {Settings.model_fields['max_body_mib'].default}m;" in config
    ask = {"prompt": "x", "stream": True}
    streams: list[Iterator[str]] = []
    with starter(tmp_path) as start:
        server = start("word " * 10_000, delay=0.01, context_size=10**6, capacity=100)
        with proxied(tmp_path, server.url) as client, ExitStack() as open_:
            for _ in range(each):
                stream = client.stream("POST", "/v1/completions", json={**ask, "max_tokens": 50_000})
                streams.append(open_.enter_context(stream).iter_lines())
                assert next(streams[-1]).startswith("data: "), "before the answer is complete"
            assert len(server.engine.running) == each
            assert client.post("/v1/completions", json=ask).status_code == 429
            assert httpx.get(f"{server.url}/ping").status_code == 200
            open_.close()
            wait_until(lambda: not server.engine.running)
            one = {"prompt": "x", "max_tokens": 1}
            claimed = client.post("/v1/completions", json=one, headers={"X-Forwarded-For": "203.0.113.9"})
            assert claimed.status_code == 200
            assert server.engine.submissions[-1].request.scheduling.tenant == "127.0.0.1", (
                "not what a client claims"
            )
            assert client.get("/metrics").status_code == 403
