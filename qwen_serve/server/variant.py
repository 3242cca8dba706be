"""A variant: a quant level or recipe, and settings, under one name.

    about = "half the KV cache"
    quant = "Q4_K_M"           # a level of quant_recipes/, or F16, BF16, F32
    # recipe = "mine.toml"     # or a recipe file, beside this one
    [settings]                 # as in the file of `python -m qwen_serve.server --config`
    cache_type_k = "q8_0"

The files of `variants/` come with the package. `settings_sources.load_variant` checks the settings, too.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from qwen_serve.server.about import data_folder
from qwen_serve.server.names import nearest

VARIANTS = data_folder("variants")

NAME = re.compile(r"[\w+-][\w.+-]*")

Setting = bool | int | float | str


class VariantError(Exception):
    """The variant does not exist or is invalid. The message names the file and the key, and says what would
    be right."""


class Variant(BaseModel):
    """Has exactly one of `quant` and `recipe`; `settings` are the server's, by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    about: str = ""
    quant: str | None = None
    recipe: Path | None = None
    settings: dict[str, Setting] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} becomes a file name: want letters, digits and any of _.+-")
        return name

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if (self.quant is None) == (self.recipe is None):
            raise ValueError("want either quant, a level by name, or recipe, a file")
        return self

    @property
    def level(self) -> str:
        """The suffix of the GGUF's name after the model's."""
        return self.quant if self.quant is not None else Path(str(self.recipe)).stem

    def with_settings(self, common: Mapping[str, Setting]) -> Self:
        """The variant with `common` settings added. Its own take precedence."""
        return self.model_copy(update={"settings": {**common, **self.settings}})


def known_variants() -> list[str]:
    """Names of the packaged variants."""
    return sorted(path.stem for path in VARIANTS.glob("*.toml"))


def find_variant(given: str) -> Path:
    """The file of a variant's name or path. Raises VariantError."""
    path = Path(given).expanduser()
    if path.suffix == ".toml":
        if not path.is_file():
            raise VariantError(f"{given} is not a file")
        return path
    if given in known_variants():
        return VARIANTS / f"{given}.toml"
    near = nearest(given, known_variants())
    hint = f"did you mean {near}?" if near else f"there are {', '.join(known_variants())}, or a file's path"
    raise VariantError(f"no variant is called {given!r}; {hint}")


def read_variant(path: Path) -> Variant:
    """Reads a variant's file; its settings are not checked yet. Raises VariantError."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise VariantError(f"{path}: not a readable TOML file: {error}") from error
    try:
        variant = Variant.model_validate({"name": path.stem, **content})
    except ValidationError as error:
        problems = (_explain(dict(problem)) for problem in error.errors())
        raise VariantError("\n".join(f"{path}: {problem}" for problem in problems)) from error
    if variant.recipe is None:
        return variant
    return variant.model_copy(update={"recipe": path.parent / variant.recipe})


def _explain(error: Mapping[str, Any]) -> str:
    """A validation error as text: the key, and what would be right."""
    key = ".".join(str(part) for part in error["loc"][:2])
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        near = nearest(key, Variant.model_fields)
        known = f"known are {', '.join(Variant.model_fields)}"
        message = "unknown key; " + (f"did you mean {near!r}?" if near else known)
    return f"{key}: {message}" if key else message
