"""A model that is unloaded while there are no requests, and loaded again."""

import re
import signal
import threading
import weakref
from pathlib import Path

import httpx
import pytest

from tests.server.serving import ServerProcess, serving
from tests.waiting import wait_until

PROMPT = {"prompt": "one two three four five six seven eight " * 24, "max_tokens": 4}


def steps(metrics: str) -> float:
    """Tokens that the engine computed, by its own count."""
    return sum(
        float(value) for value in re.findall(r"^qwen_step_tokens_total\S* (\S+)$", metrics, re.MULTILINE)
    )


def test_asleep_nothing_of_the_engine_is_left_and_awake_it_answers_and_counts_as_before(
    nano_f32: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "prefixes"
    with (
        serving(nano_f32, prefix_file=kept, sleep_idle_seconds=2.0) as served,
        httpx.Client(base_url=served.url, timeout=60) as http,
    ):
        engine = weakref.ref(served.engine)
        first = http.post("/v1/completions", json=PROMPT).json()
        wait_until(lambda: served.service.status == "sleeping" and engine() is None)
        assert kept.stat().st_size
        counted = steps(http.get("/metrics").text)
        assert counted > 192
        again = http.post("/v1/completions", json=PROMPT).json()
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the prefix file was read"
        assert counted < steps(http.get("/metrics").text) < 2 * counted


@pytest.mark.slow
@pytest.mark.parametrize("when", ["asleep", "waking"])
def test_sigterm_ends_it_asleep_and_waking(nano_f16: Path, when: str) -> None:
    with ServerProcess("--model", nano_f16, "--sleep-idle-seconds", "0.2") as server:
        server.wait_for(lambda: "asleep" in server.log)
        if when == "waking":
            answers: list[httpx.Response] = []
            url = server.url
            asking = threading.Thread(
                target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=PROMPT, timeout=60))
            )
            asking.start()
            server.wait_for(lambda: server.log.count("memory for") == 2)
        server.process.send_signal(signal.SIGTERM)
        if when == "waking":
            asking.join()
            assert answers[0].status_code in (200, 503)
            assert answers[0].status_code == 200 or answers[0].json()["error"]["code"] == "draining"
        assert server.wait() == 0
        assert "Traceback" not in server.log
