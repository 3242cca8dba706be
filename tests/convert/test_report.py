"""Reports: sizes, bits and digests of a GGUF, printed and as JSON."""

import hashlib
import json
from dataclasses import replace

import pytest
from gguf import GGUFReader, GGUFWriter

from qwen_serve.convert import kld
from qwen_serve.convert.compensation.errors import Errors
from qwen_serve.convert.kld import OWN, Divergence
from qwen_serve.convert.recipes import load_recipe
from qwen_serve.convert.report import Report, print_report, print_table, tensor_groups, write_report
from qwen_serve.llamacpp.evaluation import Runtime
from qwen_serve.llamacpp.patches import LLAMA_VERSION

import numpy as np  # isort: skip

from pathlib import Path

RUNTIME = Runtime(threads=1, n_gpu_layers=0)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two trunk blocks with an F16 matrix each, an MTP block with one, and a norm in F32."""
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, arch="qwen35")
    for block in range(3):
        writer.add_tensor(f"blk.{block}.ffn_up.weight", np.zeros((4, 8), np.float16))
    writer.add_tensor("blk.2.nextn.enorm.weight", np.zeros(8, np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_groups_are_roles_and_types(small: Path) -> None:
    groups = [(g.name, g.type, g.tensors, g.elements, g.n_bytes) for g in tensor_groups(small)]
    assert groups == [
        ("blk.*.ffn_up.weight", "F16", 2, 64, 128),
        ("blk.mtp.ffn_up.weight", "F16", 1, 32, 64),
        ("blk.mtp.nextn.enorm.weight", "F32", 1, 8, 32),
        ("output_norm.weight", "F32", 1, 8, 32),
    ]


def test_arithmetic_and_digest(small: Path, tmp_path: Path) -> None:
    write_report(
        small,
        tmp_path / "r.json",
        reference=None,
        recipe=load_recipe("Q4_K_M"),
        imatrix=None,
        texts={},
        runtime=RUNTIME,
        provenance={"source": "here"},
    )
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["file"] == "small.gguf"
    assert data["n_bytes"] == small.stat().st_size
    assert data["elements"] == 112
    assert data["tensor_bytes"] == 256
    assert data["bits_per_weight"] == round(8 * 256 / 112, 4)
    assert data["sha256"] == hashlib.sha256(small.read_bytes()).hexdigest()
    assert data["recipe"]["type"] == "Q4_K_M"
    assert data["provenance"] == {"source": "here"}
    assert data["llama_cpp_python"] == LLAMA_VERSION
    assert data["divergence"] is None
    assert [g["bits_per_weight"] for g in data["groups"]] == [16, 16, 32, 32]


def test_json_round_trip_and_print(capsys: pytest.CaptureFixture[str], small: Path, tmp_path: Path) -> None:
    groups = tensor_groups(small)
    divergence = Divergence(
        tokens=33_280, mean=0.0123456, median=0.01, p99=0.1, maximum=1.5, same_top=0.98765
    )
    report = Report("a.gguf", 1_234_567, "ab" * 32, 112, 256, groups, None, "a-F16.gguf", divergence, {}, "0")
    report = replace(report, unlike={"code": replace(divergence, mean=0.25)})
    errors = {"own": Errors(0.002, 0.001), "unlike": Errors(0.004, 0.003)}
    report = replace(report, matrices={"blk.0.ssm_out.weight": errors})
    assert Report.from_json(report.to_json()) == report
    (tmp_path / "r.json").write_text(report.to_json())
    print_report(tmp_path / "r.json")
    out = capsys.readouterr().out
    for expected in (
        "a.gguf",
        "1,234,567 bytes",
        "18.286 bits",
        "ab" * 32,
        "0.012346 nats",
        "33,280",
        "98.77%",
    ):
        assert expected in out
    for group in groups:
        assert group.name in out
    assert "on code     0.250000 nats over 33,280 tokens" in out
    row = next(line for line in out.splitlines() if "blk.0.ssm_out.weight " in line)
    assert row.split() == ["blk.0.ssm_out.weight", "0.002", "0.001", "-50%", "0.004", "0.003", "-25%"]
    print_table([tmp_path / "r.json"])
    head, row, errors_told = capsys.readouterr().out.strip().splitlines()
    assert "squared errors are -50% on the model's own text, -25% on other kinds" in errors_told
    assert (head.split()[-2:], row.split()[-1]) == (["on", "code"], "0.250000")


def test_the_divergence_is_measured_and_kept(
    nano_f16: Path, nano_q2_k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kld, "MIN_TOKENS", 512)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"The cat number {n} sleeps." for n in range(200)))
    write_report(
        nano_q2_k,
        tmp_path / "r.json",
        reference=nano_f16,
        recipe=load_recipe("Q2_K"),
        imatrix=None,
        texts={OWN: text, "code": text},
        runtime=RUNTIME,
        provenance={},
        base=nano_f16,
    )
    report = Report.from_json((tmp_path / "r.json").read_text())
    assert report.reference == nano_f16.name
    assert report.divergence is not None
    assert report.divergence.tokens >= 512
    assert list(report.unlike) == ["code"], "what is not the model's own text has an entry of its own"
    assert {kind for kinds in report.matrices.values() for kind in kinds} == {"own", "unlike"}
    assert 0 < report.divergence.median < report.divergence.p99 <= report.divergence.maximum


def test_a_real_quantized_file(nano_q4_k_m: Path) -> None:
    report = Report.from_json(nano_q4_k_m.with_suffix(".json").read_text())
    tensors = GGUFReader(nano_q4_k_m).tensors
    assert sum(group.tensors for group in report.groups) == len(tensors)
    assert report.elements == sum(int(tensor.n_elements) for tensor in tensors)
    assert 4.5 < report.bits_per_weight < 6
