"""Our GGUF against the one that llama.cpp's convert_hf_to_gguf.py writes: every tensor, every key.

The differences, all of them, with their reasons:

- `ssm_a`, which is -exp(A_log): ours is rounded once, from float64; torch's float32 exp may be off by one
last bit. - Zero-centred norms of an F16 checkpoint: llama.cpp adds 1 in F16, ours in F32 as the model itself
does. From BF16, which official checkpoints are in, and from F32 both are exact. - No key differs.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader, ReaderTensor

from qwen_serve.bench.servers.builds import llama_cpp_sources
from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.draft import DraftCheckpoint, write_draft
from qwen_serve.convert.gguf_file import write_gguf
from qwen_serve.convert.source import resolve
from qwen_serve.convert.tensors import FloatType, plan_tensors
from tests.checkpoints import edit_json, write_checkpoint
from tests.drafters import DRAFT, NANO, some_tokens, with_own_vocabulary
from tests.prequantized import Method, write_prequantized

pytestmark = pytest.mark.reference

ROOT = Path(__file__).parents[2]

COUNTED = {"GGUF.kv_count"}
"""In the header."""


@dataclass(frozen=True)
class Case:
    name: str
    outtype: FloatType
    checkpoint: dict[str, Any] | None = None  # what to write; None: nano
    method: Method | None = None  # that nano is quantized by already


CASES = (
    Case("nano-F32", "F32"),
    Case("nano-F16", "F16"),
    Case("nano-BF16", "BF16"),
    Case("nano-from-fp8-F32", "F32", method="fp8"),
    Case("nano-from-fp8-BF16", "BF16", method="fp8"),
    Case("nano-from-gptq-F32", "F32", method="gptq"),
    Case("nano-from-w4a16-F32", "F32", method="w4a16"),
    Case("random-F16", "F16", {"seed": 1}),
    Case("random-text-only-untied-from-F32-BF16", "BF16", {"nested": False, "tied": False, "dtype": "F32"}),
    Case("random-from-F16-F32", "F32", {"dtype": "F16"}),
    Case("experts-fused-F16", "F16", {"experts": "fused", "tied": False, "seed": 2}),
    Case("experts-per-expert-BF16", "BF16", {"experts": "per-expert", "tied": False}),
    Case("experts-per-expert-MTP-text-only-F32", "F32", {"experts": "per-expert MTP", "nested": False}),
)


@dataclass(frozen=True)
class Pair:
    """The same checkpoint converted by us and by llama.cpp."""

    case: Case
    ours: Path
    theirs: Path


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case: Case = request.param
    folder = tmp_path_factory.mktemp("conversion")
    place = NANO
    if case.checkpoint is not None:
        place = write_checkpoint(folder / "Random-1B", **case.checkpoint)
    if case.method is not None:
        write_prequantized(place := folder / "nano", case.method)
    source = resolve(str(place))
    checkpoint = Checkpoint.open(source.path)
    kept = tuple(range(checkpoint.config.n_layers))
    ours, theirs = folder / "ours.gguf", folder / "theirs.gguf"
    write_gguf(ours, checkpoint, source, plan_tensors(checkpoint, case.outtype, kept), kept, case.outtype)
    command = [
        sys.executable,
        "-m",
        "tests.reference.llama_cpp_converter",
        str(llama_cpp_sources()),
        str(source.path),
    ]
    subprocess.run([*command, str(theirs), case.outtype], check=True, cwd=ROOT)
    return Pair(case, ours, theirs)


def test_every_tensor_is_the_same(pair: Pair) -> None:
    ours, theirs = tensors(pair.ours), tensors(pair.theirs)
    assert ours.keys() == theirs.keys()
    added_in_f16 = pair.case.checkpoint is not None and pair.case.checkpoint.get("dtype") == "F16"
    for name, tensor in ours.items():
        other = theirs[name]
        assert tensor.tensor_type == other.tensor_type, name
        assert tensor.shape.tolist() == other.shape.tolist(), name
        if name.endswith("ssm_a"):
            np.testing.assert_array_max_ulp(tensor.data, other.data, maxulp=1)
        elif added_in_f16 and "norm" in name and "ssm_norm" not in name:
            np.testing.assert_array_equal(tensor.data.astype(np.float16), other.data, err_msg=name)
        else:
            np.testing.assert_array_equal(bits(tensor), bits(other), err_msg=name)


def test_every_key_is_the_same(pair: Pair) -> None:
    ours, theirs = keys(pair.ours), keys(pair.theirs)
    assert {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)} == set()


@pytest.mark.parametrize("outtype", ["F32", "F16", "BF16"])
def test_a_block_drafter_is_the_same(outtype: FloatType, tmp_path: Path) -> None:
    ours, theirs = _both_ways(DRAFT, DRAFT, outtype, tmp_path)
    assert keys(ours) == keys(theirs)
    same_tensors(ours, theirs)


@pytest.mark.parametrize("speculators", [False, True])
def test_a_drafter_with_a_reduced_vocabulary_is_the_same(speculators: bool, tmp_path: Path) -> None:
    """llama.cpp's converter knows `d2t`, and that layout, of DSpark drafters alone; its graph, of DFlash too.

    So it is told that this is one, and says so in two keys.
    """
    tokens = some_tokens(0.3)
    folder = with_own_vocabulary(tmp_path / "nano-dflash", tokens, speculators=speculators)
    other = shutil.copytree(folder, tmp_path / "theirs" / "nano-dflash")
    edit_json(other / "config.json", architectures=["DSparkDraftModel"])
    ours, theirs = _both_ways(folder, other, "F16", tmp_path)
    mine, other_keys = keys(ours), keys(theirs)
    differing = {key for key in mine.keys() | other_keys.keys() if mine.get(key) != other_keys.get(key)}
    assert differing - COUNTED == {"dflash.has_confidence_head", "dflash.sample_from_anchor"}
    same_tensors(ours, theirs)
    assert tensors(ours)["d2t"].data.tolist() == tokens.tolist()


def _both_ways(ours: Path, theirs: Path, outtype: FloatType, out: Path) -> tuple[Path, Path]:
    """A drafter for nano, converted by us and by llama.cpp."""
    source = resolve(str(ours))
    mine, other = out / "ours.gguf", out / "theirs.gguf"
    write_draft(mine, DraftCheckpoint.open(source.path, Checkpoint.open(NANO)), source, outtype)
    command = [sys.executable, "-m", "tests.reference.llama_cpp_converter", str(llama_cpp_sources())]
    command += [str(theirs), str(other), outtype, "--target-model-dir", str(NANO)]
    subprocess.run(command, check=True, cwd=ROOT)
    return mine, other


def same_tensors(ours: Path, theirs: Path) -> None:
    mine, other = tensors(ours), tensors(theirs)
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert tensor.tensor_type == other[name].tensor_type, name
        np.testing.assert_array_equal(bits(tensor), bits(other[name]), err_msg=name)


def tensors(path: Path) -> dict[str, ReaderTensor]:
    return {tensor.name: tensor for tensor in GGUFReader(path).tensors}


def bits(tensor: ReaderTensor) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(tensor.data).view(np.uint8)


def keys(path: Path) -> dict[str, tuple[Any, Any]]:
    """Every key's types and value; the counts in the header are among them."""
    return {key: (field.types, field.contents()) for key, field in GGUFReader(path).fields.items()}
