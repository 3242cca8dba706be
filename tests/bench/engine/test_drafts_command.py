"""Ways to draft, compared in turns, become rows of the store."""

from collections import defaultdict
from pathlib import Path

import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.engine import drafts
from qwen_serve.bench.store import load
from qwen_serve.server.engine import Engine, Prompt

TEXT = Path(__file__).parents[3] / "README.md"


@pytest.mark.slow
def test_drafts(
    nano_f32: Path, nano_draft_f32: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--draft-model", str(nano_draft_f32), "--text", str(TEXT), "--set", "draft_always=true"]
    options += ["--input-tokens", "24", "--output-tokens", "12", "--concurrency", "1,2", "--requests", "2"]
    assert main(["engine", "drafts", str(nano_f32), *options, "--rounds", "1", "--out", str(tmp_path)]) == 0
    results = load([tmp_path])
    ways = ["off", "mtp", "draft", "mtp+draft"]
    one, two = "24 in, 1 at once", "24 in, 2 at once"
    for way in ways:
        of_way = results.of(subject=way, workload="draft cost")
        assert len(of_way) == 2 * 2 * 2, "requests, cells, metrics"
        assert (of_way["value"] > 0).all()

    def total(way: str, metric: str, cell: str) -> float:
        rows = results.of(subject=way, metric=metric)
        return float(rows[rows["cell"].str.startswith(f"draft cost, {cell}")]["value"].sum())

    # after the first token each step without drafts gives one token to each of those that run
    for cell in (one, two):
        decoding = results.of(
            subject="off", metric="steps", cell=[f"draft cost, {cell}, decode, {n} rows" for n in (1, 2)]
        )
        tokens = results.of(subject="off", metric="step_tokens", cell=list(decoding["cell"]))
        assert tokens["value"].sum() == 2 * 11
    assert total("off", "steps", one) > total("off", "steps", two)
    assert total("off", "drafted_tokens", one) == 0
    assert total("mtp", "accepted_tokens", f"{one}, mtp") > 0
    assert total("draft", "accepted_tokens", f"{two}, dflash") > 0
    # something else may have had the cores in one of them
    without = min(total("off", "draft_time", cell) for cell in (one, two))
    assert total("mtp", "draft_time", one) > 10 * without
    shown = capsys.readouterr().out
    assert "token, x off" in shown
    assert "what steps are made of" in shown
    assert "accepted a draft" in shown


def test_prompts_of_drafts_are_the_same_for_all_and_never_come_again(
    nano_f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(map(str, range(1000))))
    asked: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    answer = drafts.answer

    async def noted(engine: Engine, prompt: Prompt, count: int) -> dict[str, float]:
        asked[id(engine)].append(tuple(prompt.ids))
        return await answer(engine, prompt, count)

    monkeypatch.setattr(drafts, "answer", noted)
    options = ["--text", str(text), "--input-tokens", "8,16", "--output-tokens", "2", "--concurrency", "2"]
    options += ["--speculation", "off,ngram", "--rounds", "2", "--requests", "3"]
    options += ["--out", str(tmp_path / "store")]
    assert main(["engine", "drafts", str(nano_f32), *options]) == 0
    first, second = asked.values()
    assert sorted(first) == sorted(second)
    assert len(first) == len(set(first)) == 2 * 2 * (1 + 2) * 2, "lengths, rounds, waves, at once"
    assert {len(ids) for ids in first} == {8, 16}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "/no/text"], "--text /no/text: "),
        (["--rounds", "1000"], "are wanted: a longer one, or fewer --rounds"),
        (["--input-tokens", "40000"], "of a request: this model holds"),
        (["--speculation", "draft"], "--speculation draft: want a --draft-model"),
        (["--speculation", "ngram+mtp"], "want auto, off, ngram, mtp, draft, both, or one that drafts"),
        (["--set", "mtp_depth=deep"], "--set, off: mtp_depth: Input should be a valid integer"),
        (["--set", "speculation=off"], "--set speculation: this command has an option for that"),
        (["--draft-model", "/no/drafter.gguf", "--speculation", "draft"], "/no/drafter.gguf does not exist"),
    ],
)
def test_mistakes_about_drafts(
    options: list[str], message: str, nano_f32: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--text": str(TEXT), "--speculation": "off"} | dict(
        zip(options[::2], options[1::2], strict=True)
    )
    words = [word for pair in given.items() for word in pair]
    try:
        assert main(["engine", "drafts", str(nano_f32), *words, "--out", str(tmp_path)]) == 1
    except SystemExit as error:  # of an option
        assert error.code
    shown = capsys.readouterr()
    assert message in " ".join((shown.out + shown.err).replace("│", " ").split())
    assert not any(tmp_path.iterdir()), "a run without a figure"
