"""A GGUF that is given instead of a checkpoint: all that a conversion makes is made from it as it stands."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.convert.checkpoint import content_or_time
from qwen_serve.convert.config import ARCHS
from qwen_serve.convert.draft import ARCH as DRAFTER
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.floats import first_not_finite, to_f32
from qwen_serve.convert.gguf_file import CHUNK_ELEMENTS, not_finite
from qwen_serve.convert.gguf_header import read_head
from qwen_serve.convert.progress import BYTES, Progress
from qwen_serve.convert.safetensors import NUMPY_TYPES
from qwen_serve.convert.stages import fingerprint
from qwen_serve.convert.tensors import EMBEDDING, FLOAT_TYPES

if TYPE_CHECKING:
    from pathlib import Path

    from qwen_serve.convert.gguf_header import Head
    from qwen_serve.convert.tensors import FloatType


@dataclass(frozen=True)
class WholeModel:
    """A Qwen3.5 in F16, BF16 or F32, which is read and never written to.

    `type` is that of most weights, `used_experts` how many of a block's a token goes through (None: dense).
    """

    path: Path
    type: FloatType
    n_elements: int
    used_experts: int | None

    @classmethod
    def open(cls, path: Path) -> WholeModel:
        """Reads the file's head.

        Raises:
            ConvertError: not a GGUF, or not one that holds all of a Qwen3.5 in whole precision.
        """
        head = read_head(path)
        arch = _check(path, head)
        counts: Counter[FloatType] = Counter()
        for tensor in head.tensors:
            kind = next((kind for kind in FLOAT_TYPES if kind == tensor.type.name), None)
            if kind is None:
                raise ConvertError(
                    f"--src {path}: tensor {tensor.name} is {tensor.type.name}; want a file of F16, BF16 or "
                    "F32, from which a quantized one was made"
                )
            if len(tensor.shape) > 1:
                counts[kind] += tensor.n_elements
        used = head.values.get(f"{arch}.expert_used_count")
        return cls(
            path=path,
            type=counts.most_common(1)[0][0],
            n_elements=sum(tensor.n_elements for tensor in head.tensors),
            used_experts=int(used) if used else None,
        )

    def check_weights(self) -> None:
        """Reads every weight once.

        Raises:
            ConvertError: one is not finite, or the file ends before it.
        """
        tensors = read_head(self.path).tensors
        n_bytes = sum(tensor.n_bytes for tensor in tensors)
        with self.path.open("rb") as file, Progress(f"Checking {self.path.name}", n_bytes, BYTES) as progress:
            for tensor in tensors:
                where, kind = f"{self.path}: tensor {tensor.name}", tensor.type.name
                file.seek(tensor.offset)
                left = tensor.n_elements
                while left:
                    values = np.fromfile(file, NUMPY_TYPES[kind], min(left, CHUNK_ELEMENTS))
                    if not len(values):
                        raise ConvertError(f"{where}: the file ends before it does; copy it again")
                    if (place := first_not_finite(values, kind)) is not None:
                        raise not_finite(f"{where} holds {to_f32(values[place : place + 1], kind)[0]}")
                    left -= len(values)
                    progress.advance(values.nbytes)

    def fingerprint(self) -> str:
        """Changes with the content: as for a checkpoint's shards, that of a large file by size and time."""
        return fingerprint({"gguf": [self.path.stat().st_size, content_or_time(self.path)]})


def _check(path: Path, head: Head) -> str:
    """The architecture, of a file that holds a whole model and its tokenizer."""
    values = head.values
    if int(values.get("split.count", 0)) > 1:
        raise ConvertError(
            f"--src {path}: one of {values['split.count']} parts of a file; join them with "
            "llama-gguf-split --merge FIRST-PART OUT.gguf"
        )
    arch = values.get("general.architecture")
    if arch == DRAFTER:
        raise ConvertError(f"--src {path}: a block drafter; they are made from checkpoints, with --target")
    if arch not in ARCHS:
        raise ConvertError(f"--src {path}: general.architecture is {arch}; want {' or '.join(ARCHS)}")
    if not values.get("tokenizer.ggml.tokens"):
        raise ConvertError(f"--src {path}: no tokenizer (tokenizer.ggml.tokens); want a file with its own")
    if all(tensor.name != EMBEDDING.target for tensor in head.tensors):
        raise ConvertError(f"--src {path}: no tensor {EMBEDDING.target}: not a whole model")
    return str(arch)
