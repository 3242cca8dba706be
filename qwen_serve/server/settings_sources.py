"""Where settings come from, by precedence: flags, environment, a TOML file, a variant, defaults."""

import argparse
import os
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource

from qwen_serve.server.about import CACHE_VARIABLE, WHEELS_VARIABLE, llama_version, own_version
from qwen_serve.server.names import nearest
from qwen_serve.server.other_names import FLAGS
from qwen_serve.server.settings import DEPLOYED, ENV_PREFIX, Settings, Sources, described_settings
from qwen_serve.server.variant import (
    Setting,
    Variant,
    VariantError,
    find_variant,
    known_variants,
    read_variant,
)

GONE = {
    "draft_always": "what is drafted is always what pays",
    "max_connections_per_address": "a proxy in front bounds them, as deploy/nginx.conf does with limit_conn",
    "mtp_window": "draft_window says how far any drafter looks back",
    "prefill_budget": "prefill_seconds says how long a step may read prompts",
    "prefix_shrinks": "the prefix cache is always as large as it is of use",
    "sampling": "sampling_defaults says how tokens are chosen; where, the engine decides",
    "tokenizer_cache": "the ids of long texts are always kept, up to a million tokens",
}
"""Removed setting -> its replacement."""


class SettingsError(Exception):
    """A setting that cannot be used: the message names it, where it came from and what is allowed."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(field: FieldInfo) -> str:
    choices = [arg for arg in get_args(field.annotation) if isinstance(arg, str)]
    if choices:
        return "{" + ",".join(choices) + "}"
    kinds = [field.annotation, *get_args(field.annotation)]
    return next((name for kind, name in ((int, "N"), (float, "S"), (Path, "PATH")) if kind in kinds), "TEXT")


DESCRIPTION = """\
Serve one Qwen3.5 GGUF over HTTP: /v1/chat/completions, /v1/messages, /v1/responses,
/v1/completions, /api/chat, /invocations.

  python -m qwen_serve.server --model model.gguf
  python -m qwen_serve.server --model model.gguf --parallel 32 --ctx-size 131072 --port 8000
  python -m qwen_serve.server --model model.gguf --host 0.0.0.0 --api-key-file keys.txt
  python -m qwen_serve.server --model model.gguf --variant fast --print-settings"""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps hyphenated names, such as those of patches, on one line."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _width() -> int:
    """Columns of the help: the terminal's, at most 110; 98 if it is unknown."""
    return min(110, shutil.get_terminal_size((100, 0)).columns - 2)


def parser() -> argparse.ArgumentParser:
    """The command line: one flag a field, in groups. Values stay strings; `Settings` validates them."""
    result = argparse.ArgumentParser(
        prog="python -m qwen_serve.server",
        usage="%(prog)s --model PATH [--variant NAME] [--SETTING VALUE ...]",
        description=DESCRIPTION,
        epilog=f"Each flag is also an environment variable ({ENV_PREFIX}CTX_SIZE for --ctx-size) and a "
        "key\nof --config (ctx_size = 8192). A flag takes precedence over the environment, the "
        "environment\nover the file, and the file over the variant.",
        formatter_class=lambda prog: _HelpFormatter(prog, max_help_position=32, width=_width()),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    result.add_argument(
        "--variant",
        metavar="NAME",
        help=f"use the settings of a variant: {', '.join(known_variants())}, or a TOML file (also "
        f"{ENV_PREFIX}VARIANT)",
    )
    result.add_argument("--config", metavar="PATH", help=f"TOML file of settings (also {ENV_PREFIX}CONFIG)")
    result.add_argument(
        "--print-settings", action="store_true", help="print the settings in effect as TOML, and exit"
    )
    result.add_argument(
        "--version",
        action="version",
        version=f"qwen-serve {own_version()}, llama-cpp-python {llama_version()}",
    )
    for title, about, settings in described_settings():
        group = result.add_argument_group(title, about)
        for name, default, said in settings:
            field, text = Settings.model_fields[name], f"{said} [{default}]" if default else said
            text = text.replace("%", "%%")
            if field.annotation is bool:
                group.add_argument(_flag(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
            else:
                many: dict[str, Any] = {"action": "append"} if name == "lora" else {}
                group.add_argument(_flag(name), dest=name, metavar=_metavar(field), help=text, **many)
    return result


def settings_help() -> str:
    """The part of the help after usage and examples: options, by group, and precedence."""
    text = parser().format_help()
    return text[text.index("options:\n") + len("options:\n") :]


def load_settings(arguments: Sequence[str]) -> tuple[Settings, Sources, argparse.Namespace]:
    """Settings from the command line, `os.environ`, the TOML file and the variant; their sources; the parsed
    flags.

    Raises SettingsError for a value that is not allowed, an unknown flag, an unknown key in a file, or an
    unreadable file; SystemExit for `--help`, `--version` and flags without their value (argparse's own).
    """
    flags, unknown = parser().parse_known_args(arguments)
    if unknown:
        # words that are no flags are values of mistyped ones
        words = [word for word in unknown if re.match("-+[a-z]", word)] or unknown
        raise SettingsError("\n".join(map(_unknown_flag, words)))
    for gone, instead in GONE.items():
        if (variable := f"{ENV_PREFIX}{gone.upper()}") in os.environ:
            raise SettingsError(f"{variable} is gone: {instead}")
    given = {name: value for name, value in vars(flags).items() if name in Settings.model_fields}
    if "lora" in given:
        given["lora"] = ",".join(given["lora"])
    config = getattr(flags, "config", None) or os.environ.get(f"{ENV_PREFIX}CONFIG")
    layers: list[tuple[str, Mapping[str, Any]]] = [
        ("environment", EnvSettingsSource(Settings)()),
        ("flag", given),
    ]
    if config:
        layers.insert(0, (config, _read_toml(Path(config))))
    if name := getattr(flags, "variant", None) or named_variant():
        variant = load_variant(name)
        layers.insert(0, (f"variant {variant.name}", variant.settings))
    values: dict[str, Any] = {}
    sources = dict.fromkeys(Settings.model_fields, "default")
    for source, layer in layers:
        for name, value in layer.items():
            values[name] = value
            sources[name] = source
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(dict(item), sources) for item in error.errors())) from error
    return settings, sources, flags


def load_variant(given: str) -> Variant:
    """The variant of that name or file, with all settings checked. Paths relative to its file become
    absolute. Raises SettingsError."""
    try:
        path = find_variant(given)
        variant = read_variant(path)
    except VariantError as error:
        raise SettingsError(f"--variant: {error}") from error
    values: dict[str, Setting] = {}
    for name, value in variant.settings.items():
        field = Settings.model_fields.get(name)
        is_path = field is not None and Path in (field.annotation, *get_args(field.annotation))
        values[name] = str(path.parent / str(value)) if is_path else value
    check_variant_settings(values, str(path))
    return variant.model_copy(update={"settings": values})


def check_variant_settings(values: Mapping[str, Setting], source: str) -> None:
    """Raises SettingsError, naming `source`, for settings that a variant cannot have."""
    for name in values:
        if name in DEPLOYED:
            raise SettingsError(f"{source}: {name} is said where a model is served, not by a variant")
    try:
        Settings(model=Path(__file__), **dict[str, Any](values))  # any existing file replaces the model
    except ValidationError as error:
        problems = [_explain(dict(problem), dict.fromkeys(values, source)) for problem in error.errors()]
        # an error about several settings together does not name their source
        problems = [said if source in said else f"{source}: {said}" for said in problems]
        raise SettingsError("\n".join(problems)) from error


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise SettingsError(f"--config: {path} is not a file")
    try:
        return TomlConfigSettingsSource(Settings, toml_file=path)()
    except ValueError as error:
        raise SettingsError(f"--config: {path} is not TOML: {error}") from error


def _explain(error: dict[str, Any], sources: Sources) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:  # an error about several settings names them itself
        return message
    name = str(error["loc"][0])
    if error["type"] == "missing":
        return (
            f"{_flag(name)} is required (or {ENV_PREFIX}{name.upper()}), or a name: `qwen-serve serve nano` "
            "(the tiny bundled model), `qwen-serve serve hf:owner/name:Q4_K_M` (a GGUF of the hub), "
            "`qwen-serve serve model.gguf` (a file)"
        )
    if error["type"] == "extra_forbidden":
        known = f"known are {', '.join(Settings.model_fields)}"
        return f"{sources.get(name, 'settings')}: unknown key {name!r}; {did_you_mean(name, known=known)}"
    given = (
        ""
        if error["type"] == "value_error" and str(error["input"]) in message
        else f", not {error['input']!r}"
    )
    return f"{_flag(name)} (from {sources[name]}): {message}{given}"


def _unknown_flag(word: str) -> str:
    if (elsewhere := word.partition("=")[0]) in FLAGS:
        return f"{elsewhere} is not a setting here: {FLAGS[elsewhere]}"
    if not word.startswith("--"):
        hint = f"did you mean --model {word}?" if Path(word).exists() else "--help lists what there is"
        return f"{word}: settings are flags; {hint}"
    flag = word.partition("=")[0]
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    if name in GONE:
        return f"{flag} is gone: {GONE[name]}"
    near = nearest(name, [*Settings.model_fields, "variant", "config", "print_settings", "version", "help"])
    return f"{flag} is not a setting; " + (f"did you mean {_flag(near)}?" if near else "--help lists them")


def did_you_mean(name: str, *, known: str) -> str:
    """The setting closest to `name`; `known` if none is close."""
    if name in GONE:
        return f"it is gone: {GONE[name]}"
    near = nearest(name, Settings.model_fields)
    return f"did you mean {near!r}?" if near else known


OTHER_VARIABLES = (CACHE_VARIABLE, WHEELS_VARIABLE, "QWEN_BENCH_API_KEY")
"""Variables that `setup` and qwen-bench read, not the server."""


def unknown_variables() -> list[str]:
    """Warnings about environment variables that look like settings but are not.

    They are not errors, since other programs may use such names.
    """
    others = (variable.removeprefix(ENV_PREFIX).lower() for variable in OTHER_VARIABLES)
    known = {*Settings.model_fields, "variant", "config", *others}
    names = [key.removeprefix(ENV_PREFIX) for key in sorted(os.environ) if key.startswith(ENV_PREFIX)]
    found = []
    for name in names:
        if name.lower() not in known:
            near = nearest(name, sorted(known))
            hint = f"did you mean {ENV_PREFIX}{near.upper()}?" if near else "it has no effect"
            found.append(f"{ENV_PREFIX}{name} is not a setting; {hint}")
    return found


def named_variant() -> str | None:
    """The variant named by the environment, or None."""
    return os.environ.get(f"{ENV_PREFIX}VARIANT") or None
