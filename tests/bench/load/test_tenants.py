"""`throughput --workload tenants`: loads are measured by tenant, and refused requests are not failures."""

from pathlib import Path

import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.store import load
from tests.bench.fake_server import FakeServer, Script

LOADS = ("short beside 2 long", "short beside 4 long", "two equal", "ten equal", "one of ten hostile")
SMALL = ["--window", "0.3", "--flood", "4", "--beside", "2", "--clients", "1", "--every", "0.05"]
SMALL += ["--long-tokens", "40,8", "--short-tokens", "12,4", "--even-tokens", "20,4"]


def measure(server: FakeServer, folder: Path, keys: int = 10) -> int:
    (folder / "keys").write_text("# keys\n" + "".join(f"key-{n} class=flex # {n}\n" for n in range(keys)))
    arguments = ["--url", server.url, "--workload", "tenants", "--keys", str(folder / "keys")]
    return main(["throughput", *arguments, "--out", str(folder / "out"), *SMALL])


def test_every_load_is_measured_by_tenant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(Script(token_delay=0.005)) as server:
        assert measure(server, tmp_path) == 0
        bodies = [body for path, body in server.requests if path == "/v1/completions"]
    results = load([tmp_path / "out"])
    for name in LOADS:
        parts = [rows for cell, rows in results.frame.groupby("cell") if str(cell).startswith(name)]
        rates = [rows[rows["metric"] == "output_rate"]["value"].sum() for rows in parts]
        assert len(parts) == {"s": 3, "t": 3, "o": 11}[name[0]] + 8 * (name == "ten equal")
        assert sum(rates) == pytest.approx(2 * max(rates)), "all of them, and each"
        assert min(rates) > 0
    shown = capsys.readouterr().out
    for figure in ("TTFT p95 of short ones", "output tokens apart", "lose to a hostile tenth"):
        assert figure in shown
    prompts = [body["prompt"] for body in bodies]
    assert len({*prompts}) == len(prompts), "none is sent twice"
    lengths = {body["max_tokens"] for body in bodies}
    assert lengths > {4, 8}
    assert {5, 6, 7} & lengths, "answers of one length, asked for at once, would end together for ever"
    steps = results.of(metric="step_tokens")
    assert {name.removesuffix(", decode, 1 rows") for name in steps["cell"]} == {
        f"tenants, {load}" for load in LOADS
    }


def test_a_request_that_is_refused_is_sent_again(tmp_path: Path) -> None:
    turns = iter(range(10**6))
    with FakeServer(
        Script(fail=lambda path: 429 if "completions" in path and next(turns) % 5 == 0 else None)
    ) as server:
        assert measure(server, tmp_path) == 0
    assert load([tmp_path / "out"]).of(metric="refused")["value"].sum() > 0


def test_too_few_keys_and_failures_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        assert measure(server, tmp_path, keys=9) == 1
    assert "9 keys; want 10" in capsys.readouterr().err
    with FakeServer(Script(fail=lambda path: 500 if "completions" in path else None)) as server:
        assert measure(server, tmp_path) == 1
    assert "requests failed; the first: " in capsys.readouterr().err
