"""Where a server's time goes: read from its metrics, as what was added by a load."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench import phases
from bench.errors import BenchError, ServerError
from bench.load.client import Client, Reply
from bench.phases import difference, main, parse, parser, tables
from tests.bench.fake_server import FakeServer

METRICS = """\
# HELP qwen_steps_total Steps of the engine
# TYPE qwen_steps_total counter
qwen_steps_total{{kind="decode",rows="1"}} {steps}
# HELP qwen_step_tokens_total Tokens in their batches
# TYPE qwen_step_tokens_total counter
qwen_step_tokens_total{{kind="decode",rows="1"}} {steps}
# HELP qwen_step_seconds_total Time spent on them
# TYPE qwen_step_seconds_total counter
qwen_step_seconds_total{{kind="decode",phase="fill",rows="1"}} {fill}
qwen_step_seconds_total{{kind="decode",phase="decode",rows="1"}} {decode}
qwen_step_seconds_total{{kind="decode",phase="wait",rows="1"}} {wait}
# TYPE qwen_kv_cells gauge
qwen_kv_cells 10.0
"""


def metrics(steps: int, fill: float, decode: float, wait: float) -> str:
    return METRICS.format(steps=float(steps), fill=fill, decode=decode, wait=wait)


def test_only_what_was_added_counts() -> None:
    before, after = parse(metrics(10, 1.0, 2.0, 3.0)), parse(metrics(14, 1.004, 2.02, 3.04))
    (steps,) = difference(8, before, after)
    assert (steps.level, steps.kind, steps.rows, steps.steps, steps.tokens) == (8, "decode", 1, 4, 4)
    assert steps.milliseconds == pytest.approx({"fill": 1.0, "decode": 5.0, "wait": 10.0})
    assert steps.device_ms == pytest.approx(15)
    assert steps.host_ms == pytest.approx(1)
    assert difference(8, after, after) == []


def test_a_server_before_its_first_step_has_no_totals() -> None:
    assert parse("# TYPE qwen_kv_cells gauge\nqwen_kv_cells 10.0\n") == {}


def test_other_servers_are_refused() -> None:
    with pytest.raises(ServerError, match="this repository"):
        parse("# TYPE llamacpp:tokens gauge\nllamacpp:tokens 1\n")


async def test_a_run_against_a_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fake server answers; its metrics grow by a hundred steps with each look."""
    looks = 0
    request = Client.request

    async def counting(self: Client, method: str, path: str, **keywords: Any) -> Reply:
        nonlocal looks
        if path != "/metrics":
            return await request(self, method, path, **keywords)
        looks += 1
        return Reply(200, {}, metrics(100 * looks, 0.1 * looks, 0.2 * looks, 0.3 * looks), 0.0)

    monkeypatch.setattr(Client, "request", counting)
    out = tmp_path / "phases.json"
    with FakeServer() as server:
        args = parser().parse_args(
            [
                "--url",
                server.url,
                "--levels",
                "1,2",
                "--rounds",
                "1",
                "--output-tokens",
                "4",
                "--out",
                str(out),
            ]
        )
        args.command = ["phases"]
        assert await main(args) == 0
    result = json.loads(out.read_text())
    assert result["kind"] == "phases"
    assert [steps["level"] for steps in result["steps"]] == [1, 2]
    assert all(steps["steps"] == 100 for steps in result["steps"])
    assert [rate["completion_tokens"] for rate in result["rates"]] == [4, 8]
    printed = capsys.readouterr().out
    assert "Milliseconds a step" in printed
    assert "host: all but decode and wait" in printed


def test_phases_are_columns_in_their_order() -> None:
    steps = difference(1, {}, parse(metrics(1, 0.001, 0.002, 0.003)))
    result = argparse.Namespace(steps=steps, rates=[])
    table = tables(result)[0]  # type: ignore[arg-type]
    assert list(table.header)[5:] == ["fill", "decode", "wait"]
    assert phases.DEVICE == ("decode", "wait")


@pytest.mark.parametrize("text", [None, " \n"])
async def test_a_text_without_words_is_an_error(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BenchError, match=f"--text {path}: "):
        await main(parser().parse_args(["--text", str(path)]))
