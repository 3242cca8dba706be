"""What can be proved of deploy/ without Docker or a cluster: that its files agree with the server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from server.cluster import ROUTER_FLAGS
from tests.server.serving import served

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
