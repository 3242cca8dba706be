"""The mmproj that we write against the one of llama.cpp's convert_hf_to_gguf.py --mmproj."""

import subprocess
import sys
from pathlib import Path

import pytest

from qwen_serve.bench.servers.builds import llama_cpp_sources
from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.source import resolve
from qwen_serve.convert.vision import VISION_TYPES, VisionTower, VisionType, read_preprocessor, write_mmproj
from tests.checkpoints import Layout, edit_json, write_checkpoint
from tests.reference.test_conversion import ROOT, keys, same_tensors

pytestmark = pytest.mark.reference


def both_ways(folder: Path, outtype: VisionType) -> tuple[Path, Path]:
    source = resolve(str(folder))
    checkpoint, preprocessor = Checkpoint.open(folder), read_preprocessor(folder)
    assert preprocessor is not None
    ours, theirs = folder.with_name("ours.gguf"), folder.with_name("theirs.gguf")
    write_mmproj(ours, VisionTower.open(checkpoint, preprocessor), source, outtype)
    command = [sys.executable, "-m", "tests.reference.llama_cpp_converter", str(llama_cpp_sources())]
    subprocess.run([*command, str(folder), str(theirs), outtype, "--mmproj"], check=True, cwd=ROOT)
    return ours, theirs


@pytest.mark.parametrize("outtype", VISION_TYPES)
@pytest.mark.parametrize(("experts", "dtype"), [(None, "BF16"), ("fused", "F32")])
def test_every_tensor_and_key_is_the_same(
    outtype: VisionType, experts: Layout | None, dtype: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "Random-1B", vision=True, experts=experts, dtype=dtype)
    edit_json(folder / "preprocessor_config.json", image_mean=[0.48, 0.45, 0.4], image_std=[0.26, 0.25, 0.27])
    ours, theirs = both_ways(folder, outtype)
    assert keys(ours) == keys(theirs)
    same_tensors(ours, theirs)


def test_a_nested_preprocessor_configuration_is_read_as_theirs(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "Random-1B", vision=True)
    edit_json(folder / "preprocessor_config.json", image_mean=[0.1, 0.2, 0.3])
    nested = folder / "processor_config.json"
    nested.write_text('{"image_processor": {"image_mean": [0.4, 0.5, 0.0]}, "processor_class": "Qwen3VL"}')
    ours, theirs = both_ways(folder, "F16")
    assert keys(ours) == keys(theirs)
