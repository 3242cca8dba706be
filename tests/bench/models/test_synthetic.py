"""The synthetic model: llama.cpp loads it, its words are one token each, and greedy decoding follows the
chain."""

import random
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from qwen_serve.bench.cli import main
from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.load.prompts import TextPrompts
from qwen_serve.bench.load.protocol import CATEGORIES, FILLER, FILLER_TOKENS
from qwen_serve.bench.load.vocabulary import GgufVocabulary
from qwen_serve.bench.models.chain import make_chain
from qwen_serve.bench.models.shapes import SHAPES, tower
from qwen_serve.bench.models.synthetic import Synthetic
from qwen_serve.bench.models.tower import plan_tower
from qwen_serve.convert import kld
from qwen_serve.convert.calibration import text as writing
from qwen_serve.convert.calibration.prompts import load_prompts
from qwen_serve.convert.cli import main as convert
from qwen_serve.convert.config import Experts
from qwen_serve.convert.imatrix import Imatrix
from qwen_serve.convert.quantize import quantize
from qwen_serve.convert.recipes import load_recipe
from qwen_serve.convert.search import measure
from qwen_serve.convert.tensors import expected_tensors
from qwen_serve.llamacpp.evaluation import Batch, EvalContext, Runtime
from qwen_serve.llamacpp.gguf import read_header
from qwen_serve.llamacpp.model import Model
from qwen_serve.llamacpp.vision import VisionTower, has_vision
from qwen_serve.server.settings import find_mmproj
from tests.marks import slow_but
from tests.processes import run

ACCEPTANCE, SEED = 0.6, 3
RUNTIME = Runtime(threads=1)
CHUNK = 256

Ids = npt.NDArray[np.int64]


@pytest.fixture(scope="module", params=slow_but(["small"], ["small", "small-moe"]))
def shape(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def made(shape: str) -> Synthetic:
    return Synthetic.make(SHAPES[shape], mtp_acceptance=ACCEPTANCE, seed=SEED)


@pytest.fixture(scope="module")
def f16(shape: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's F16 file, made with the command line."""
    path = tmp_path_factory.mktemp("synthetic") / "small.gguf"
    command = ["--out", str(path), "--shape", shape, "--words", "20000", "--threads", "2"]
    command += ["--mtp-acceptance", str(ACCEPTANCE), "--seed", str(SEED)]
    assert main(["build", "synthetic", *command]) == 0
    return path


@pytest.mark.skipif(not has_vision(), reason="llama.cpp was built without libmtmd")
def test_a_tower_beside_it_makes_rows_that_it_reads(tmp_path: Path) -> None:
    out = tmp_path / "Small-F16.gguf"
    assert (
        main(["build", "synthetic", "--out", str(out), "--shape", "small", "--words", "0", "--vision"]) == 0
    )
    path = find_mmproj(out)
    assert path == tmp_path / "mmproj-Small-F16.gguf"
    with RUNTIME.load(out) as model, VisionTower(path, model, threads=1, warm_up=False) as loaded:
        pixels = np.random.default_rng(0).integers(0, 256, (128, 96, 3), np.uint8)
        rows = loaded.encode(loaded.prepare(pixels))
    assert rows.shape == (3 * 4, SHAPES["small"].hidden_size)
    assert 0.1 < rows.std() < 10


@pytest.mark.parametrize(("name", "millions"), [("4b", 334), ("9b", 456), ("35b-a3b", 447)])
def test_towers_have_the_sizes_of_the_real_ones(name: str, millions: int) -> None:
    assert round(plan_tower(tower(name), 0, "F16").n_elements / 1e6) == millions


@pytest.fixture(scope="module")
def q4_k_m(f16: Path) -> Path:
    path = f16.with_name("small-Q4_K_M.gguf")
    quantize(f16, path, recipe=load_recipe("Q4_K_M"), imatrix=None, runtime=RUNTIME)
    return path


@pytest.fixture(scope="module")
def written_q4_k_m(shape: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantized") / "small.gguf"
    command = ["--out", str(path), "--shape", shape, "--outtype", "Q4_K_M", "--words", "0"]
    command += ["--mtp-acceptance", str(ACCEPTANCE), "--seed", str(SEED), "--threads", "2"]
    assert main(["build", "synthetic", *command]) == 0
    return path


@pytest.fixture(scope="module", params=slow_but(["f16"], ["f16", "q4_k_m", "written_q4_k_m"]))
def gguf_file(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def next_tokens(model: Model, ids: Ids) -> tuple[Ids, npt.NDArray[np.float32]]:
    """The most likely next token and the hidden state after each token of `ids`, read as one sequence."""
    with EvalContext(model, n_ctx=ids.size, n_batch=CHUNK) as context:
        context.keep_hidden()
        best, hidden = [], []
        for start in range(0, ids.size, CHUNK):
            batch = Batch(context)
            for position, token in enumerate(ids[start : start + CHUNK].tolist(), start):
                batch.add(token, position, output=True)
            context.decode(batch)
            best.append(context.logits().argmax(axis=1))
            hidden.append(context.hidden().copy())
    return np.concatenate(best), np.concatenate(hidden)


def drafts(model: Model, ids: Ids, hidden: npt.NDArray[np.float32]) -> Ids:
    """The MTP block's drafts after each token."""
    with EvalContext(model, n_ctx=ids.size, n_batch=CHUNK, kind="mtp") as context:
        best = []
        for start in range(0, ids.size, CHUNK):
            batch = Batch(context)
            for position, token in enumerate(ids[start : start + CHUNK].tolist(), start):
                batch.add(token, position, output=True, hidden=hidden[position])
            context.decode(batch)
            best.append(context.logits().argmax(axis=1))
    return np.concatenate(best)


def test_every_token_leads_to_its_successor_and_the_mtp_block_errs_as_told(
    gguf_file: Path, made: Synthetic
) -> None:
    chain = made.chain
    ids = np.random.default_rng(0).permutation(made.vocab.size)
    with RUNTIME.load(gguf_file) as model:
        assert model.n_nextn == 1
        best, hidden = next_tokens(model, ids)
        assert (best == chain.successor[ids]).all()
        drafted = drafts(model, ids, hidden)
    assert (drafted == np.where(chain.drafted, chain.successor, chain.decoy)[ids]).all()
    right = drafted == best
    words = np.isin(ids, chain.tokens[FILLER_TOKENS:])
    assert right[words].sum() == round(ACCEPTANCE * words.sum())


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_filler_goes_on_as_filler(gguf_file: Path, made: Synthetic, repeats: int) -> None:
    with RUNTIME.load(gguf_file) as model:
        ids = model.tokenize(FILLER * repeats)
        assert len(ids) == FILLER_TOKENS * repeats
        assert model.detokenize(ids).decode() == FILLER * repeats
        best, _ = next_tokens(model, np.array(ids))
    assert made.chain.follow(ids[-1], FILLER_TOKENS) == ids[:FILLER_TOKENS]
    assert best.tolist() == ids[1:] + ids[:1]


def test_words_are_one_token_each_and_the_rest_falls_back_to_bytes(f16: Path, made: Synthetic) -> None:
    words = list(made.vocab.words)
    with RUNTIME.load(f16) as model:
        assert model.tokenize(made.vocab.text(words)) == words
        for text in ("Größe 東京 \U0001f600\n\n3.14", "x", " dog", "a. b", "\t"):
            assert model.detokenize(model.tokenize(text)).decode() == text
        chat = model.tokenize("<|im_start|>user\nhi<|im_end|>\n<think>")
        assert chat[0] == model.tokenize("<|im_start|>")[0]
        assert len(model.tokenize("<|im_start|>")) == len(model.tokenize("</think>")) == 1
        assert model.tokenize("<|im_end|>")[0] in model.eog_ids
        assert "enable_thinking" in (model.metadata()["tokenizer.chat_template"])


async def test_prompts_of_exact_length_are_cut_from_the_words(f16: Path) -> None:
    vocabulary = GgufVocabulary(f16)
    prompts = await TextPrompts.build(vocabulary, f16.with_suffix(".words.txt"))
    rng = random.Random(0)
    made = [await prompts.make(category.prompt_tokens, rng) for category in CATEGORIES.values()]
    assert [await vocabulary.count(prompt) for prompt in made] == [64, 2048, 8192]


def test_the_text_never_tells_what_follows_a_word(f16: Path, made: Synthetic) -> None:
    with RUNTIME.load(f16) as model:
        ids = np.array(model.tokenize(f16.with_suffix(".words.txt").read_text(encoding="utf-8")))
    assert ids.size == 20_000
    counts = Counter(ids.tolist())
    assert max(counts.values()) - min(counts.values()) <= 1
    assert (made.chain.successor[ids[:-1]] == ids[1:]).mean() < 0.002


def test_each_share_holds_for_a_region_with_a_text_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "two.gguf"
    command = ["--out", str(out), "--shape", "small", "--words", "500", "--mtp-acceptance", "1.0,0.3"]
    assert main(["build", "synthetic", *command]) == 0
    chain = Synthetic.make(SHAPES["small"], mtp_acceptance=[1, 0.3], seed=0).chain
    assert chain.drafted[chain.tokens[:FILLER_TOKENS]].all()
    for share, region in zip(("1.0", "0.3"), chain.regions, strict=True):
        text = out.with_suffix(f".words-{share}.txt").read_text(encoding="utf-8")
        with RUNTIME.load(out) as model:
            ids = np.array(model.tokenize(text))
        assert ids.size == 500
        assert np.isin(ids, region).all()
        answers = np.array([chain.follow(token, 500) for token in ids.tolist()])
        assert np.isin(answers, region).all()
        assert chain.drafted[region].sum() == round(float(share) * region.size)
        leaning = np.isin(chain.anchor, region)
        assert chain.drafted[leaning].mean() == pytest.approx(float(share), abs=0.01)


def test_the_path_is_long_and_meets_no_word_twice(made: Synthetic) -> None:
    words = made.chain.tokens[FILLER_TOKENS:].tolist()
    path = made.chain.follow(made.chain.decoy, len(words) - 1)
    assert [made.chain.decoy, *path] == words
    assert made.chain.decoy not in made.chain.successor
    loop = made.chain.follow(words[-1], 1000)
    assert loop.index(loop[0], 1) > 768 - FILLER_TOKENS - 2


def test_a_successor_never_belongs_to_a_later_layer() -> None:
    for n_words, ffn in ((100, 64), (250, 64), (1000, 64), (70, 64)):
        chain = make_chain(
            range(10),
            range(10, 10 + n_words),
            n_words + 50,
            n_layers=4,
            ffn=ffn,
            mtp_acceptance=[0.5],
            rng=np.random.default_rng(0),
        )
        layer_of = {int(token): layer for layer in range(4) for token in chain.neurons(layer)}
        assert len(layer_of) == chain.tokens.size == min(n_words + 10, 4 * ffn)
        assert max(len(chain.neurons(layer)) for layer in range(4)) <= ffn
        for token, layer in layer_of.items():
            assert layer_of[int(chain.successor[token])] <= layer
        assert all(int(chain.anchor[token]) in layer_of for token in range(n_words + 50))


def test_same_seed_same_bytes(shape: str, f16: Path, tmp_path: Path) -> None:
    files = {}
    for name, flags in {
        "again": ["--seed", str(SEED), "--threads", "1"],
        "other": ["--seed", str(SEED + 1), "--threads", "1"],
    }.items():
        path = tmp_path / f"{name}.gguf"
        command = ["--out", str(path), "--shape", shape, "--words", "20000", *flags]
        assert main(["build", "synthetic", *command, "--mtp-acceptance", str(ACCEPTANCE)]) == 0
        files[name] = path
    assert files["again"].read_bytes() == f16.read_bytes()
    assert files["again"].with_suffix(".words.txt").read_bytes() == f16.with_suffix(".words.txt").read_bytes()
    assert files["other"].read_bytes() != f16.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "again.gguf",
        "again.words.txt",
        "other.gguf",
        "other.words.txt",
    ]


def test_the_35b_a3b_is_a_shape() -> None:
    config = SHAPES["35b-a3b"]
    assert (config.arch, config.hidden_size, config.n_layers) == ("qwen35moe", 2048, 40)
    assert (config.n_heads, config.n_kv_heads, config.head_dim) == (16, 2, 256)
    assert (config.linear_key_heads, config.linear_value_heads, config.linear_key_dim) == (16, 32, 128)
    assert config.experts == Experts(count=256, used=8, ffn=512, shared_ffn=512)
    assert (config.vocab_size, config.n_mtp_layers, config.tied_embeddings) == (248_320, 1, False)
    plan = Synthetic.make(SHAPES["35b-a3b"], mtp_acceptance=1, seed=0).weights.plan()
    assert 35e9 < plan.n_elements < 36e9


@pytest.mark.parametrize("outtype", ["F32", "BF16"])
def test_matrices_of_another_type_hold_the_same_values(outtype: str, tmp_path: Path) -> None:
    values = {}
    for kind in ("F16", outtype):
        path = tmp_path / f"{kind}.gguf"
        command = ["--out", str(path), "--shape", "small-moe", "--words", "0", "--outtype", kind]
        assert main(["build", "synthetic", *command]) == 0
        values[kind] = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    other = values[outtype]["blk.0.ffn_down_exps.weight"]
    assert other.tensor_type.name == outtype
    half = values["F16"]["blk.0.ffn_down_exps.weight"].data.astype(np.float32)
    np.testing.assert_allclose(dequantize(other.data, other.tensor_type), half, rtol=2**-8)


@pytest.mark.slow
def test_a_quantized_file_is_what_quantizing_gives_but_for_the_place_of_noise(
    q4_k_m: Path, written_q4_k_m: Path
) -> None:
    wanted, found = (
        {tensor.name: tensor for tensor in GGUFReader(path).tensors} for path in (q4_k_m, written_q4_k_m)
    )
    assert {name: tensor.tensor_type for name, tensor in found.items()} == {
        name: tensor.tensor_type for name, tensor in wanted.items()
    }
    same = [name for name, tensor in found.items() if (tensor.data == wanted[name].data).all()]
    assert {"token_embd.weight", "blk.4.nextn.eh_proj.weight"} <= set(same)
    for name in {"blk.0.attn_qkv.weight", "blk.0.attn_gate.weight", "blk.0.ffn_down_exps.weight"} & set(
        found
    ):
        ours, theirs = (dequantize(one[name].data, one[name].tensor_type) for one in (found, wanted))
        assert ours.std() == pytest.approx(theirs.std(), rel=0.05)
        assert abs(np.corrcoef(ours.reshape(-1)[:-1], ours.reshape(-1)[1:])[0, 1]) < 0.05
    fields = GGUFReader(written_q4_k_m).fields
    assert fields["general.file_type"].contents() == 15


def test_the_file_has_the_tensors_of_its_shape(f16: Path, made: Synthetic) -> None:
    shapes = {tensor.name: tuple(reversed(tensor.shape)) for tensor in read_header(f16).tensors.values()}
    wanted = {
        target: tuple(n for n in rule.shape(made.config) if n != 1)
        for _, target, rule in expected_tensors(made.config, "", range(made.config.n_layers), has_mtp=True)
        if target in shapes
    }
    assert shapes == wanted
    assert {name.split(".")[1] for name in shapes if name.startswith("blk.")} == set("01234")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the texts to two chunks from eight prompts, and probes and divergence to one chunk."""
    wanted: dict[str, int] = dict.fromkeys(writing.MIN_TOKENS, 1100)
    for where, name, value in (
        (writing, "MIN_TOKENS", wanted),
        (writing, "load_prompts", lambda purpose: load_prompts(purpose)[:8]),
        (writing, "MAX_NEW", 8),
        (writing, "MAX_NEW_THINKING", 8),
        (measure, "CHUNKS", 1),
        (kld, "MIN_TOKENS", 512),
    ):
        monkeypatch.setattr(where, name, value)


@pytest.mark.parametrize("shape", slow_but(["small"], ["small", "small-moe"]), indirect=True, scope="module")
@pytest.mark.usefixtures("short")
def test_the_converter_takes_it_with_texts_of_its_own(f16: Path, tmp_path: Path) -> None:
    command = ["--src", str(f16), "--quant", "Q4_K_M", "--no-kld", "--out", str(tmp_path), "--threads", "1"]
    assert convert(command) == 0
    text = (tmp_path / "small.calibration.txt").read_text()
    with RUNTIME.load(f16) as model:
        assert len(model.tokenize(text)) >= 1100
    assert Imatrix.load(tmp_path / "small.imatrix.gguf").chunk_count >= 2
    assert (tmp_path / "small-Q4_K_M.gguf").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["small"], indirect=True, scope="module")
@pytest.mark.usefixtures("short")
def test_a_recipe_can_be_searched_for_it(
    f16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--src", str(f16), "--quant", "auto", "--target-bpw", "5.5", "--out", str(tmp_path)]
    assert convert([*command, "--threads", "1"]) == 0
    assert load_recipe(tmp_path / "small-auto-5.5bpw.toml").evidence is not None
    told = capsys.readouterr()
    assert re.search(
        r"  in all      .*: texts .*, importance matrix .*, search .*, file .*, report ", told.out
    )
    assert "Sensitivity: done, " in told.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mtp-acceptance", "1.5"], "--mtp-acceptance 1.5: want a share from 0 to 1"),
        (["--mtp-acceptance", "0.7,0.5,0.3"], "--mtp-acceptance: 3 shares of a chain of 3,072 tokens leave"),
        (
            ["--mtp-acceptance", "0.7,0.70"],
            "--mtp-acceptance 0.7,0.70: want at least one share, none of them",
        ),
        (["--mtp-acceptance", "most"], "--mtp-acceptance: could not convert string to float: 'most'"),
        (["--mtp-acceptance", "nan"], "--mtp-acceptance nan: want a share from 0 to 1"),
    ],
)
def test_a_wrong_flag_is_named(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.gguf"
    assert main(["build", "synthetic", "--out", str(out), "--shape", "small", *flags]) == 1
    assert f"error: {message}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["build", "synthetic", "--out", f"{tmp_path}/file/x.gguf", "--shape", "small"]) == 1
    assert f"error: --out {tmp_path}/file/x.gguf: " in capsys.readouterr().err


def test_a_full_disk_is_told_before_anything_is_written(
    made: Synthetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(BenchError, match="MB will be written, 1 MB are free"):
        made.write(tmp_path / "x.gguf", threads=1)
    assert not list(tmp_path.iterdir())


NOT_NEEDED = ("pandas", "aiohttp", "cyclopts", "scipy", "matplotlib", "rich", "requests")


@pytest.mark.parametrize("module", ["synthetic", "drafter", "header"])
def test_making_a_model_needs_numpy_and_gguf_alone(module: str) -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({NOT_NEEDED})); "
    code += f"import qwen_serve.bench.models.{module}"
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
