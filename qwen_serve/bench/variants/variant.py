"""Parses the variants of a sweep: quants, variants by name or file, settings of the command line."""

import tomllib
from collections.abc import Sequence

from qwen_serve.bench.errors import BenchError
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.recipes import known_recipes, load_recipe
from qwen_serve.convert.tensors import FLOAT_TYPES
from qwen_serve.server.settings_sources import SettingsError, load_variant
from qwen_serve.server.variant import Setting, Variant


def of_quants(names: Sequence[str]) -> list[Variant]:
    """Variants of these quants with the server's default settings. Raises BenchError for an unknown quant."""
    levels = [known_quant(name.strip(), "--quants") for name in names if name.strip()]
    return [Variant(name=level, quant=level) for level in dict.fromkeys(levels)]


def read_variant(given: str) -> Variant:
    """A variant by name or file. Raises BenchError, which names the file, the key and what would be right."""
    try:
        variant = load_variant(given)
    except SettingsError as error:
        raise BenchError(str(error)) from error
    if variant.quant is not None:
        return variant.model_copy(update={"quant": known_quant(variant.quant, given)})
    assert variant.recipe is not None
    try:
        load_recipe(variant.recipe)
    except ConvertError as error:
        raise BenchError(f"{given}: recipe: {error}") from error
    return variant


def known_quant(name: str, where: str) -> str:
    """The quant of that name, in upper or lower case. Raises BenchError, which lists the known quants, for an
    unknown one."""
    known = {level.upper(): level for level in (*FLOAT_TYPES, *known_recipes())}
    if name.upper() not in known:
        raise BenchError(f"{where}: unknown quant {name!r}; known are {', '.join(known.values())}")
    return known[name.upper()]


def read_setting(text: str) -> tuple[str, Setting]:
    """Parse ``name=value``. The value is TOML if it is valid as such, else text."""
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
    """Raises BenchError if two variants share a name, or if two recipes (or a recipe and a quant) share a
    file."""
    for number, variant in enumerate(variants):
        for other in variants[:number]:
            if variant.name.lower() == other.name.lower():
                raise BenchError(f"two variants are named {variant.name}: give one another name")
            if variant.level.lower() == other.level.lower() and variant.recipe != other.recipe:
                raise BenchError(
                    f"{variant.name} and {other.name}: the weights of both would be called {variant.level}; "
                    "rename a recipe file"
                )
