"""The synthetic drafter: the number of right tokens in a block is as set, whatever is set for MTP."""

from pathlib import Path

import pytest

from qwen_serve.bench.cli import main
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.models.command import draft_path
from qwen_serve.bench.models.drafter import Drafter, draft_config
from qwen_serve.bench.models.shapes import SHAPES
from qwen_serve.bench.models.synthetic import Synthetic
from qwen_serve.server.engine import SamplingParams
from tests.server.engine.helpers import Question, ask, running

LENGTHS = {"0.8": 4.0, "0.5": 0.2}
"""By the share that MTP's drafts are right: each region's text has that in its name."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("drafter") / "small.gguf"
    lengths = ",".join(map(str, LENGTHS.values()))
    shares = ",".join(LENGTHS)
    wanted = ["--out", str(out), "--shape", "small", "--mtp-acceptance", shares, "--block-lengths", lengths]
    assert main(["build", "synthetic", *wanted, "--words", "1000", "--outtype", "F32"]) == 0
    return out.parent


@pytest.mark.slow
async def test_blocks_are_right_as_far_as_the_dial_says(folder: Path) -> None:
    model, draft = folder / "small.gguf", draft_path(folder / "small.gguf")
    beside = {"speculation": "draft", "draft_model": draft, "draft_always": True}
    with running(model, parallel=1, ctx_size=2048, **beside) as engine:
        for share, length in LENGTHS.items():
            text = (folder / f"small.words-{share}.txt").read_text(encoding="utf-8")
            tokens = engine.vocab.tokenize(text[:1000], special=False)
            before = engine.stats().drafts["dflash"]
            for start in range(0, 120, 30):
                request = Question(tokens[start : start + 30], 80, params=SamplingParams(ignore_eos=True))
                await ask(engine, request)
            after = engine.stats().drafts["dflash"]
            mean = (after.accepted - before.accepted) / (after.steps - before.steps)
            assert abs(mean - length) < 0.25 + 0.15 * length, f"{mean:.2f} of {length}"


@pytest.mark.parametrize(
    ("lengths", "said"), [((8.0,), "want 0 to 7"), ((-1.0,), "want 0 to 7"), ((1.0, 2.0, 3.0), "3 of them")]
)
def test_a_dial_that_cannot_be_is_refused(lengths: tuple[float, ...], said: str) -> None:
    made = Synthetic.make(SHAPES["small"], mtp_acceptance=(0.5, 0.6), seed=0)
    with pytest.raises(BenchError, match=said):
        Drafter.make(made.config, made.vocab.vocab, made.chain, lengths, 0)


def test_the_shapes_for_the_4b_are_the_published_ones() -> None:
    c = draft_config(SHAPES["4b"])
    assert (c.n_layers, c.hidden_size, c.n_heads, c.n_kv_heads, c.head_dim) == (5, 2560, 32, 8, 128)
    assert (c.intermediate_size, c.block_size, c.target_layers) == (9728, 16, (1, 8, 15, 22, 29))
