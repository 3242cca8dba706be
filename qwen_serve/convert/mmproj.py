"""Writes a checkpoint's vision tower beside the text model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from qwen_serve.convert.checkpoint import PREPROCESSOR_FILES, Checkpoint
from qwen_serve.convert.source import Source
from qwen_serve.convert.stages import MMPROJ, Output, StageRecord, fingerprint
from qwen_serve.convert.tensors import VISION_PREFIX
from qwen_serve.convert.vision import VisionTower, VisionType, read_preprocessor, write_mmproj

VERSION = 1
"""Part of the file's fingerprint: raise it whenever the same tower would be converted differently."""


@dataclass(frozen=True)
class Mmproj:
    """The planned file of a tower: `mmproj-<name>-<TYPE>.gguf`, llama.cpp's converter's name."""

    tower: VisionTower
    source: Source
    path: Path
    type: VisionType

    @classmethod
    def find(
        cls, checkpoint: Checkpoint, source: Source, out: Path, name: str, kind: VisionType
    ) -> Mmproj | None:
        """A checkpoint's tower; None if it has none, or `left_out` says why it is not converted.

        Raises: CheckpointError: a tower that llama.cpp would compute differently.
        """
        preprocessor = read_preprocessor(checkpoint.folder)
        if not _has_tower(checkpoint) or preprocessor is None:
            return None
        tower = VisionTower.open(checkpoint, preprocessor)
        tower.plan(kind)
        return cls(tower, source, out / f"{MMPROJ}{name}-{kind}.gguf", kind)

    @cached_property
    def n_bytes(self) -> int:
        """Approximate size of the file in bytes; its key-value pairs are few."""
        return self.tower.plan(self.type).nbytes

    def output(self, checkpoint: str) -> Output:
        """The file and its fingerprint; `checkpoint` is `Checkpoint.fingerprint`."""
        parts = {
            "mmproj": VERSION,
            "checkpoint": checkpoint,
            "preprocessor": read_preprocessor(self.tower.checkpoint.folder),
            "source": [self.source.name, self.source.repo_id, self.source.revision],
            "type": self.type,
        }
        return Output(self.path, fingerprint(parts))

    def make(self, record: StageRecord, checkpoint: str) -> None:
        """Writes the file, unless it is finished."""
        record.make(
            self.output(checkpoint), lambda part: write_mmproj(part, self.tower, self.source, self.type)
        )


def left_out(checkpoint: Checkpoint) -> str | None:
    """Why an existing tower is not converted; None if there is none, or it is converted."""
    if not _has_tower(checkpoint) or read_preprocessor(checkpoint.folder) is not None:
        return None
    return (
        f"{checkpoint.folder} has a vision tower, and no {' or '.join(PREPROCESSOR_FILES)} that says how "
        "pictures are prepared for it: the text model alone is converted"
    )


def _has_tower(checkpoint: Checkpoint) -> bool:
    return any(name.startswith(VISION_PREFIX) for name in checkpoint.tensors)
