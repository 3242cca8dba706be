"""What a run of the converter is to make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from qwen_serve.llamacpp.evaluation import Runtime

if TYPE_CHECKING:
    from pathlib import Path

    from qwen_serve.convert.recipes import Recipe
    from qwen_serve.convert.search import Target
    from qwen_serve.convert.tensors import FloatType
    from qwen_serve.convert.vision import VisionType

Method: TypeAlias = Literal["nearest", "compensated"]
"""How weights are rounded: each by itself, as llama.cpp does, or with its error compensated in others."""

METHODS: Final[tuple[Method, ...]] = ("nearest", "compensated")


@dataclass(frozen=True)
class Options:
    """What to make of a checkpoint. `recipes` maps the name in an output's file name to what it means."""

    out: Path
    name: str
    float_types: tuple[FloatType, ...]
    recipes: dict[str, Recipe]
    search: Target | None = None
    command: str = ""  # that makes a searched recipe again, for its evidence
    outtype: FloatType = "F16"
    vision: VisionType | None = "F16"  # of the tower's matrices; None leaves it out
    calibration: Path | None = None
    imatrix_file: Path | None = None  # in place of one that is collected
    method: Method = "nearest"
    keep_vocab: int | None = None
    use_imatrix: bool = True
    measure: bool = True
    show_tensors: bool = False
    split_max_size: int | None = None  # bytes of weights in a part of a file
    force: bool = False
    runtime: Runtime = field(default_factory=Runtime)
