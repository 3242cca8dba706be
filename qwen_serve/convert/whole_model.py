"""A GGUF that is given instead of a checkpoint, from which every output is made. It is not changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qwen_serve.convert.checkpoint import content_or_time
from qwen_serve.convert.config import ARCHS
from qwen_serve.convert.draft import ARCH as DRAFTER
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.floats import first_not_finite, to_f32
from qwen_serve.convert.gguf_file import CHUNK_ELEMENTS, not_finite
from qwen_serve.convert.progress import BYTES, Progress
from qwen_serve.convert.safetensors import NUMPY_TYPES
from qwen_serve.convert.stages import fingerprint
from qwen_serve.convert.tensors import EMBEDDING, FLOAT_TYPES, FloatType
from qwen_serve.llamacpp.file_checks import check_model
from qwen_serve.llamacpp.gguf import Header, read_header


@dataclass(frozen=True)
class UnquantizedFile:
    """A Qwen3.5 in F16, BF16 or F32.

    `type` is that of most weights, `used_experts` the experts of a block that a token uses (None: dense).
    """

    path: Path
    type: FloatType
    n_elements: int
    used_experts: int | None

    @classmethod
    def open(cls, path: Path) -> UnquantizedFile:
        """Reads the file's header.

        Raises:
            ModelLoadError: not a GGUF file.
            ConvertError: not a complete Qwen3.5 in F16, BF16 or F32.
        """
        header = read_header(path)
        arch = _check(path, header)
        counts: Counter[FloatType] = Counter()
        for tensor in header.tensors.values():
            kind = next((kind for kind in FLOAT_TYPES if kind == tensor.type_name), None)
            if kind is None:
                raise ConvertError(
                    f"--src {path}: tensor {tensor.name} is {tensor.type_name}; want a file of F16, BF16 or "
                    "F32, from which a quantized one was made"
                )
            if len(tensor.shape) > 1:
                counts[kind] += tensor.n_elements
        check_model(header)
        used = header.metadata.get(f"{arch}.expert_used_count")
        return cls(
            path=path,
            type=counts.most_common(1)[0][0],
            n_elements=sum(tensor.n_elements for tensor in header.tensors.values()),
            used_experts=used if isinstance(used, int) and used else None,
        )

    def check_outputs(self, types: set[FloatType], *, pruned: bool, paths: Sequence[Path]) -> None:
        """Raises ConvertError for other float types, fewer layers or tokens, or a file over this one."""
        at = f"--src {self.path}"
        if others := types - {self.type}:
            raise ConvertError(f"{at}: is {self.type}; want the checkpoint for {', '.join(sorted(others))}")
        if pruned:
            raise ConvertError(f"{at}: --keep-vocab, and recipes that prune, are for checkpoints")
        if any(path.exists() and path.samefile(self.path) for path in paths):
            raise ConvertError(f"{at}: would be written to; give another --out or --name")

    def check_weights(self) -> None:
        """Reads every weight once.

        Raises:
            ModelLoadError: the file ends before one.
            ConvertError: one is not finite.
        """
        tensors = read_header(self.path).tensors.values()
        n_bytes = sum(tensor.n_bytes for tensor in tensors)
        with self.path.open("rb") as file, Progress(f"Checking {self.path.name}", n_bytes, BYTES) as progress:
            for tensor in tensors:
                where, kind = f"{self.path}: tensor {tensor.name}", tensor.type_name
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
        """A digest that changes with the content or, for a large file, with its size and time, as for the
        shards of a checkpoint."""
        return fingerprint({"gguf": [self.path.stat().st_size, content_or_time(self.path)]})


def _check(path: Path, header: Header) -> str:
    """The architecture of a file that holds a whole model and its tokenizer."""
    values = header.metadata
    if isinstance(parts := values.get("split.count"), int) and parts > 1:
        raise ConvertError(
            f"--src {path}: one of {parts} parts of a file; join them with "
            "llama-gguf-split --merge FIRST-PART OUT.gguf"
        )
    arch = values.get("general.architecture")
    if arch == DRAFTER:
        raise ConvertError(f"--src {path}: a block drafter; they are made from checkpoints, with --target")
    if arch not in ARCHS:
        raise ConvertError(f"--src {path}: general.architecture is {arch}; want {' or '.join(ARCHS)}")
    if not header.lengths.get("tokenizer.ggml.tokens"):
        raise ConvertError(f"--src {path}: no tokenizer (tokenizer.ggml.tokens); want a file with its own")
    if EMBEDDING.target not in header.tensors:
        raise ConvertError(f"--src {path}: no tensor {EMBEDDING.target}: not a whole model")
    return str(arch)
