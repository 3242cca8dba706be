"""Importance matrices: file format, and sums collected from a model."""

import pytest
from gguf import GGUFReader, GGUFWriter

from qwen_serve.convert.chunks import read_chunks
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.imatrix import Entry, Imatrix, ImatrixError, collect_imatrix
from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.evaluation import Batch, EvalContext, Runtime
from qwen_serve.llamacpp.probe import Probe

import numpy as np  # isort: skip

from pathlib import Path

from qwen_serve.llamacpp.probe import Floats

RUNTIME = Runtime(threads=1, n_gpu_layers=0)


def test_round_trip(tmp_path: Path) -> None:
    entries = {
        "blk.0.ffn_up.weight": _entry([[1.0, 2.0, 3.0]], [4]),
        "blk.1.ffn_up.weight": _entry([[1.0, 2.0], [0.0, 0.0]], [3, 0]),
    }
    Imatrix(entries, ("text.txt",), 7, 512).save(tmp_path / "i.gguf")
    loaded = Imatrix.load(tmp_path / "i.gguf")
    assert (loaded.datasets, loaded.chunk_count, loaded.chunk_size) == (("text.txt",), 7, 512)
    assert loaded.entries.keys() == entries.keys()
    for name, entry in entries.items():
        np.testing.assert_array_equal(loaded.entries[name].sums, entry.sums)
        np.testing.assert_array_equal(loaded.entries[name].counts, entry.counts)


def test_file_layout_is_llama_cpps(tmp_path: Path) -> None:
    Imatrix({"a.weight": _entry([[1.0, 2.0, 3.0]], [4])}, ("t",), 1, 512).save(tmp_path / "i.gguf")
    reader = GGUFReader(tmp_path / "i.gguf")
    assert reader.get_field("general.type").contents() == "imatrix"
    shapes = {t.name: (t.tensor_type.name, t.shape.tolist()) for t in reader.tensors}
    assert shapes == {"a.weight.in_sum2": ("F32", [3, 1]), "a.weight.counts": ("F32", [1, 1])}


def test_means_are_sums_over_counts_and_one_where_nothing_was_seen() -> None:
    entry = _entry([[2.0, 4.0], [0.0, 0.0]], [2, 0])
    np.testing.assert_array_equal(entry.means, [[1.0, 2.0], [1.0, 1.0]])


def test_files_that_are_no_imatrix(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a GGUF at all")
    with pytest.raises(ImatrixError, match=r"text\.gguf: not a GGUF imatrix file"):
        Imatrix.load(tmp_path / "text.gguf")
    with pytest.raises(ImatrixError, match=r"none\.gguf"):
        Imatrix.load(tmp_path / "none.gguf")
    writer = GGUFWriter(tmp_path / "keys.gguf", arch="qwen35")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ImatrixError, match=r"no key imatrix\.datasets"):
        Imatrix.load(tmp_path / "keys.gguf")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text(" ".join(f"{n} squared is {n * n}." for n in range(120)))
    return path


@pytest.fixture(scope="module")
def imatrix(nano_f16: Path, text: Path) -> Imatrix:
    out = text.with_suffix(".gguf")
    collect_imatrix(nano_f16, out, text=text, runtime=RUNTIME)
    return Imatrix.load(out)


def test_every_matmul_weight_of_trunk_head_and_mtp_block_has_an_entry(
    nano_f16: Path, imatrix: Imatrix
) -> None:
    matrices = {
        t.name: int(t.shape[0])
        for t in GGUFReader(nano_f16).tensors
        if len(t.shape) == 2 and "conv1d" not in t.name
    }
    assert any(".nextn.eh_proj." in name for name in matrices)
    assert {name: entry.sums.shape[1] for name, entry in imatrix.entries.items()} == matrices


def test_counts_are_the_rows_seen(imatrix: Imatrix) -> None:
    n_tokens = imatrix.chunk_count * imatrix.chunk_size
    mtp = {name for name in imatrix.entries if name.startswith("blk.8.")}
    assert mtp
    for name, entry in imatrix.entries.items():
        # the MTP block begins with a chunk's second token
        assert entry.counts.tolist() == [n_tokens - imatrix.chunk_count if name in mtp else n_tokens]


def test_weights_with_one_input_agree_and_others_differ(imatrix: Imatrix) -> None:
    sums = {name: entry.sums for name, entry in imatrix.entries.items()}
    np.testing.assert_array_equal(sums["blk.3.attn_q.weight"], sums["blk.3.attn_v.weight"])
    np.testing.assert_array_equal(sums["blk.0.ffn_up.weight"], sums["blk.0.ffn_gate.weight"])
    assert not np.allclose(sums["blk.0.ffn_up.weight"], sums["blk.0.attn_qkv.weight"])


def test_sums_are_of_what_a_matmul_really_reads(nano_f16: Path, text: Path, imatrix: Imatrix) -> None:
    """The head's entry equals the sum of the trunk's squared hidden rows, token by token."""
    expected = np.zeros(256)
    with RUNTIME.load(nano_f16) as model, EvalContext(model, n_ctx=512, n_batch=1) as context:
        context.keep_hidden()
        for chunk in read_chunks(model, text):
            context.clear()
            for position, token in enumerate(chunk.tolist()):
                batch = Batch(context)
                batch.add(token, position)
                context.decode(batch)
                expected += context.hidden()[0].astype(np.float64) ** 2
    sums = imatrix.entries["token_embd.weight"].sums[0]
    # one token at a time is another batch shape: with an F16 cache that moves single columns by 1e-3
    np.testing.assert_allclose(sums, expected, rtol=5e-3)
    np.testing.assert_allclose(sums.sum(dtype=np.float64), expected.sum(), rtol=1e-3)


def test_text_too_short(nano_f16: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("only a few words")
    with pytest.raises(ConvertError, match=r"short\.txt: \d+ tokens; at least one chunk of 512 is needed"):
        collect_imatrix(nano_f16, tmp_path / "i.gguf", text=tmp_path / "short.txt", runtime=RUNTIME)
    assert not (tmp_path / "i.gguf").exists()


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(LlamaError, match=r"llama\.cpp could not load .*x\.gguf: "):
        RUNTIME.load(tmp_path / "x.gguf")


def test_an_observers_error_comes_out_of_decode(nano_f16: Path) -> None:
    def observe(name: str, rows: Floats, experts: object) -> None:
        raise KeyboardInterrupt

    with (
        RUNTIME.load(nano_f16) as model,
        EvalContext(model, n_ctx=64, n_batch=64, callback=Probe(observe)) as context,
    ):
        batch = Batch(context)
        batch.add(1, 0)
        with pytest.raises(KeyboardInterrupt):
            context.decode(batch)


def _entry(sums: list[list[float]], counts: list[int]) -> Entry:
    return Entry(np.array(sums, np.float32), np.array(counts, np.float32))
