"""A smaller vocabulary: kept tokens, equal tokenization, and equal logits."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, TokenType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen_serve.convert.cli import main
from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.kld import compare, shared_tokens
from qwen_serve.convert.prune_vocab import kept_rows, kept_tokens, label, prune
from qwen_serve.convert.vocab import Vocab
from qwen_serve.llamacpp.evaluation import Batch, EvalContext, Runtime
from qwen_serve.llamacpp.model import Model
from tests.checkpoints import PLAIN_ADDED, SPECIAL, VOCAB, model_config, write_checkpoint
from tests.conftest import NANO
from tests.logits import gguf_log_probabilities

import numpy as np  # isort: skip  (after llama_cpp: see llamacpp/__init__.py)

RUNTIME = Runtime(threads=1, n_gpu_layers=0)
REGULAR = 1500  # of nano's 3,584


def convert(source: Path, out: Path, *flags: object) -> None:
    arguments = ["--src", source, "--out", out, "--threads", 1, *flags]
    assert main([str(argument) for argument in arguments]) == 0


def times(out: Path) -> dict[str, int]:
    """Of every output."""
    names = (path for path in out.glob("Random*") if "stages" not in path.name)
    return {path.name: path.stat().st_mtime_ns for path in names}


# which tokens stay


@pytest.fixture
def vocab(checkpoint: Path) -> Vocab:
    """256 bytes, "th", "the", "Ġthe", three control tokens, three other added ones, padding up to 320."""
    return Vocab.load(checkpoint, ModelConfig.from_json(model_config()))


def test_the_first_regular_tokens_and_all_special_ones_stay(vocab: Vocab) -> None:
    kept = kept_tokens(vocab, 257)
    assert kept.tolist() == [*range(257), *range(259, 265)]
    small = prune(vocab, kept)
    assert small.tokens == [*vocab.tokens[:257], *SPECIAL, *PLAIN_ADDED]
    assert small.types == [*vocab.types[:257], *vocab.types[259:265]]
    assert small.merges == ["t h"]
    assert {kind: small.tokens[id_] for kind, id_ in small.special_ids.items()} == {
        "eos": "<|im_end|>",
        "pad": "<|endoftext|>",
    }
    assert int(TokenType.UNUSED) not in small.types
    assert (small.pre_tokenizer, small.chat_template) == (vocab.pre_tokenizer, vocab.chat_template)


def test_single_bytes_stay_however_few_are_asked_for(vocab: Vocab) -> None:
    assert kept_tokens(vocab, 1).tolist() == [*range(256), *range(259, 265)]


def test_ids_in_the_metadata_stay(vocab: Vocab) -> None:
    odd = replace(vocab, special_ids={"bos": 258, "pad": 300})
    kept = kept_tokens(odd, 256).tolist()
    assert {256, 257, 258, 300} <= set(kept)  # the merges of 258 pass through 256 and 257
    small = prune(odd, np.array(kept))
    assert [small.tokens[id_] for id_ in small.special_ids.values()] == ["Ġthe", "[PAD300]"]


def test_what_kept_tokens_are_merged_from_stays(vocab: Vocab) -> None:
    tokens = [*vocab.tokens]
    tokens[256], tokens[258] = tokens[258], tokens[256]  # "Ġthe" first: ids not in the order of the merges
    assert kept_tokens(replace(vocab, tokens=tokens), 257).tolist()[256:259] == [256, 257, 258]


@pytest.mark.parametrize("regular", [259, 10_000])
def test_more_than_there_are_is_an_error(vocab: Vocab, regular: int) -> None:
    with pytest.raises(ConvertError, match=rf"--keep-vocab {regular}: the vocabulary has 259 regular tokens"):
        kept_tokens(vocab, regular)


def test_labels() -> None:
    assert (label(131_072), label(None)) == ("v131072", "")


@dataclass(frozen=True)
class Matrix:
    """A source of rows in memory."""

    values: np.ndarray
    name: str = "m"
    path: Path = Path("m")
    dtype: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self, start: int, count: int) -> np.ndarray:
        return self.values.reshape(-1)[start : start + count]


@settings(max_examples=200)
@given(st.sets(st.integers(0, 29), min_size=1), st.integers(0, 89), st.integers(1, 90))
def test_rows_are_read_across_gaps(kept: set[int], start: int, count: int) -> None:
    values = np.arange(90, dtype=np.float32).reshape(30, 3)
    rows = np.array(sorted(kept))
    start %= 3 * len(rows)
    count = min(count, 3 * len(rows) - start)
    source = kept_rows(Matrix(values), rows)
    assert source.shape == (len(rows), 3)
    assert source.read(start, count).tolist() == values[rows].reshape(-1)[start : start + count].tolist()


# the file


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"tied": True}, ["token_embd.weight"]),
        ({"tied": False}, ["token_embd.weight", "output.weight"]),
        ({"mtp_embedding": True}, ["token_embd.weight", "blk.8.nextn.embed_tokens.weight"]),
    ],
    ids=["tied", "untied", "an embedding of the draft head's own"],
)
def test_rows_of_every_matrix_that_has_one_a_token(
    tmp_path: Path, options: dict[str, Any], names: list[str]
) -> None:
    source = write_checkpoint(tmp_path / "Random-1B", **options)
    convert(source, tmp_path, "--quant", "F32", "--outtype", "F32")
    convert(source, tmp_path, "--quant", "F32", "--outtype", "F32", "--keep-vocab", 257, "--no-kld")
    whole, small = (GGUFReader(tmp_path / f"Random-1B{cut}-F32.gguf") for cut in ("", "-v257"))
    kept = [*range(257), *range(259, 265)]
    for here, there in zip(small.tensors, whole.tensors, strict=True):
        rows = there.data[kept] if there.name in names else there.data
        assert np.array_equal(here.data, rows), there.name
    assert small.fields["convert.vocab.source_tokens"].contents() == VOCAB
    assert "convert.vocab.source_tokens" not in whole.fields
    with RUNTIME.load(tmp_path / "Random-1B-v257-F32.gguf") as model:
        assert (model.n_vocab, model.n_nextn) == (263, 1)
        assert model.tokenize("<|im_end|>")[0] in model.eog_ids


def test_stages_are_named_after_it_and_resumed(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text("the other day they gathered there " * 40)
    flags = ("--quant", "q4_k_m", "--calibration", text, "--no-kld")
    convert(checkpoint, out, *flags)
    before = times(out)
    convert(checkpoint, out, *flags, "--keep-vocab", 257, "--show-tensors")
    after = times(out)
    assert after.keys() - before.keys() == {
        "Random-1B-v257-F16.gguf",
        "Random-1B-v257.imatrix.gguf",
        "Random-1B-v257-Q4_K_M.gguf",
        "Random-1B-v257-Q4_K_M.json",
    }
    assert all(after[name] == time for name, time in before.items())
    report = json.loads((out / "Random-1B-v257-Q4_K_M.json").read_text())
    assert report["provenance"]["vocabulary"] == {"regular": 257, "tokens": 263, "of": VOCAB}
    assert report["provenance"]["base"] == "Random-1B-v257-F16.gguf"
    assert "vocabulary  263 of 320 tokens" in capsys.readouterr().out
    convert(checkpoint, out, *flags, "--keep-vocab", 257)
    assert times(out) == after
    assert "Random-1B-v257-Q4_K_M.gguf: already there" in capsys.readouterr().err


def test_a_recipe_may_say_it_too(checkpoint: Path, tmp_path: Path) -> None:
    out, recipe = tmp_path / "out", tmp_path / "short.toml"
    recipe.write_text('type = "Q8_0"\nabout = "a test"\nimatrix = false\n[vocab]\nkeep = 257\n')
    convert(checkpoint, out, "--recipe", recipe, "--no-kld")
    assert times(out).keys() == {"Random-1B-v257-F16.gguf", "Random-1B-short.gguf", "Random-1B-short.json"}
    convert(checkpoint, out, "--recipe", recipe, "--no-kld", "--keep-vocab", 256)  # its own goes before
    assert times(out).keys() == {"Random-1B-v257-F16.gguf", "Random-1B-short.gguf", "Random-1B-short.json"}
    with RUNTIME.load(out / "Random-1B-short.gguf") as model:
        assert model.n_vocab == 263


def test_too_many_is_said_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--src", str(checkpoint), "--out", str(out), "--quant", "F16", "--keep-vocab", "300"]
    assert main(arguments) == 1
    assert "error: --keep-vocab 300: the vocabulary has 259 regular tokens" in capsys.readouterr().err
    assert not out.exists()


# the model


@dataclass(frozen=True)
class Pair:
    """The whole nano and a pruned one, loaded; `new` maps a whole id to the pruned one or -1."""

    whole: Model
    small: Model
    new: np.ndarray


@pytest.fixture(scope="module")
def small_f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pruned")
    convert(NANO, out, "--quant", "F32", "--outtype", "F32", "--keep-vocab", REGULAR, "--no-kld")
    return out / f"nano-v{REGULAR}-F32.gguf"


@pytest.fixture(scope="module")
def pair(nano_f32: Path, small_f32: Path) -> Iterator[Pair]:
    with RUNTIME.load(nano_f32) as whole, RUNTIME.load(small_f32) as small:
        columns = shared_tokens(whole, small)
        assert columns is not None
        assert small.n_vocab == REGULAR + 33
        new = np.full(whole.n_vocab, -1)
        new[columns] = np.arange(small.n_vocab)
        yield Pair(whole, small, new)


def check_tokens(pair: Pair, text: str) -> bool:
    """Whether all of the text's tokens are kept, and so the same; else it takes more, of the same bytes."""
    whole, small = pair.whole.tokenize(text), pair.small.tokenize(text)
    assert pair.small.detokenize(small) == pair.whole.detokenize(whole) == text.encode()
    kept = bool((pair.new[whole] >= 0).all()) if whole else True
    if kept:
        assert small == pair.new[whole].tolist()
    else:
        assert len(small) > len(whole)
    return kept


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60))
def test_any_text_survives(pair: Pair, text: str) -> None:
    check_tokens(pair, text)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.integers(0, REGULAR + 32), max_size=40))
def test_texts_of_kept_tokens_survive(pair: Pair, ids: list[int]) -> None:
    check_tokens(pair, pair.small.detokenize(ids).decode("utf-8", "ignore").replace("\0", ""))


def test_of_real_texts_both_kinds_occur(pair: Pair) -> None:
    lines = (NANO / "heldout" / "knowledge.jsonl").read_text(encoding="utf-8").splitlines()
    words = dict.fromkeys(word for line in lines[:200] for word in json.loads(line)["question"].split())
    kept = [check_tokens(pair, f" {word}") for word in words]
    assert 20 < sum(kept) < len(kept) - 20


def test_a_lost_token_is_spelt_in_bytes(pair: Pair) -> None:
    lost = [
        id_
        for id_ in np.flatnonzero(pair.new < 0).tolist()
        if len(piece := pair.whole.detokenize([id_])) == 3 and piece[0] >= 0xE0
    ]
    assert lost, "nano has Chinese characters of one token each"
    single = 0
    for id_ in lost[:50]:
        character = pair.whole.detokenize([id_])
        pieces = [pair.small.detokenize([piece]) for piece in pair.small.tokenize(character.decode())]
        assert b"".join(pieces) == character
        single += pieces == [bytes([byte]) for byte in character]
    assert single


def test_special_tokens_are_found_and_end_what_they_ended(pair: Pair) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    whole, small = pair.whole.tokenize(text), pair.small.tokenize(text)
    assert small == pair.new[whole].tolist()
    assert [id_ in pair.small.eog_ids for id_ in small] == [id_ in pair.whole.eog_ids for id_ in whole]
    assert sum(id_ in pair.small.eog_ids for id_ in small) == 1


def test_logits_of_kept_tokens_are_the_whole_model_s(pair: Pair, nano_f32: Path, small_f32: Path) -> None:
    ids = np.array(pair.small.tokenize("The quick brown fox jumps over the lazy dog. " * 8)[:96], np.int32)
    columns = np.flatnonzero(pair.new >= 0)
    sequences = (columns[ids].astype(np.int32)[None], ids[None])
    positions = np.arange(len(ids))
    whole, small = (
        gguf_log_probabilities(path, tokens, positions)[0]
        for path, tokens in zip((nano_f32, small_f32), sequences, strict=True)
    )
    # log-probabilities differ by what the lost tokens took, a constant of each row
    difference = small - whole[:, columns]
    assert np.ptp(difference, axis=1).max() < 5e-5
    mass = np.exp(whole[:, columns].astype(np.float64)).sum(axis=1)
    assert difference.mean(axis=1) == pytest.approx(-np.log(mass), abs=5e-5)


def test_divergence_over_what_both_have(pair: Pair) -> None:
    text = "Which river runs through the old town? Tell me a story about it, and about 日本. " * 18
    chunks = np.array(pair.small.tokenize(text)[:512], np.int32).reshape(2, 256)
    columns = np.flatnonzero(pair.new >= 0)
    scores = compare(pair.whole, pair.small, chunks, columns=columns)
    assert scores.divergence.max() < 1e-4  # the same weights
    assert 0 < scores.dropped.mean() < 1
    gain = scores.reference_loss - scores.loss  # what the others gave up
    expected = -np.log1p(-scores.dropped)
    assert gain[:, :-1] == pytest.approx(expected[:, :-1], abs=1e-3)
    assert np.isnan(gain[:, -1]).all()


def test_greedy_text_is_the_whole_model_s_best_of_the_kept(pair: Pair) -> None:
    prompt = pair.small.tokenize("<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n")
    columns = np.flatnonzero(pair.new >= 0)

    def run(context: EvalContext, tokens: list[int], start: int) -> np.ndarray:
        batch = Batch(context)
        for position, token in enumerate(tokens, start):
            batch.add(token, position, output=position == start + len(tokens) - 1)
        context.decode(batch)
        return context.logits()[0].copy()

    with (
        EvalContext(pair.whole, n_ctx=128, n_batch=128, precise=True) as whole,
        EvalContext(pair.small, n_ctx=128, n_batch=128, precise=True) as small,
    ):
        tokens, position = prompt, 0
        for _ in range(24):
            best = int(run(small, tokens, position).argmax())
            assert best == run(whole, columns[tokens].tolist(), position)[columns].argmax()
            tokens, position = [best], position + len(tokens)
