"""Options of one run of the converter."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from qwen_serve.convert.recipes import Recipe
from qwen_serve.convert.search import Target
from qwen_serve.convert.tensors import FloatType
from qwen_serve.convert.vision import VisionType
from qwen_serve.llamacpp.evaluation import Runtime

Method: TypeAlias = Literal["nearest", "compensated"]
"""How weights are rounded: independently, as in llama.cpp, or with error compensation."""

METHODS: Final[tuple[Method, ...]] = ("nearest", "compensated")


@dataclass(frozen=True)
class Options:
    """What is made from a checkpoint. `recipes`: the name in an output's file name -> its recipe."""

    out: Path
    name: str
    float_types: tuple[FloatType, ...]
    recipes: dict[str, Recipe]
    search: Target | None = None
    command: str = ""  # makes a searched recipe again, for its evidence
    outtype: FloatType = "F16"
    vision: VisionType | None = "F16"  # type of the tower's matrices; None leaves the tower out
    calibration: Path | None = None
    imatrix_file: Path | None = None  # used instead of a collected one
    method: Method = "nearest"
    distill: int = 0  # steps of training towards the whole model, after quantizing
    keep_vocab: int | None = None
    use_imatrix: bool = True
    measure: bool = True
    show_tensors: bool = False
    split_max_size: int | None = None  # most bytes of weights in one part of a file
    force: bool = False
    runtime: Runtime = field(default_factory=Runtime)

    @property
    def compensates(self) -> bool:
        """Whether errors are compensated."""
        return self.method == "compensated"

    @property
    def rewrites(self) -> bool:
        """Whether llama.cpp's blocks are changed afterwards, with the calibration text."""
        return self.compensates or self.distill > 0

    @property
    def description(self) -> str:
        """The method, for the report."""
        return self.method + (f", distilled in {self.distill} steps" if self.distill else "")
