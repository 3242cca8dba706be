"""nano with an untrained vision tower of the official layout, for comparisons that do not depend on its
weights."""

import shutil
from pathlib import Path

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.source import Source
from qwen_serve.convert.vision import VisionTower, read_preprocessor, write_mmproj
from tests.drafters import NANO


def seeing_nano(folder: Path) -> Path:
    """A checkpoint, in a new folder."""
    import torch

    from models.nano.train.checkpoint import put_tower
    from models.nano.train.shape import VisionShape
    from models.nano.train.vision import Tower, initialise_tower

    checkpoint = folder / "nano"
    shutil.copytree(NANO, checkpoint, ignore=shutil.ignore_patterns("train", "heldout"))
    torch.manual_seed(0)
    tower = Tower(VisionShape(), 256)
    initialise_tower(tower, 0.1)
    put_tower(checkpoint, tower)
    return checkpoint


def write_tower(checkpoint: Path) -> Path:
    """Write the tower in F32, beside the checkpoint."""
    preprocessor = read_preprocessor(checkpoint)
    assert preprocessor is not None
    path = checkpoint.with_name("mmproj-nano-F32.gguf")
    write_mmproj(path, VisionTower.open(Checkpoint.open(checkpoint), preprocessor), Source(checkpoint), "F32")
    return path
