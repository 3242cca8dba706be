"""What a variant is: weights by quant level or recipe, settings of our server, and a name.

name = "Q4_K_M-kv8"        # else the file's own
about = "half the KV cache"
quant = "Q4_K_M"           # a level of quant_recipes/, or F16, BF16, F32
# recipe = "mine.toml"     # or a recipe file, beside this one
[server]                   # as in the file of `python -m server --config`
cache_type_k = "q8_0"
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from bench.errors import BenchError
from convert.errors import ConvertError
from convert.recipes import known_recipes, load_recipe
from convert.tensors import FLOAT_TYPES
from server.settings import Settings

NAME = re.compile(r"[\w.+-]+")
RESERVED = {"model", "alias", "host", "port", "api_key"}

Setting = bool | int | float | str


class Variant(BaseModel):
    """One candidate. Exactly one of ``quant`` and ``recipe``; ``server`` holds settings by their names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    about: str = ""
    quant: str | None = None
    recipe: Path | None = None
    server: dict[str, Setting] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not NAME.fullmatch(name) or name.startswith("."):
            raise ValueError(f"{name!r} becomes a file name: want letters, digits and any of _.+-")
        return name

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if (self.quant is None) == (self.recipe is None):
            raise ValueError("want either quant, a level by name, or recipe, a file")
        return self

    @property
    def level(self) -> str:
        """What stands behind the model's name in the GGUF's."""
        return self.quant if self.quant is not None else Path(str(self.recipe)).stem

    def with_settings(self, common: Mapping[str, Setting]) -> "Variant":
        """The same, where it says nothing itself, under ``common`` server settings."""
        return self.model_copy(update={"server": {**common, **self.server}})


def of_quants(names: Sequence[str]) -> list[Variant]:
    """Levels by name, all with the server's default settings. Raises BenchError for an unknown one."""
    levels = [known_quant(name.strip(), "--quants") for name in names if name.strip()]
    return [Variant(name=level, quant=level) for level in dict.fromkeys(levels)]


def read_variant(path: Path) -> Variant:
    """A variant file. Raises BenchError that names the file, the key and what would be right."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BenchError(f"--variants {path}: not a readable TOML file: {error}") from error
    try:
        variant = Variant.model_validate({"name": path.stem, **content})
    except ValidationError as error:
        raise BenchError(f"{path}: {explain(error)}") from error
    if variant.quant is not None:
        variant = variant.model_copy(update={"quant": known_quant(variant.quant, str(path))})
    else:
        recipe = path.parent / Path(str(variant.recipe))
        try:
            load_recipe(recipe)
        except ConvertError as error:
            raise BenchError(f"{path}: recipe: {error}") from error
        variant = variant.model_copy(update={"recipe": recipe})
    check_settings(variant.server, path, str(path))
    return variant


def known_quant(name: str, where: str) -> str:
    """The level of that name, however its letters are written. Raises BenchError, naming the known levels,
    for one that the converter does not have."""
    known = {level.upper(): level for level in (*FLOAT_TYPES, *known_recipes())}
    if name.upper() not in known:
        raise BenchError(f"{where}: unknown quant {name!r}; known are {', '.join(known.values())}")
    return known[name.upper()]


def check_settings(settings: Mapping[str, Setting], some_file: Path, where: str) -> None:
    """Raises BenchError for what our server would not take. ``some_file`` stands in for the model."""
    known = [name for name in Settings.model_fields if name not in RESERVED]
    for name in settings:
        if name not in known:
            reason = "set by the sweep" if name in RESERVED else "unknown"
            raise BenchError(f"{where}: server.{name}: {reason}; known are {', '.join(known)}")
    try:
        values: dict[str, Any] = dict(settings)
        Settings(model=some_file, **values).engine()
    except ValidationError as error:
        raise BenchError(f"{where}: server.{explain(error)}") from error
    except ValueError as error:
        raise BenchError(f"{where}: server: {error}") from error


def read_setting(text: str) -> tuple[str, Setting]:
    """``name=value`` of a command line, the value as TOML where it is that, else as text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text}: want NAME=VALUE")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    if not isinstance(parsed, bool | int | float | str):
        raise ValueError(f"{text}: want a number, true, false, or a text")
    return name.replace("-", "_"), parsed


def check_distinct(variants: Sequence[Variant]) -> None:
    """Raises BenchError where two variants share a name, or two recipes (or a recipe and a level) a file."""
    for number, variant in enumerate(variants):
        for other in variants[:number]:
            if variant.name.lower() == other.name.lower():
                raise BenchError(f"two variants are named {variant.name}: give one another name")
            if variant.level.lower() == other.level.lower() and variant.recipe != other.recipe:
                raise BenchError(
                    f"{variant.name} and {other.name}: the weights of both would be called {variant.level}; "
                    "rename a recipe file"
                )


def explain(error: ValidationError) -> str:
    """The first problem: the key and what would be right."""
    first: Any = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    known = ", ".join(Variant.model_fields)
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"unknown key; known are {known}"
    return f"{where}: {message}" if where else message
