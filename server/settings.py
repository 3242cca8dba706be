"""The server's one settings object: flags over environment over a TOML file over a variant over defaults."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from qwen_serve.server.about import CACHE_VARIABLE, llama_version, own_version
from qwen_serve.server.engine.settings import EngineSettings, ModelSettings, Section, UserSettings
from qwen_serve.server.keys import ApiKey, read_keys
from qwen_serve.server.names import nearest
from qwen_serve.server.variant import (
    Setting,
    Variant,
    VariantError,
    find_variant,
    known_variants,
    read_variant,
)
from qwen_serve.server.weights import HUB_ID

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

ENV_PREFIX = "QWEN_"

GONE = {
    "draft_always": "what is drafted is always what pays",
    "max_connections_per_address": "a proxy in front bounds them, as deploy/nginx.conf does with limit_conn",
    "mtp_window": "draft_window says how far any drafter looks back",
    "prefill_budget": "prefill_seconds says how long a step may read prompts",
    "prefix_shrinks": "the prefix cache is always as large as it is of use",
    "sampling": "sampling_defaults says how tokens are chosen; where, the engine decides",
    "tokenizer_cache": "the ids of long texts are always kept, up to a million tokens",
}
"""Settings that there were -> what is there instead."""


class SettingsError(Exception):
    """A setting that cannot be used: the message names it, where it came from and what is allowed."""


class HttpSettings(Section, title="http"):
    """The HTTP API."""

    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = Field(8080, ge=0, le=65535)
    """port to listen on; 0 takes a free one"""
    alias: str | None = None
    """model id in /v1/models (default: the file's name)"""
    api_key: SecretStr | None = Field(None, min_length=1)
    """clients must send it as a bearer token or as X-Api-Key (QWEN_API_KEY keeps it out of `ps`)"""
    api_key_file: Path | None = None
    """file of further keys, one a line, each followed by its class= (priority, default, flex) and its share=
    (a number) where they are not default and 1: what they get by --scheduling-policy; # begins a comment"""
    allowed_origins: str | None = None
    """origins whose pages may call from a browser (CORS), with commas between them; * allows any"""
    ssl_certfile: Path | None = None
    """TLS certificate, PEM: serve https"""
    ssl_keyfile: Path | None = None
    """its private key, PEM"""
    uds: Path | None = None
    """Unix socket to listen on, instead of host and port"""
    prefix_by_key: bool = True
    """requests with different API keys share no prefixes, so that none can tell what another has asked; off:
    they share all but what `cache_salt` parts"""
    max_body_mib: int = Field(8, ge=1, le=1024)
    """largest request body, in MiB; the work on one takes up to 20 times its size"""
    max_bodies_mib: int = Field(64, ge=1)
    """memory for the bodies of all requests that are being received or read, in MiB; one more gets 429"""
    max_header_kib: int = Field(64, ge=1, le=1024)
    """most bytes of a request's line and headers, in KiB"""
    header_timeout: float = Field(10.0, gt=0, allow_inf_nan=False)
    """seconds that a client has to send them; a new connection may be idle for as long"""
    body_timeout: float = Field(60.0, gt=0, allow_inf_nan=False)
    """seconds that it has to send a body"""
    max_connections: int = Field(1024, ge=1)
    """connections open at once, as far as the process may open files; a new one takes the place of the
    one that is idle for longest, else of one whose request is not all there, else it gets 503 unless it asks
    for /ping or /health"""
    allowed_hosts: str = ""
    """names, with commas between, under which a server that listens on loopback may be asked without
    an API key, besides localhost and addresses; * for any"""
    open_metrics: bool = True
    """answer /metrics without the API key; else only /ping and /health are"""
    drain_timeout: float = Field(30.0, ge=0, allow_inf_nan=False)
    """seconds that running requests get to finish after SIGTERM"""
    watchdog: float = Field(120.0, ge=0, allow_inf_nan=False)
    """seconds for which the event loop may stand still before the process writes where it stood and ends with
    1, for its supervisor to start another; 0: for ever"""
    page: bool = True
    """serve the chat page at /"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """least level logged"""


class ChatSettings(Section, title="chat"):
    """From messages to a prompt, and from tokens to a message."""

    chat_template: Path | None = None
    """Jinja chat template to use in place of the one inside the GGUF"""
    thinking: bool = False
    """think where a request does not say"""
    thinking_budget: int | None = Field(None, ge=0)
    """most tokens of reasoning where a request does not say (default: as many as the model likes)"""
    loop_guard: bool = True
    """end reasoning that repeats the same few tokens over and over, and have the model answer"""
    inline_reasoning: bool = False
    """leave reasoning in `content` as <think>...</think> instead of `reasoning_content`"""
    sampling_defaults: Literal["file", "card", "card-coding"] = "file"
    """temperature, top-p, top-k and penalties where a request gives none: those of the GGUF, or in chats
    those of Qwen3.5's model card, which has others with thinking, without it and for coding"""
    greedy: bool = False
    """temperature 0 where a request gives none; the GGUF's advice is passed over"""


class Settings(HttpSettings, ChatSettings, UserSettings, BaseSettings):
    """Everything that `python -m qwen_serve.server` can be told."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The constructor's arguments alone: `load_settings` layers the sources, to know each value's."""
        return (init_settings,)

    @field_validator("model")
    @classmethod
    def _find_model(cls, path: Path) -> Path:
        return find_model(path)

    @field_validator("chat_template", "ssl_certfile", "ssl_keyfile", "api_key_file")
    @classmethod
    def _find_file(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None and not path.is_file():
            raise ValueError(f"{path} is not a file")
        if path is not None and info.field_name == "api_key_file" and not read_keys(path):
            raise ValueError(f"{path} has no key in it")
        return path

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, value: str | None) -> str | None:
        for origin in _split(value):
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(
                    f"{origin} is not an origin such as https://example.com or http://localhost:3000"
                )
        return value

    @model_validator(mode="after")
    def _whole_tls(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile: give both, or neither")
        return self

    @property
    def model_id(self) -> str:
        """The name under which the model is listed and, where a request names none, answered."""
        return self.alias or self.model.stem

    def api_keys(self) -> list[ApiKey]:
        """The keys that clients may send; with none, none is asked for."""
        own = [] if self.api_key is None else [ApiKey(self.api_key.get_secret_value())]
        return own + ([] if self.api_key_file is None else read_keys(self.api_key_file))

    def origins(self) -> list[str]:
        """The origins that browsers may call from."""
        return _split(self.allowed_origins)

    def engine(self, **forced: Any) -> EngineSettings:
        """The part that the engine reads, with values of `ForcedSettings`."""
        return EngineSettings(**{name: getattr(self, name) for name in UserSettings.model_fields}, **forced)


_ENGINE = [section for section in UserSettings.__bases__ if section is not ModelSettings]
SECTIONS = (ModelSettings, HttpSettings, ChatSettings, *_ENGINE)
"""The groups of `--help` and of `--print-settings`, in their order."""

DEPLOYED = {"model", *HttpSettings.model_fields}
"""What is said where a model is served, never by a variant."""


def _by_section() -> list[tuple[type[Section], dict[str, FieldInfo]]]:
    """The settings that each section declares."""
    return [
        (section, {name: Settings.model_fields[name] for name in inspect.get_annotations(section)})
        for section in SECTIONS
    ]


def _split(value: str | None) -> list[str]:
    return [item.strip() for item in (value or "").split(",") if item.strip()]


def find_model(path: Path) -> Path:
    """The GGUF that `path` is or, for a folder, holds; importance matrices and vision towers do not count.

    Raises ValueError where there is none, or more than one to choose from.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        if HUB_ID.fullmatch(str(path)):
            raise ValueError(f"{path} does not exist; {_conversion(str(path), path.name)}")
        raise ValueError(f"{path} does not exist")
    models = sorted(
        file
        for file in path.glob("*.gguf")
        if not file.name.startswith("mmproj-") and not file.name.endswith(".imatrix.gguf")
    )
    if not models and (path / "config.json").is_file():
        raise ValueError(f"{path} is a checkpoint, not a GGUF; {_conversion(str(path), path.resolve().name)}")
    if not models:
        raise ValueError(f"no *.gguf in the folder {path}: put one there (into an image's, mount it)")
    if len(models) > 1:
        names = ", ".join(file.name for file in models)
        raise ValueError(f"several models in the folder {path}; name one of {names}")
    return models[0]


def _conversion(source: str, name: str) -> str:
    """How to make a GGUF of a checkpoint, which the hub or a folder has."""
    return (
        "a checkpoint of the Hugging Face hub, or in a folder, is converted once: "
        f"`qwen-convert --src {source} --quant Q4_K_M`, then --model models/{name}-Q4_K_M.gguf"
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(field: FieldInfo) -> str:
    choices = [arg for arg in get_args(field.annotation) if isinstance(arg, str)]
    if choices:
        return "{" + ",".join(choices) + "}"
    kinds = [field.annotation, *get_args(field.annotation)]
    return next((name for kind, name in ((int, "N"), (float, "S"), (Path, "PATH")) if kind in kinds), "TEXT")


def described_settings() -> list[tuple[str, str, list[tuple[str, str, str]]]]:
    """Groups of settings as title, what they are about, and each one's name, default and text."""
    return [
        (
            section.model_config["title"] or "",
            inspect.getdoc(section) or "",
            [
                (
                    name,
                    "" if field.is_required() or field.default is None else _toml(field.default),
                    " ".join((field.description or "").split()),
                )
                for name, field in fields.items()
            ],
        )
        for section, fields in _by_section()
    ]


class _HelpFormatter(argparse.HelpFormatter):
    """Names with hyphens, such as those of patches, stay whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def parser() -> argparse.ArgumentParser:
    """The command line: one flag a field, in groups. Values stay strings; `Settings` validates them."""
    result = argparse.ArgumentParser(
        prog="python -m qwen_serve.server",
        usage="%(prog)s --model PATH [--variant NAME] [--config PATH] [--print-settings] "
        "[--SETTING VALUE ...]",
        description="Serve one Qwen3.5 GGUF over HTTP: /v1/chat/completions, /v1/messages, /v1/responses, "
        "/v1/completions, /invocations.",
        epilog=f"Each flag is also an environment variable ({ENV_PREFIX}CTX_SIZE for --ctx-size) and a "
        "key of --config (ctx_size = 8192). A flag wins over the environment, the environment over the file, "
        "the file over the variant.",
        formatter_class=lambda prog: _HelpFormatter(prog, max_help_position=32, width=110),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    result.add_argument(
        "--variant",
        metavar="NAME",
        help=f"take the settings of a variant: {', '.join(known_variants())}, or a TOML file (or "
        f"{ENV_PREFIX}VARIANT)",
    )
    result.add_argument("--config", metavar="PATH", help=f"TOML file of settings (or {ENV_PREFIX}CONFIG)")
    result.add_argument(
        "--print-settings", action="store_true", help="print the settings in effect, as TOML, and leave"
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
                group.add_argument(_flag(name), dest=name, metavar=_metavar(field), help=text)
    return result


Sources = Mapping[str, str]
"""Field name -> where its value is from: "flag", "environment", the TOML file's path, "variant NAME", or
"default"."""


def load_settings(arguments: Sequence[str]) -> tuple[Settings, Sources, argparse.Namespace]:
    """Settings from the command line, `os.environ`, the TOML file and the variant; their sources; the parsed
    flags.

    Raises SettingsError for a value that is not allowed, an unknown flag, an unknown key in a file, or an
    unreadable file; SystemExit for `--help`, `--version` and flags without their value (argparse's own).
    """
    flags, unknown = parser().parse_known_args(arguments)
    if unknown:
        # what stands beside a mistyped flag is its value
        words = [word for word in unknown if word.startswith("--")] or unknown
        raise SettingsError("\n".join(map(_unknown_flag, words)))
    for gone, instead in GONE.items():
        if (variable := f"{ENV_PREFIX}{gone.upper()}") in os.environ:
            raise SettingsError(f"{variable} is gone: {instead}")
    given = {name: value for name, value in vars(flags).items() if name in Settings.model_fields}
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


def named_variant() -> str | None:
    """The variant that the environment names; None where it names none."""
    return os.environ.get(f"{ENV_PREFIX}VARIANT") or None


def load_variant(given: str) -> Variant:
    """The variant of that name, or in that file, once all that it says can be used; its paths, which are
    relative to its file, made whole. Raises SettingsError."""
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
    """Raises SettingsError, naming `source`, for settings that a variant can not have."""
    for name in values:
        if name in DEPLOYED:
            raise SettingsError(f"{source}: {name} is said where a model is served, not by a variant")
    try:
        Settings(model=Path(__file__), **dict[str, Any](values))  # any file stands for the model
    except ValidationError as error:
        problems = [_explain(dict(problem), dict.fromkeys(values, source)) for problem in error.errors()]
        # what is wrong with several settings together does not say where they are from
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
    if not error["loc"]:  # of several settings, which it names
        return message
    name = str(error["loc"][0])
    if error["type"] == "missing":
        return f"{_flag(name)} is required (or {ENV_PREFIX}{name.upper()}): a GGUF file, or a folder with one"
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
    """The setting that `name` may have been meant for; `known` where there is none like it."""
    if name in GONE:
        return f"it is gone: {GONE[name]}"
    near = nearest(name, Settings.model_fields)
    return f"did you mean {near!r}?" if near else known


def unknown_variables() -> list[str]:
    """What to say of variables of the environment that look like settings and are none.

    They are no error: other programs may have variables of that name.
    """
    known = {*Settings.model_fields, "variant", "config", CACHE_VARIABLE.removeprefix(ENV_PREFIX).lower()}
    names = [key.removeprefix(ENV_PREFIX) for key in sorted(os.environ) if key.startswith(ENV_PREFIX)]
    found = []
    for name in names:
        if name.lower() not in known:
            near = nearest(name, sorted(known))
            hint = f"did you mean {ENV_PREFIX}{near.upper()}?" if near else "it has no effect"
            found.append(f"{ENV_PREFIX}{name} is not a setting; {hint}")
    return found


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def describe(settings: Settings, sources: Sources) -> str:
    """The settings in effect as TOML that --config takes back, with the source of each that was set."""
    lines: list[str] = []
    for section, fields in _by_section():
        lines.append(f"# {section.model_config['title']}")
        for name in fields:
            value = getattr(settings, name)
            if value is None or isinstance(value, SecretStr):
                line = f"# {name} is {'not ' if value is None else ''}set"
            else:
                line = f"{name} = {_toml(value)}"
            lines.append(line if sources[name] == "default" else f"{line:<40}  # from {sources[name]}")
    return "\n".join(lines)


def describe_chosen(settings: Settings, sources: Sources) -> str:
    """On one line, what was set and where; "" where everything is at its default."""
    chosen = []
    for name, source in sources.items():
        if source != "default":
            value = getattr(settings, name)
            chosen.append(
                f"{name} = {'(secret)' if isinstance(value, SecretStr) else _toml(value)} ({source})"
            )
    return ", ".join(chosen)
