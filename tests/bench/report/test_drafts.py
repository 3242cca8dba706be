"""Tables of drafters: ratios paired by round, and shares of decode steps."""

from pathlib import Path

from qwen_serve.bench.report.views import tables_of
from qwen_serve.bench.store import Run

STEPS = {"steps": 10.0, "step_tokens": 80.0, "draft_time": 10.0, "device_time": 25.0, "host_time": 15.0}


def test_ratios_and_shares(tmp_path: Path) -> None:
    cell = "64 in, 1 at once"
    with Run.begin(tmp_path, "drafts", settings={"gguf": "m.gguf", "output_tokens": 41}) as run:
        for way in ("off", "mtp"):
            run.describe(way)
        for round in range(1, 9):
            for way, itl in (("mtp", 1.5), ("off", 3.0)):  # another way begins each time
                run.add(way, "draft cost", cell, round, {"ttft": 20.0, "itl": itl * round})
        for kind in ("decode, 1 rows", "verify, 8 rows", "prefill, 1 rows"):
            steps = {"steps": 990.0, "host_time": 5000.0} if kind.startswith("prefill") else STEPS
            run.add("mtp", "steps", f"draft cost, {cell}, {kind}", 1, steps)
        run.add(
            "mtp", "drafts", f"draft cost, {cell}, mtp", 1, {"verifications": 5.0, "drafted_tokens": 20.0}
        )
        times, shares, drafts = tables_of(run.results(), run.manifest.run)
    off, mtp = (dict(zip(times.header, row, strict=True)) for row in times.rows)
    assert (off["speculation"], off["token ms"], off["token, x off"]) == ("off", 13.5, None)
    assert (mtp["speculation"], mtp["token ms"], mtp["token, x off"]) == ("mtp", 6.75, "2x [2, 2]")
    assert mtp["TTFT, x off"] == "1x [1, 1]"
    line = dict(zip(shares.header, shares.rows[1], strict=True))
    assert line["tokens a step"] == 8 * 40 / 20
    assert line["rows a step"] == 8.0
    assert line["ms a step"] == 5.0
    assert [line[part] for part in ("draft", "device", "host", "overlapped")] == ["20%", "50%", "30%", "0%"]
    assert drafts.rows[0][1:3] == [5, 20]
