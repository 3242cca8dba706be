"""The server's one settings object; `settings_sources.py` says where its values come from."""

import inspect
import logging
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from qwen_serve.server.engine.settings import EngineSettings, ModelSettings, Section, UserSettings
from qwen_serve.server.hub_files import is_later_part, is_mmproj, tower_beside, tower_of
from qwen_serve.server.keys import ApiKey, read_keys
from qwen_serve.server.weights import HUB_ID

log = logging.getLogger(__name__)

ENV_PREFIX = "QWEN_"

Sources = Mapping[str, str]
"""Field name -> source of its value: "flag", "environment", the TOML file's path, "variant NAME" or
"default"."""


class HttpSettings(Section, title="http"):
    """The HTTP API."""

    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = Field(8080, ge=0, le=65535)
    """port to listen on; 0: any free port"""
    alias: str | None = None
    """model id in /v1/models (default: the file's name without its suffix)"""
    api_key: SecretStr | None = Field(None, min_length=1)
    """API key that clients must send, as a bearer token or in X-Api-Key. Set QWEN_API_KEY instead to keep it
    out of `ps` (default: none)"""
    api_key_file: Path | None = None
    """file of further API keys, one a line; # begins a comment. After a key may follow class= (priority,
    default or flex; default: default) and share= (a number; default: 1), both for --scheduling-policy"""
    allowed_origins: str | None = None
    """origins whose pages may call the server from a browser (CORS), separated by commas; *: any (default:
    none)"""
    ssl_certfile: Path | None = None
    """file of the TLS certificate (PEM), to serve https; needs ssl_keyfile"""
    ssl_keyfile: Path | None = None
    """file of the certificate's private key (PEM)"""
    uds: Path | None = None
    """Unix socket to listen on, instead of host and port"""
    prefix_by_key: bool = True
    """keep cached prefixes and encoded pictures separate for each API key, so that no client can find out
    what another one asked. off: all keys share them, except between different values of `cache_salt`"""
    max_body_mib: int = Field(8, ge=1, le=1024)
    """maximum size of a request body, in MiB; handling it takes up to 20 times its size in memory. Raise it
    for large pictures"""
    max_bodies_mib: int = Field(64, ge=1)
    """maximum size of all request bodies that are being received or parsed, in MiB; further requests get
    429"""
    max_header_kib: int = Field(64, ge=1, le=1024)
    """maximum size of the request line and headers, in KiB"""
    header_timeout: float = Field(10.0, gt=0, allow_inf_nan=False)
    """time in which a client must send the headers, in seconds; also the time that a new connection may be
    idle"""
    body_timeout: float = Field(60.0, gt=0, allow_inf_nan=False)
    """time in which a client must send a body, in seconds"""
    max_connections: int = Field(1024, ge=1)
    """maximum number of open connections, within the process's limit on open files. Beyond it a new
    connection replaces the one that is idle longest, else one whose request is incomplete. If there is none,
    it gets 503, except for /ping and /health"""
    allowed_hosts: str = ""
    """further host names, separated by commas, that requests may have in their Host header; *: any. Only a
    server on loopback without an API key checks them; it accepts localhost and addresses"""
    open_metrics: bool = True
    """answer /metrics without an API key, as /ping and /health are"""
    drain_timeout: float = Field(30.0, ge=0, allow_inf_nan=False)
    """time in which running requests may finish after SIGTERM, in seconds"""
    sleep_idle_seconds: float | None = Field(None, gt=0, allow_inf_nan=False)
    """unload the model after this many seconds without requests, to free its memory. The next request loads
    it again and waits as long as a start takes (default: never)"""
    watchdog: float = Field(120.0, ge=0, allow_inf_nan=False)
    """time for which the event loop may hang, in seconds. Then the process logs a stack trace and exits with
    1, so that its supervisor restarts it; 0: no limit"""
    image_urls: Literal["off", "https"] = "off"
    """whether to fetch pictures that requests name by URL. https: only https URLs, from hosts of
    image_url_hosts with public addresses. off: refuse URLs; requests must contain their pictures"""
    image_url_hosts: str = ""
    """hosts from which pictures may be fetched, separated by commas; *.example.com: all hosts below it, *:
    any"""
    slot_save_path: Path | None = None
    """folder for the prefix cache's files of POST /slots/0?action=save and action=restore (default: both are
    refused)"""
    page: bool = True
    """serve the chat page at /"""
    mcp_origins: str = ""
    """origins of MCP servers that the chat page may call through this server, such as http://127.0.0.1:3001,
    separated by commas. Whoever may use this server can then call them (default: none)"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest level of log messages"""


class ChatSettings(Section, title="chat"):
    """Prompts from messages, and messages from tokens."""

    chat_template: Path | None = None
    """Jinja chat template to use instead of the GGUF's"""
    thinking: bool = False
    """let the model think, unless a request says otherwise"""
    thinking_budget: int | None = Field(None, ge=0)
    """maximum tokens of reasoning, unless a request says otherwise (default: no limit)"""
    loop_guard: bool = True
    """end reasoning that repeats itself in a loop, and let the model answer"""
    inline_reasoning: bool = False
    """return reasoning in `content` as <think>...</think>, not in `reasoning_content`, for clients that know
    no other field"""
    sampling_defaults: Literal["file", "card", "card-coding"] = "file"
    """source of temperature, top-p, top-k and penalties that a request omits. file: the GGUF. card: in chats
    Qwen3.5's model card, whose values differ with and without thinking. card-coding: the card's values for
    coding"""
    greedy: bool = False
    """use temperature 0 unless a request has a temperature, whatever sampling_defaults says"""


class Settings(HttpSettings, ChatSettings, UserSettings, BaseSettings):
    """All settings of `python -m qwen_serve.server`."""

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
        """Use only the constructor's arguments, since `load_settings` merges the sources and records where
        each value is from."""
        return (init_settings,)

    @field_validator("model")
    @classmethod
    def _find_model(cls, path: Path) -> Path:
        return find_model(path)

    @field_validator("mmproj")
    @classmethod
    def _find_mmproj(cls, path: Path | None) -> Path | None:
        if path is not None and path != NO_MMPROJ and not path.is_file():
            raise ValueError(f"{path} is not a file; want an mmproj (GGUF), or {NO_MMPROJ} for none")
        return path

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

    @field_validator("mcp_origins")
    @classmethod
    def _check_mcp_origins(cls, value: str) -> str:
        for origin in _split(value):
            if not re.fullmatch(r"https?://[^/\s@*?#\\]+", origin):
                raise ValueError(
                    f"{origin} is not an origin such as http://127.0.0.1:3001 or https://example.com"
                )
        return value

    @model_validator(mode="after")
    def _adapters_have_names_of_their_own(self) -> Self:
        if self.model_id in self.adapters:
            raise ValueError(f"lora: an adapter is called {self.model_id!r}, as the model is (alias)")
        return self

    @model_validator(mode="after")
    def _whole_tls(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile: give both, or neither")
        return self

    @model_validator(mode="after")
    def _hosts_to_fetch_from(self) -> Self:
        if (self.image_urls == "https") != bool(self.image_hosts()):
            raise ValueError(
                "image_urls 'https' and image_url_hosts go together: name hosts to fetch from, or * for any"
            )
        if self.image_urls == "https" and find_spec("aiohttp") is None:
            raise ValueError("image_urls 'https' needs aiohttp: pip install 'qwen-serve[image-urls]'")
        return self

    @property
    def model_id(self) -> str:
        """The model's name in /v1/models, and in answers to requests that name no model."""
        return self.alias or self.model.stem

    def api_keys(self) -> list[ApiKey]:
        """The valid API keys; if empty, none is required."""
        own = [] if self.api_key is None else [ApiKey(self.api_key.get_secret_value())]
        return own + ([] if self.api_key_file is None else read_keys(self.api_key_file))

    def origins(self) -> list[str]:
        """The origins whose pages may call the server from a browser."""
        return _split(self.allowed_origins)

    def mcp_servers(self) -> list[str]:
        """The origins of MCP servers that the chat page may call."""
        return _split(self.mcp_origins)

    def image_hosts(self) -> list[str]:
        """Hosts, or patterns of hosts, from which pictures may be fetched."""
        return [host.lower() for host in _split(self.image_url_hosts)]

    def engine(self, **forced: Any) -> EngineSettings:
        """The engine's settings, with values of `ForcedSettings`."""
        values = {name: getattr(self, name) for name in UserSettings.model_fields}
        if self.mmproj == NO_MMPROJ:
            values["mmproj"] = None
        elif self.mmproj is None:
            values["mmproj"] = find_mmproj(self.model)
        return EngineSettings(**values, **forced)


NO_MMPROJ = Path("off")
"""Value of `mmproj` that disables vision, even if a tower is found."""

_ENGINE = [section for section in UserSettings.__bases__ if section is not ModelSettings]
SECTIONS = (ModelSettings, HttpSettings, ChatSettings, *_ENGINE)
"""Groups of settings in `--help` and `--print-settings`, in order."""

DEPLOYED = {"model", "lora", *HttpSettings.model_fields}
"""Settings of a deployment, which a variant cannot have."""


def _by_section() -> list[tuple[type[Section], dict[str, FieldInfo]]]:
    """Each section with its settings."""
    return [
        (section, {name: Settings.model_fields[name] for name in inspect.get_annotations(section)})
        for section in SECTIONS
    ]


def _split(value: str | None) -> list[str]:
    return [item.strip() for item in (value or "").split(",") if item.strip()]


def find_mmproj(model: Path) -> Path | None:
    """The vision tower beside `model`, from the hub or a conversion: mmproj-NAME-TYPE.gguf for a model
    NAME-*.gguf, or mmproj-TYPE.gguf where all models are one. None if there is none, if there are several
    (which is logged), or if llama.cpp was built without libmtmd."""
    found = [
        path
        for path in sorted(model.parent.glob("mmproj-*-*.gguf"))
        if model.stem.startswith(path.stem.removeprefix("mmproj-").rpartition("-")[0] + "-")
    ]
    if tower := tower_beside(model):
        found = [tower]
    elif not found:  # publishers name it by its type alone, beside all files of one model
        unnamed = [path.name for path in model.parent.glob("mmproj-*.gguf") if path.stem.count("-") == 1]
        models = {_bare(path.stem) for path in model.parent.glob("*.gguf") if not is_mmproj(path.name)}
        if len(models) == 1 and (best := tower_of(unnamed)):
            found = [model.parent / best]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        log.warning(
            "several vision towers beside the model, none is loaded: name one with --mmproj (%s)", names
        )
    if len(found) != 1:
        return None
    from qwen_serve.llamacpp.vision import has_vision

    if not has_vision():
        log.warning("%s is not loaded: llama.cpp was built without libmtmd (`qwen-serve setup`)", found[0])
        return None
    return found[0]


def _bare(stem: str) -> str:
    """A model's name without its quant and its part's number."""
    return re.sub(r"(-UD)?[-.](I?Q\d|F16|F32|BF16|MXFP4)\w*(-\d+-of-\d+)?$", "", stem, flags=re.IGNORECASE)


def find_model(path: Path) -> Path:
    """The GGUF at `path` or in that folder; importance matrices and vision towers do not count.

    Raises ValueError if there is none, or more than one.
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
        if not file.name.startswith("mmproj-")
        and not file.name.endswith(".imatrix.gguf")
        and not is_later_part(file.name)
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
    """Advice to convert a checkpoint, on the hub or in a folder, to a GGUF."""
    return (
        "a checkpoint of the Hugging Face hub, or in a folder, is converted once: "
        f"`qwen-convert --src {source} --quant Q4_K_M`, then --model models/{name}-Q4_K_M.gguf"
    )


def described_settings() -> list[tuple[str, str, list[tuple[str, str, str]]]]:
    """The groups of settings: (title, description, [(name, default, help)])."""
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


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def describe(settings: Settings, sources: Sources) -> str:
    """The settings in effect as TOML for --config, with the source of each that was set."""
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
    """The settings that were set, and their sources, in one line; "" if all are defaults."""
    chosen = []
    for name, source in sources.items():
        if source != "default":
            value = getattr(settings, name)
            chosen.append(
                f"{name} = {'(secret)' if isinstance(value, SecretStr) else _toml(value)} ({source})"
            )
    return ", ".join(chosen)
