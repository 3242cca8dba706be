"""The throughput command keeps the concurrency or rate, verifies token counts, and reports all failures."""

import base64
import random
from io import BytesIO
from itertools import count, islice, pairwise
from pathlib import Path
from statistics import fmean

import pytest
from PIL import Image

from qwen_serve.bench.cli import main
from qwen_serve.bench.load.client import Completion, Usage
from qwen_serve.bench.load.generator import Sent, arrivals, values_of
from qwen_serve.bench.load.goodput import Limits, read_limits
from qwen_serve.bench.load.protocol import WEIGHTS, at_concurrency
from qwen_serve.bench.report.requests import hackathon_score, predicted
from qwen_serve.bench.store import Results, load
from tests.bench.fake_server import Body, FakeReply, FakeServer, Script, reply_to

SMALL = ["--input-tokens", "24", "--output-tokens", "12", "--requests", "8"]


def measure(server: FakeServer, store: Path, *options: str, status: int = 0) -> Results:
    """Run the command and load what it recorded."""
    assert main(["throughput", "--url", server.url, "--out", str(store), *SMALL, *options]) == status
    return load([store])


def cell(results: Results, metric: str, name: str) -> list[float]:
    return results.of(metric=metric, cell=name)["value"].tolist()


def test_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        results = measure(server, tmp_path, "--levels", "1,4")
        prompts = [body["prompt"] for _, body in server.requests if "prompt" in body]
    assert {len(prompt) for prompt in prompts} == {24}
    assert len(set(prompts)) == len(prompts) == (2 + 8) + (4 + 8)
    for name in ("1 concurrent", "4 concurrent"):
        assert len(cell(results, "latency", name)) == len(cell(results, "ttft", name)) == 8
        (rate,), (seconds,), (total,) = (
            cell(results, what, name) for what in ("output_rate", "seconds", "total_rate")
        )
        assert rate == pytest.approx(96 / seconds)
        assert total == pytest.approx((96 + 8 * 24) / seconds)
        assert cell(results, "request_rate", name) == [pytest.approx(8 / seconds)]
        assert cell(results, "spot_checks_failed", name) == [0.0]
    (seconds,) = cell(results, "seconds", "1 concurrent")
    assert 1000 * seconds > sum(cell(results, "latency", "1 concurrent")), "with what lies between requests"
    shown = capsys.readouterr().out
    assert "levels 2, 8, 16, 32, 64 were not run" in shown


def test_temperature(tmp_path: Path) -> None:
    with FakeServer() as server:
        measure(server, tmp_path, "--levels", "2", "--temperature", "0.8", "--spot-checks", "0")
        bodies = [body for _, body in server.requests if "prompt" in body]
    assert {(body["temperature"], body["top_k"], body["top_p"]) for body in bodies} == {(0.8, 20, 0.95)}
    assert len({body["seed"] for body in bodies}) == 8


def test_lengths_vary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        results = measure(server, tmp_path, "--levels", "1", "--range-ratio", "0.5", "--waves", "40")
        bodies = [body for _, body in server.requests if "prompt" in body]
    asked, wanted = (
        [*lengths] for lengths in zip(*((len(b["prompt"]), b["max_tokens"]) for b in bodies), strict=True)
    )
    assert 12 <= min(asked) < 18 < 30 < max(asked) <= 36
    assert 6 <= min(wanted) < 9 < 15 < max(wanted) <= 18
    assert sorted(cell(results, "verified_tokens", "1 concurrent")) == sorted(wanted[-40:])
    shown = capsys.readouterr().out
    assert "24 tokens in, 12 out (+-50%)" in shown
    assert "lengths vary (--range-ratio)" in shown


@pytest.mark.parametrize("level", [1, 2, 6])
def test_a_level_is_never_exceeded_and_warmed_up_at_its_own_concurrency(level: int, tmp_path: Path) -> None:
    """Spot checks count towards the concurrency of the warm-up, and there are as many warm-ups as concurrent
    requests."""
    script = Script(first_token_delay=0.1)
    peaks: list[int] = []
    kinds: list[bool] = []

    def watch(_: str, body: Body) -> Body:
        peaks.append(server.running + 1)
        kinds.append("messages" in body)
        return body

    script.on_request = watch
    with FakeServer(script) as server:
        measure(server, tmp_path, "--levels", str(level), "--spot-checks", "2")
        assert server.peak == level
    warm_ups = max(2, level) + 2
    assert max(peaks[:warm_ups]) == level
    assert sum(kinds[:warm_ups]) == 2, "the sums are asked within the warm-up"
    assert not any(kinds[warm_ups:])


def test_an_open_loop_sends_whatever_is_under_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(Script(first_token_delay=1.0)) as server:
        results = measure(
            server,
            tmp_path,
            "--rate",
            "40",
            "--goodput",
            "ttft=5s,itl=900ms",
            "--spot-checks",
            "0",
            "--warmup",
            "0",
        )
        assert server.peak >= 5, "a closed loop would wait a second for each"
    assert set(results.of(metric="latency")["cell"]) == {"40 req/s"}, "levels only if they are asked for, too"
    assert cell(results, "good", "40 req/s") == [1.0] * 8
    (goodput,), (rate,) = cell(results, "goodput", "40 req/s"), cell(results, "request_rate", "40 req/s")
    assert goodput == rate
    assert "within limits" in capsys.readouterr().out


def test_goodput_counts_what_keeps_every_limit(tmp_path: Path) -> None:
    with FakeServer(Script(first_token_delay=0.2)) as server:
        results = measure(server, tmp_path, "--levels", "2", "--goodput", "ttft=100ms")
    assert cell(results, "good", "2 concurrent") == [0.0] * 8
    assert cell(results, "goodput", "2 concurrent") == [0.0]


def test_arrivals_are_poisson() -> None:
    times = list(islice(arrivals(4.0, random.Random(1)), 20_000))
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0.0
    assert fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert fmean(gap * gap for gap in gaps) == pytest.approx(2 * 0.25**2, rel=0.06)
    assert times[:9] == list(islice(arrivals(4.0, random.Random(1)), 9))


async def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    answer = Completion(
        "a b c", "", "length", Usage(5, 3, None), started=0.0, seconds=0.4, arrivals=[0.2, 0.3, 0.4]
    )
    values = await values_of(Sent(0, planned=1.0, lateness=0.05, ended=1.45, answer=answer), None)
    assert values["latency"] == pytest.approx(450)
    assert values["ttft"] == pytest.approx(250)
    assert values["itl"] == pytest.approx(100)
    assert (values["lateness"], values["verified_tokens"]) == (pytest.approx(50), 3)


def test_limits() -> None:
    limits = read_limits("ttft=0.5s,tpot:50")
    assert limits == Limits({"ttft": 500.0, "itl": 50.0})
    assert limits.kept_by({"ttft": 500.0, "itl": 50.0, "verified_tokens": 9})
    assert not limits.kept_by({"ttft": 500.0, "itl": 51.0, "verified_tokens": 9})
    assert not limits.kept_by({"ttft": 500.0, "verified_tokens": 9}), "not known is not kept"
    assert limits.kept_by({"ttft": 500.0, "verified_tokens": 1}), "one token has no gaps"
    assert not limits.kept_by({"failed": 1})
    for wrong in ("", "ttft", "speed=5ms", "ttft=fast", "ttft=-5ms"):
        with pytest.raises(ValueError, match="want"):
            read_limits(wrong)


def test_claimed_tokens_are_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def inflate(_: str, event: Body) -> Body:
        usage = event.get("usage")
        return {**event, "usage": {**usage, "completion_tokens": 999}} if usage else event

    with FakeServer(Script(on_event=inflate)) as server:
        results = measure(server, tmp_path, "--levels", "2")
    assert cell(results, "claimed_tokens", "2 concurrent") == [999.0] * 8
    assert cell(results, "verified_tokens", "2 concurrent") == [12.0] * 8
    assert "(7,992 claimed, 96 verified)" in capsys.readouterr().out


def test_a_server_without_a_tokenizer_needs_one_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeServer(Script(tokenizer=None)) as server:
        assert main(["throughput", "--url", server.url, "--levels", "2", "--out", str(tmp_path)]) == 1
    assert "name one with --tokenizer" in capsys.readouterr().err


def test_random_tokens_are_not_cut_from_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--workload", "random", "--text", "a.txt", "--out", str(tmp_path / "store")]
    assert main(["throughput", *options]) == 1
    assert "--text a.txt: the prompts of --workload random are random tokens" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_shared_prefix(tmp_path: Path) -> None:
    options = ("--workload", "shared-prefix", "--prefix-tokens", "50", "--prefixes", "2", "--levels", "1")
    with FakeServer() as server:
        results = measure(server, tmp_path, *options, "--spot-checks", "0")
        sent = [body["messages"][0]["content"] for _, body in server.requests if body["max_tokens"] == 12][2:]
    halves = [text.split("\n\n") for text in sent]
    assert {len(prefix) for prefix, _ in halves} == {50}
    assert [prefix for prefix, _ in halves] == [halves[0][0]] * 4 + [halves[4][0]] * 4
    assert len({question for _, question in halves}) == 8
    cached, prompt = (
        sum(cell(results, metric, "1 concurrent")) for metric in ("cached_tokens", "prompt_tokens")
    )
    assert 0.4 < cached / prompt < 0.7, "six of eight prompts share 50 of 74 tokens with one before"


def test_conversations_grow(tmp_path: Path) -> None:
    with FakeServer() as server:
        measure(server, tmp_path, "--workload", "chat", "--turns", "3", "--levels", "2", "--warmup", "0")
        chats = [body["messages"] for _, body in server.requests if body["max_tokens"] == 12]
    roles = [[message["role"] for message in messages] for messages in chats]
    assert sorted(map(len, roles)) == [1] * 3 + [3] * 3 + [5] * 3
    assert max(roles, key=len) == ["user", "assistant", "user", "assistant", "user"]


def pictures_of(body: Body) -> list[Image.Image]:
    """The pictures in the last message of a chat, which come before its only text."""
    *pictures, text = body["messages"][-1]["content"]
    assert text["type"] == "text"
    urls = [part["image_url"]["url"] for part in pictures]
    return [
        Image.open(BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,")))) for url in urls
    ]


def test_pictures(tmp_path: Path) -> None:
    options = ("--workload", "images", "--image-resolution", "40x30", "--image-count", "2", "--levels", "2")
    with FakeServer() as server:
        results = measure(server, tmp_path, *options, "--warmup", "0", "--spot-checks", "0")
        shown = [
            picture for _, body in server.requests if "messages" in body for picture in pictures_of(body)
        ]
    assert {picture.size for picture in shown} == {(40, 30)}
    assert len({picture.tobytes() for picture in shown}) == len(shown) == 16
    (rate,), (seconds,) = (cell(results, what, "2 concurrent") for what in ("request_rate", "seconds"))
    assert rate == pytest.approx(8 / seconds)
    assert len(cell(results, "ttft", "2 concurrent")) == 8


def test_a_wrong_sum_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(body: Body) -> FakeReply:
        reply = reply_to(body)
        return FakeReply(reply.content.replace("answer is ", "answer is 9"))

    with FakeServer(Script(reply=wrong)) as server:
        results = measure(server, tmp_path, "--levels", "2", status=1)
    assert cell(results, "spot_checks_failed", "2 concurrent") == [2.0]
    shown = capsys.readouterr()
    assert "2 spot checks FAILED" in shown.out
    assert "spot check: What is" in shown.err


def test_some_failures_are_counted_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = count()

    def sometimes(path: str) -> int | None:
        return 500 if path == "/v1/completions" and next(seen) in (4, 7) else None

    with FakeServer(Script(fail=sometimes)) as server:
        results = measure(server, tmp_path, "--levels", "2", status=1)
    assert len(cell(results, "latency", "2 concurrent")) == 6
    assert sum(cell(results, "failed", "2 concurrent")) == 2
    assert sum(cell(results, "verified_tokens", "2 concurrent")) == 6 * 12
    shown = capsys.readouterr().err
    assert "error: 2 requests or spot checks failed; the first: POST /v1/completions answered 500" in shown


def test_a_level_that_fails_ends_the_run_but_keeps_the_others(tmp_path: Path) -> None:
    seen = count()
    with FakeServer(
        Script(fail=lambda path: 500 if path == "/v1/completions" and next(seen) >= 12 else None)
    ) as server:
        results = measure(server, tmp_path, "--levels", "1,2", status=1)
    assert len(cell(results, "output_rate", "1 concurrent")) == 1
    assert cell(results, "output_rate", "2 concurrent") == []
    (manifest,) = results.manifests.values()
    assert manifest.status == "stopped"
    assert "8 requests in a row failed" in manifest.notes[-1]


def test_a_server_of_500s_is_no_table_of_zeros(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(Script(fail=lambda path: 500 if "completions" in path else None)) as server:
        assert main(["throughput", "--url", server.url, "--out", str(tmp_path), *SMALL]) == 1
    shown = capsys.readouterr()
    assert "error: random, 1 concurrent, warm-up: POST /v1/completions answered 500" in shown.err
    assert "tok/s" not in shown.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        ["--levels", "0"],
        ["--rate", "0"],
        ["--goodput", "x=1"],
        ["--requests", "-1"],
        ["--image-resolution", "640"],
        ["--image-resolution", "0x480"],
        ["--nope"],
    ],
)
def test_wrong_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["throughput", *options])
    assert ended.value.code == 2


def test_the_score_is_the_protocols_only_when_every_rule_held(tmp_path: Path) -> None:
    """On a store as a full run leaves it."""
    from qwen_serve.bench.store import Run

    settings = {"input_tokens": 1024, "output_tokens": 1024, "requests": 64, "warmup": 2}
    with Run.begin(tmp_path, "throughput", settings=settings) as run:
        for level in WEIGHTS:
            name = at_concurrency(level)
            run.add("s", "random", name, 1, {"claimed_tokens": 1000, "recounted_tokens": 1001})
            run.add("s", "random", name, 1, {"output_rate": 100.0 * level, "spot_checks_failed": 0})
    rows = run.results().frame
    value, deviations = hackathon_score(rows, settings)
    assert deviations == []
    assert value == 100 * (1 * 1 + 1 * 2 + 2 * 4 + 2 * 8 + 4 * 16 + 4 * 32 + 8 * 64)
    assert hackathon_score(rows[rows["cell"] == "3 concurrent"], settings) == (None, [])
    told = predicted(rows, 8)
    assert told is not None and "a prediction" in told
    assert "at 1: 100, 2: 200, 4: 400, 8: 800, 16: 1,600, 32: 3,200, 64: 6,400" in told
    assert predicted(rows[rows["cell"] != at_concurrency(4)], 8) is None
    bad = rows.copy()
    bad.loc[bad["metric"] == "recounted_tokens", "value"] = 900.0
    for frame, changed in (
        (bad, {}),
        (rows, {"requests": 8}),
        (rows, {"warmup": None}),
        (rows[rows["metric"] != "spot_checks_failed"], {}),
    ):
        _, deviations = hackathon_score(frame, {**settings, **changed})
        assert len(deviations) == 1
