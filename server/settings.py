"""The server's one settings object: flags over environment over a TOML file over defaults."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from server.engine.settings import CacheType, EngineSettings, FlashAttention, Sampling, Speculation

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

ENV_PREFIX = "QWEN_"


class SettingsError(Exception):
    """A setting that cannot be used: the message names it, where it came from and what is allowed."""


def _setting(default: Any, group: str, description: str, **constraints: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"group": group}, **constraints)


class Settings(BaseSettings):
    """Everything that `python -m server` can be told. Field order is the order of `--help`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    model: Path = _setting(..., "model", "GGUF file, or a folder that holds exactly one")
    alias: str | None = _setting(None, "model", "model id in /v1/models (default: the file's name)")
    chat_template: Path | None = _setting(
        None, "model", "Jinja chat template to use in place of the one inside the GGUF"
    )

    host: str = _setting("127.0.0.1", "http", "address to listen on")
    port: int = _setting(8080, "http", "port to listen on; 0 takes a free one", ge=0, le=65535)
    api_key: SecretStr | None = _setting(
        None, "http", f"clients must send it as a bearer token ({ENV_PREFIX}API_KEY keeps it out of `ps`)"
    )
    max_body_mib: int = _setting(32, "http", "largest request body, in MiB", ge=1, le=1024)
    drain_timeout: float = _setting(
        30.0, "http", "seconds that running requests get to finish after SIGTERM", ge=0, allow_inf_nan=False
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "http", "least level logged")

    thinking: bool = _setting(False, "chat", "think where a request does not say")
    inline_reasoning: bool = _setting(
        False, "chat", "leave reasoning in `content` as <think>...</think> instead of `reasoning_content`"
    )
    greedy: bool = _setting(
        False, "chat", "temperature 0 where a request gives none; the GGUF's advice is passed over"
    )

    ctx_size: int = _setting(
        EngineSettings.ctx_size,
        "engine",
        "KV cache in tokens for all sequences together; 0 is 16384 each, 262144 at most, or what fits",
    )
    parallel: int = _setting(EngineSettings.parallel, "engine", "sequences decoded at the same time")
    max_queue: int = _setting(
        EngineSettings.max_queue, "engine", "sequences that may wait; one more gets 429"
    )
    n_gpu_layers: int = _setting(EngineSettings.n_gpu_layers, "engine", "layers on the GPU; -1 is all")
    main_gpu: int = _setting(EngineSettings.main_gpu, "engine", "index of the GPU to use")
    flash_attn: FlashAttention = _setting(EngineSettings.flash_attn, "engine", "flash attention")
    cache_type_k: CacheType = _setting(EngineSettings.cache_type_k, "engine", "type of the cached keys")
    cache_type_v: CacheType = _setting(EngineSettings.cache_type_v, "engine", "type of the cached values")
    batch_size: int = _setting(
        EngineSettings.batch_size,
        "engine",
        "most tokens in one step; 0 is 4 passes (ubatch_size) on a GPU, 2048 without",
    )
    ubatch_size: int = _setting(
        EngineSettings.ubatch_size,
        "engine",
        "most tokens in one pass over the weights; 0 is 2048 on a GPU if that fits, else 512",
    )
    prefill_budget: int = _setting(
        EngineSettings.prefill_budget,
        "engine",
        "most prompt tokens in a step that also decodes; 0 is what a GPU reads in 0.75 s, 128 without",
    )
    mixed_steps: bool = _setting(
        EngineSettings.mixed_steps, "engine", "decodes and prompt tokens share a call, rather than take turns"
    )
    sampling: Sampling = _setting(
        EngineSettings.sampling,
        "engine",
        "find the best tokens in the graph or on the host; auto measures both at start",
    )
    speculation: Speculation = _setting(
        EngineSettings.speculation,
        "engine",
        "guess ahead: from the text, by the MTP head, or both by what pays; auto: both on a GPU, else ngram",
    )
    draft_max: int = _setting(EngineSettings.draft_max, "engine", "most tokens guessed from the text")
    mtp_depth: int = _setting(EngineSettings.mtp_depth, "engine", "most tokens guessed by the MTP head")
    mtp_snapshots: int = _setting(
        EngineSettings.mtp_snapshots,
        "engine",
        "tokens of wrong drafts that a lone sequence takes back at once; multiplies the memory of states "
        "(-1: up to 2, if the MTP head drafts for at most 8)",
    )
    mtp_window: int = _setting(
        EngineSettings.mtp_window, "engine", "most tokens that the MTP head reads before its first guess"
    )
    draft_pool: int = _setting(
        EngineSettings.draft_pool,
        "engine",
        "tokens of finished requests to guess from, too; how fast an answer is may then tell of others'",
    )
    draft_always: bool = _setting(
        EngineSettings.draft_always, "engine", "guess as far as possible, rather than by what pays"
    )
    tokenizer_cache: int = _setting(
        EngineSettings.tokenizer_cache, "engine", "tokens of long texts whose ids are remembered (0: none)"
    )
    prefix_cache: bool = _setting(
        EngineSettings.prefix_cache, "engine", "go on from what earlier prompts and answers left computed"
    )
    prefix_checkpoints: int = _setting(
        EngineSettings.prefix_checkpoints,
        "engine",
        "states that the prefix cache holds, a sequence id and a recurrent state each; 0 is 32, or what fits",
    )
    prefix_cells: int = _setting(
        EngineSettings.prefix_cells,
        "engine",
        "KV cells that it holds beyond those in use; 0 is a tenth of the weights' bytes, but 9216 at least",
    )
    prefix_shrinks: bool = _setting(
        EngineSettings.prefix_shrinks,
        "engine",
        "hold fewer beside more than 8 running sequences, and where prompts do not come again",
    )
    prefix_interval: int = _setting(
        EngineSettings.prefix_interval,
        "engine",
        "tokens between the states kept along a long prompt; 0 keeps none on the way",
    )
    prefix_host_mib: int = _setting(
        EngineSettings.prefix_host_mib, "engine", "host memory for states that left the device, in MiB"
    )
    threads: int = _setting(
        EngineSettings.threads, "engine", "CPU threads for one token; 0: one less than the physical cores"
    )
    threads_batch: int = _setting(
        EngineSettings.threads_batch, "engine", "CPU threads for more; 0 is as `threads`"
    )
    use_mmap: bool = _setting(EngineSettings.use_mmap, "engine", "map the file instead of reading it")
    mlock: bool = _setting(
        EngineSettings.mlock, "engine", "keep the weights on the host from being paged out"
    )

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

    @field_validator("chat_template")
    @classmethod
    def _find_template(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_file():
            raise ValueError(f"{path} is not a file")
        return path

    @property
    def model_id(self) -> str:
        """The name under which the model is listed and, where a request names none, answered."""
        return self.alias or self.model.stem

    def engine(self) -> EngineSettings:
        """The part that the engine reads. Raises ValueError where two settings do not go together."""
        return EngineSettings(**{name: getattr(self, name) for name in EngineSettings.__dataclass_fields__})


def find_model(path: Path) -> Path:
    """The GGUF that `path` is or, for a folder, holds; importance matrices do not count.

    Raises ValueError where there is none, or more than one to choose from.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"{path} does not exist")
    models = sorted(file for file in path.glob("*.gguf") if not file.name.endswith(".imatrix.gguf"))
    if not models:
        raise ValueError(f"no *.gguf in the folder {path}")
    if len(models) > 1:
        names = ", ".join(file.name for file in models)
        raise ValueError(f"several models in the folder {path}; name one of {names}")
    return models[0]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _group(field: FieldInfo) -> str:
    assert isinstance(field.json_schema_extra, dict)
    return str(field.json_schema_extra["group"])


def _metavar(field: FieldInfo) -> str:
    choices = [arg for arg in get_args(field.annotation) if isinstance(arg, str)]
    if choices:
        return "{" + ",".join(choices) + "}"
    kinds = [field.annotation, *get_args(field.annotation)]
    return next((name for kind, name in ((int, "N"), (float, "S"), (Path, "PATH")) if kind in kinds), "TEXT")


def parser() -> argparse.ArgumentParser:
    """The command line: one flag a field, in groups. Values stay strings; `Settings` validates them."""
    result = argparse.ArgumentParser(
        prog="python -m server",
        description="Serve one Qwen3.5 GGUF over HTTP: /v1/chat/completions, /v1/completions, /invocations.",
        epilog=f"Each flag is also an environment variable ({ENV_PREFIX}CTX_SIZE for --ctx-size) and a "
        "key of --config (ctx_size = 8192). A flag wins over the environment, the environment over the file.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    result.add_argument("--config", metavar="PATH", help=f"TOML file of settings (or {ENV_PREFIX}CONFIG)")
    result.add_argument(
        "--print-settings", action="store_true", help="print the settings in effect, as TOML, and leave"
    )
    for group, fields in groupby(Settings.model_fields.items(), key=lambda item: _group(item[1])):
        section = result.add_argument_group(group)
        for name, field in fields:
            text = field.description or ""
            if not field.is_required() and field.default is not None:
                text += f" [{_toml(field.default)}]"
            if field.annotation is bool:
                section.add_argument(_flag(name), dest=name, action=argparse.BooleanOptionalAction, help=text)
            else:
                section.add_argument(_flag(name), dest=name, metavar=_metavar(field), help=text)
    return result


Sources = Mapping[str, str]
"""Field name -> where its value is from: "flag", "environment", the TOML file's path, or "default"."""


def load_settings(arguments: Sequence[str]) -> tuple[Settings, Sources, argparse.Namespace]:
    """Settings from the command line, `os.environ` and the TOML file; their sources; the parsed flags.

    Raises SettingsError for a value that is not allowed, an unknown key in the file, or an unreadable file;
    SystemExit for `--help` and unknown flags (argparse's own).
    """
    flags = parser().parse_args(arguments)
    given = {name: value for name, value in vars(flags).items() if name in Settings.model_fields}
    config = getattr(flags, "config", None) or os.environ.get(f"{ENV_PREFIX}CONFIG")
    layers: list[tuple[str, Mapping[str, Any]]] = [
        ("environment", EnvSettingsSource(Settings)()),
        ("flag", given),
    ]
    if config:
        layers.insert(0, (config, _read_toml(Path(config))))
    values: dict[str, Any] = {}
    sources = dict.fromkeys(Settings.model_fields, "default")
    for source, layer in layers:
        for name, value in layer.items():
            values[name] = value
            sources[name] = source
    try:
        settings = Settings(**values)
        settings.engine()
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(dict(item), sources) for item in error.errors())) from error
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return settings, sources, flags


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise SettingsError(f"--config: {path} is not a file")
    try:
        return TomlConfigSettingsSource(Settings, toml_file=path)()
    except ValueError as error:
        raise SettingsError(f"--config: {path} is not TOML: {error}") from error


def _explain(error: dict[str, Any], sources: Sources) -> str:
    name = str(error["loc"][0])
    if error["type"] == "missing":
        return f"{_flag(name)} is required (or {ENV_PREFIX}{name.upper()}): a GGUF file, or a folder with one"
    if error["type"] == "extra_forbidden":
        known = ", ".join(Settings.model_fields)
        return f"{sources.get(name, 'settings')}: unknown key {name!r}; known are {known}"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{_flag(name)} (from {sources[name]}): {message}, not {error['input']!r}"


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
    for group, fields in groupby(Settings.model_fields.items(), key=lambda item: _group(item[1])):
        lines.append(f"# {group}")
        for name, _ in fields:
            value = getattr(settings, name)
            if value is None or isinstance(value, SecretStr):
                line = f"# {name} is {'not ' if value is None else ''}set"
            else:
                line = f"{name} = {_toml(value)}"
            lines.append(line if sources[name] == "default" else f"{line:<40}  # from {sources[name]}")
    return "\n".join(lines)
