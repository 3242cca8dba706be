"""The tensors that a recipe decides: their groups, their possible types, and the types' sizes."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Final, TypeAlias

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.tensors import ALWAYS_F32
from qwen_serve.llamacpp.gguf import ALIGNMENT, TensorInfo, read_header

Type: TypeAlias = GGMLQuantizationType

TYPES: Final = (
    Type.Q2_K,
    Type.IQ3_XXS,
    Type.Q3_K,
    Type.IQ3_S,
    Type.IQ4_XS,
    Type.Q4_K,
    Type.Q5_K,
    Type.Q6_K,
    Type.Q8_0,
)
"""Types by size. llama.cpp has CUDA kernels for each of them, for one row (mmvq) and for many (mmq)."""

NARROW: Final = (Type.IQ4_NL, Type.Q5_0, Type.Q5_1, Type.Q8_0)
"""Types for rows that are not a multiple of 256: these have blocks of 32."""

BANDS: Final = 8
"""Number of bands of adjacent layers in a trunk. A band is one layer of nano, and four of the 4B."""

SMALL: Final = 0.005
"""A role with a smaller share of all weights is a single group."""

TOKEN_EMBEDDING, HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Matrix:
    """One tensor. All tensors of a `group` are probed together. `read`: the share of the tensor that a
    decoded token reads."""

    name: str
    group: str
    width: int
    elements: int
    read: float
    mtp: bool

    @property
    def types(self) -> tuple[Type, ...]:
        """The types whose blocks its rows can be cut into, from few bits to many."""
        block, _ = GGML_QUANT_SIZES[Type.Q4_K]
        return TYPES if self.width % int(block) == 0 else NARROW

    def n_bytes(self, kind: Type) -> int:
        """Bytes in the file, padding included."""
        block, n_bytes = GGML_QUANT_SIZES[kind]
        return padded(self.elements // int(block) * int(n_bytes))


@dataclass(frozen=True)
class Layout:
    """A model's matrices. The rest of its file has `fixed` bytes, of which a token reads `fixed_read`."""

    matrices: tuple[Matrix, ...]
    fixed: int
    fixed_read: int
    elements: int
    fixed_tensors: int
    """Bytes of `fixed` that are tensors, which count for bits per weight."""

    @property
    def groups(self) -> Mapping[str, tuple[Matrix, ...]]:
        """Members by group, in the order of the file."""
        found: dict[str, tuple[Matrix, ...]] = {}
        for matrix in self.matrices:
            found[matrix.group] = (*found.get(matrix.group, ()), matrix)
        return found

    def file_bytes(self, types: Mapping[str, Type]) -> int:
        """Bytes of the whole file."""
        return self.fixed + sum(m.n_bytes(types[m.name]) for m in self.matrices)

    def read_bytes(self, types: Mapping[str, Type]) -> float:
        """Bytes of weights that one token of one sequence reads, without drafts."""
        return self.fixed_read + sum(m.read * m.n_bytes(types[m.name]) for m in self.matrices)

    def bits_per_weight(self, types: Mapping[str, Type]) -> float:
        """Bits of tensor data per weight over all tensors, as in reports."""
        return 8 * (self.file_bytes(types) - self.fixed + self.fixed_tensors) / self.elements


def read_layout(gguf: Path, *, extra: int, used_experts: int | None) -> Layout:
    """The layout of an unquantized GGUF.

    Args:
        extra: bytes that quantization adds to the header.
        used_experts: routed experts that a token reads; None for a dense model.

    Raises:
        ModelLoadError: not a GGUF file.
        ConvertError: one without matrices.
    """
    tensors = read_header(gguf).tensors.values()
    mtp_blocks = {t.name.split(".")[1] for t in tensors if ".nextn." in t.name}
    chosen = [t for t in tensors if _is_decided(t)]
    if not chosen:
        raise ConvertError(f"{gguf}: no matrices to quantize")
    tied = all(t.name != HEAD for t in tensors)
    trunk = {int(n) for t in tensors if (n := _block(t.name)) is not None and n not in mtp_blocks}
    span = max(1, ceil(len(trunk) / BANDS))
    total = sum(t.n_elements for t in tensors)
    by_role: dict[str, int] = {}
    for t in chosen:
        by_role[_role(t.name)] = by_role.get(_role(t.name), 0) + t.n_elements

    def matrix(t: TensorInfo) -> Matrix:
        block, role = _block(t.name), _role(t.name)
        mtp = block in mtp_blocks
        group = role
        if mtp:
            group = f"mtp {role}"
        elif block is not None and by_role[role] >= SMALL * total:
            first = int(block) // span * span
            last = min(first + span, len(trunk)) - 1
            group = f"{role} {first}" if first == last else f"{role} {first}-{last}"
        read = 1.0
        if mtp or role.endswith("embed_tokens"):
            read = 0.0
        elif t.name == TOKEN_EMBEDDING and not tied:
            read = 1 / t.shape[1]
        elif len(t.shape) == 3 and used_experts is not None:
            read = min(1.0, used_experts / t.shape[2])
        return Matrix(t.name, group, t.shape[0], t.n_elements, read, mtp)

    names = {t.name for t in chosen}
    rest = [t for t in tensors if t.name not in names]
    data = sum(padded(t.n_bytes) for t in tensors)
    fixed_tensors = sum(padded(t.n_bytes) for t in rest)
    return Layout(
        matrices=tuple(matrix(t) for t in chosen),
        fixed=gguf.stat().st_size - data + extra + fixed_tensors,
        fixed_read=sum(t.n_bytes for t in rest if _block(t.name) not in mtp_blocks),
        elements=total,
        fixed_tensors=fixed_tensors,
    )


def padded(n_bytes: int) -> int:
    """Bytes up to the next tensor's place in the file."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def patterns(names: Iterable[str]) -> list[str]:
    """Regular expressions for exactly these tensors, one for each role, with all its blocks."""
    blocks: dict[str, list[str]] = {}
    for name in names:
        found = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if found is None:
            blocks[name] = []
        else:
            blocks.setdefault(found[2], []).append(found[1])
    return [_pattern(role, numbers) for role, numbers in blocks.items()]


def _pattern(role: str, numbers: Sequence[str]) -> str:
    if not numbers:
        return f"^{re.escape(role)}$"
    alternatives = "|".join(sorted(numbers, key=int))
    return rf"^blk\.({alternatives})\.{re.escape(role)}$"


def _is_decided(t: TensorInfo) -> bool:
    block, _ = GGML_QUANT_SIZES[Type.Q8_0]
    fits = len(t.shape) > 1 and t.shape[0] % int(block) == 0
    return fits and t.name.endswith(".weight") and _local(t.name) not in ALWAYS_F32


def _local(name: str) -> str:
    """The name inside its block."""
    return re.sub(r"^blk\.\d+\.", "", name)


def _role(name: str) -> str:
    return _local(name).removesuffix(".weight").removeprefix("nextn.")


def _block(name: str) -> str | None:
    found = re.match(r"blk\.(\d+)\.", name)
    return found[1] if found else None
