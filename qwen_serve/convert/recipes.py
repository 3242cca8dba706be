"""Quant levels as data: a llama.cpp file type, and the tensors for which another type is better.

Recipes are the TOML files of `quant_recipes/`, whose README explains the keys and has the measurements.
"""

import hashlib
import re
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from qwen_serve.convert.errors import ConvertError
from qwen_serve.llamacpp.mixture import Mixture

RECIPES = next(
    folder
    for folder in (
        Path(__file__).parent / "quant_recipes",
        Path(__file__).resolve().parents[2] / "quant_recipes",
    )
    if folder.is_dir()  # inside the installed package, in a checkout beside it
)

FILE_TYPES = {
    t.name.removeprefix("MOSTLY_"): t
    for t in LlamaFileType
    if t.name.startswith("MOSTLY_") and t.name not in ("MOSTLY_F16", "MOSTLY_BF16")
}
"""llama.cpp's quantized file types by the name llama-quantize gives them."""

TENSOR_TYPES = {
    t.name: t
    for t in GGMLQuantizationType
    if t.name not in ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")  # not types of weights
}

# llama.cpp's mixtures give some tensors more bits than the file type's own; this covers all of them
MIXTURE_MARGIN_BITS = 1.5


class RecipeError(ConvertError):
    """A recipe is missing or invalid; the message names the file, the key and what is allowed."""


def _file_type(name: str) -> str:
    if name not in FILE_TYPES:
        raise ValueError(f"{name!r} is not a quantized file type; allowed are {', '.join(FILE_TYPES)}")
    return name


def _tensor_type(name: str) -> str:
    if name not in TENSOR_TYPES:
        raise ValueError(f"{name!r} is not a tensor type; allowed are {', '.join(TENSOR_TYPES)}")
    return name


def _pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression ({error})") from None
    if pattern != pattern.lower():
        raise ValueError(f"{pattern!r} has capitals; tensor names are all lower case")
    return pattern


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Override(_Table):
    """Tensors whose name matches the regular expression `pattern` get `type`, because of `reason`."""

    pattern: Annotated[str, AfterValidator(_pattern)]
    type: Annotated[str, AfterValidator(_tensor_type)]
    reason: Annotated[str, Field(min_length=1)]


class Layers(_Table):
    """Trunk layers to drop, counted from 0; the converter accepts whole groups of the hybrid pattern."""

    prune: list[Annotated[int, Field(ge=0)]] = []


class Vocabulary(_Table):
    """How many of the first regular tokens to keep; None for all. This is `--keep-vocab` for one recipe."""

    keep: Annotated[int, Field(ge=1)] | None = None


class Evidence(_Table):
    """What a searched recipe rests on. It has no effect. Divergences are KL(whole || quantized) in nats.

    A recipe that was computed for a model from another's search has `predicted` alone. `predicted` and
    `measured` are means over the search's text. `prediction_error` is their difference, and
    `left_out_error` the additive model's error on a probe that it was not fitted to; both are shares.
    `evaluation_*` is measured with the finished file, on text of the model's own that the search did not use;
    `evaluation_unlike` are means on texts of other kinds than calibration's and the search's.
    """

    command: str
    date: str
    source: str
    llama_cpp_python: str
    bytes: int
    bits_per_weight: float
    predicted: float
    measured: float | None = None
    prediction_error: float | None = None
    left_out_error: float | None = None
    probes: int | None = None
    probe_tokens: int | None = None
    search_seconds: float | None = None
    decode_ms: float | None = None
    evaluation_tokens: int | None = None
    evaluation_mean: float | None = None
    evaluation_p99: float | None = None
    evaluation_same_top: float | None = None
    evaluation_unlike: dict[str, float] | None = None


class Recipe(_Table):
    """One file of `quant_recipes/`, or a user's own."""

    type: Annotated[str, AfterValidator(_file_type)]
    about: Annotated[str, Field(min_length=1)]
    imatrix: bool = True
    pure: bool = False
    output_tensor_type: Annotated[str, AfterValidator(_tensor_type)] | None = None
    token_embedding_type: Annotated[str, AfterValidator(_tensor_type)] | None = None
    override: list[Override] = []
    layers_table: Layers = Field(default=Layers(), alias="layers")
    vocab_table: Vocabulary = Field(default=Vocabulary(), alias="vocab")
    evidence: Evidence | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Trunk layers to drop, ascending; empty for none."""
        return tuple(sorted(set(self.layers_table.prune)))

    @property
    def keep_vocab(self) -> int | None:
        """Regular tokens to keep; None if the recipe does not say."""
        return self.vocab_table.keep

    @property
    def uses_imatrix(self) -> bool:
        """Whether an importance matrix has any effect."""
        return self.imatrix

    @property
    def file_type(self) -> LlamaFileType:
        """`enum llama_ftype`."""
        return FILE_TYPES[self.type]

    @property
    def overrides(self) -> list[tuple[str, GGMLQuantizationType]]:
        """(pattern, `enum ggml_type`) in order; the first that matches decides."""
        return [(o.pattern, TENSOR_TYPES[o.type]) for o in self.override]

    @property
    def mixture(self) -> Mixture:
        """The types of tensors that no override names."""
        output, embedding = (
            TENSOR_TYPES[kind] if kind else None
            for kind in (self.output_tensor_type, self.token_embedding_type)
        )
        return Mixture(pure=self.pure, output=output, embedding=embedding)

    @property
    def bits_per_weight(self) -> float:
        """An upper estimate for the whole file, for the disk check."""
        base = self.type.removesuffix("_S").removesuffix("_M").removesuffix("_L")
        kind = TENSOR_TYPES.get(self.type) or TENSOR_TYPES.get(base) or GGMLQuantizationType.Q8_0
        elements, n_bytes = GGML_QUANT_SIZES[kind]
        return float(8 * n_bytes / elements + MIXTURE_MARGIN_BITS)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything that affects the output; descriptions and reasons are not included."""
        what: tuple[object, ...] = (
            self.type,
            self.imatrix,
            [(o.pattern, o.type) for o in self.override],
            self.layers,
        )
        if self.keep_vocab is not None:
            what += (self.keep_vocab,)
        if self.pure or self.output_tensor_type or self.token_embedding_type:
            what += (self.pure, self.output_tensor_type, self.token_embedding_type)
        return hashlib.sha256(repr(what).encode()).hexdigest()[:24]


def known_recipes() -> list[str]:
    """Names of the recipes in `quant_recipes/`, from most to fewest bits."""
    names = [path.stem for path in RECIPES.glob("*.toml")]
    return sorted(names, key=lambda name: (-load_recipe(name).bits_per_weight, name))


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Reads a recipe of `quant_recipes/` by name, or any TOML file by path.

    Raises:
        RecipeError: no such recipe, not TOML, or not valid by the schema.
    """
    path = name_or_path if isinstance(name_or_path, Path) else RECIPES / f"{name_or_path}.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.toml")))
        raise RecipeError(f"{path}: no such recipe; quant_recipes/ has {known}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise RecipeError(f"{path}: not a TOML file ({error})") from None
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError("\n".join(f"{path}: {_explain(e)}" for e in error.errors())) from None


def _explain(error: Any) -> str:
    """A pydantic error on one line: the key as in the file, and what is allowed there."""
    location = error["loc"]
    table: type[_Table] = Recipe
    if len(location) > 1:
        tables: dict[str, type[_Table]] = {
            "override": Override,
            "layers": Layers,
            "vocab": Vocabulary,
            "evidence": Evidence,
        }
        table = tables[location[0]]
    key = ".".join(str(part) for part in location)
    allowed = ", ".join(field.alias or name for name, field in table.model_fields.items())
    match error["type"]:
        case "extra_forbidden":
            return f"{key}: unknown key; allowed are {allowed}"
        case "missing":
            return f"{key}: missing; it is required"
        case _:
            return f"{key}: {error['msg'].removeprefix('Value error, ')}"
