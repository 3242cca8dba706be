"""Dataclasses of options that several commands share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import Group, Parameter, Token
from cyclopts.validators import Number

from qwen_serve.bench.errors import BenchError
from qwen_serve.bench.store import Run

T = TypeVar("T")

# Sections of a command's help, in this order, after its own parameters.
SERVERS_GROUP = Group("Servers", sort_key=1)
SERVER_GROUP = Group("Server", sort_key=2)
LOAD_GROUP = Group("Load", sort_key=3)
TENANTS_GROUP = Group("Load of --workload tenants", sort_key=4)
GATES_GROUP = Group("Gates", sort_key=5)
PROMPTS_GROUP = Group("Prompts", sort_key=6)
RECORD_GROUP = Group("Record of the run", sort_key=7)

Positive = Annotated[int, Parameter(validator=Number(gte=1))]
Natural = Annotated[int, Parameter(validator=Number(gte=0))]


def comma_separated(read: Callable[[str], T]) -> Parameter:
    """Option whose tuple is separated by commas: ``Annotated[tuple[int, ...],
    comma_separated(positive)]``."""

    def convert(_: Any, tokens: Sequence[Token]) -> tuple[T, ...]:
        return tuple(
            read(part.strip()) for token in tokens for part in token.value.split(",") if part.strip()
        )

    def show(values: Sequence[T] | None) -> str | None:
        return None if not values else ",".join(str(getattr(value, "name", value)) for value in values)

    return Parameter(converter=convert, n_tokens=1, accepts_keys=False, negative=(), show_default=show)


def repeated(read: Callable[[str], T]) -> Parameter:
    """Option that may be repeated; ``read`` parses each value, such as NAME=VALUE."""

    def convert(_: Any, tokens: Sequence[Token]) -> tuple[T, ...]:
        return tuple(read(token.value) for token in tokens)

    return Parameter(converter=convert, n_tokens=1, accepts_keys=False, negative=())


def parsed_by(read: Callable[[str], T]) -> Parameter:
    """Option that ``read`` parses: ``Annotated[Limits, parsed_by(read_limits)]``."""

    def convert(_: Any, tokens: Sequence[Token]) -> T:
        return read(tokens[-1].value)

    return Parameter(converter=convert, n_tokens=1, accepts_keys=False, negative=())


def named_values(texts: Sequence[str], flag: str) -> dict[str, str]:
    """Values of a flag given as NAME=VALUE, by name. Raises BenchError, naming the flag, for other texts and
    for a repeated name."""
    pairs = [text.partition("=") for text in texts]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise BenchError(f"{flag} {wrong[0]}: want NAME=VALUE")
    return {name: value for name, _, value in pairs}


def positive(text: str) -> int:
    """An integer of at least 1; ValueError otherwise."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text}: want an integer of at least 1")
    return int(text)


def positive_number(text: str) -> float:
    """A number above 0; ValueError otherwise."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{text}: want a number above 0")
    return value


Positives = Annotated[tuple[int, ...], comma_separated(positive)]
Rates = Annotated[tuple[float, ...], comma_separated(positive_number)]


@Parameter(name="*", group=SERVER_GROUP)
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The server that is measured."""

    url: str = "http://127.0.0.1:8080"
    """URL of the server."""
    model: str | None = None
    """`model` field of the requests (default: none; for chats the first model in /v1/models)."""
    api_key: Annotated[str | None, Parameter(env_var="QWEN_BENCH_API_KEY")] = None
    """API key, sent as a bearer token."""
    timeout: float = 600.0
    """Time limit of a request, in seconds."""
    name: str | None = None
    """Name of the server in the tables (default: its URL)."""


@Parameter(name="*", group=RECORD_GROUP)
@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Where a run is recorded."""

    out: Path = Path("results")
    """Store: a folder with one folder for each run."""
    card: str | None = None
    """Name of the server's GPU (default: from nvidia-smi, for a local server)."""
    note: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Sentence to record with the run; may be repeated."""

    def begin(self, verb: str, settings: Mapping[str, Any], *, local: bool = True) -> Run:
        """Begin a run in this store. ``local``: the servers use this machine and its GPU."""
        return Run.begin(self.out, verb, settings=settings, card=self.card, local=local, notes=self.note)


@Parameter(name="*", group=PROMPTS_GROUP)
@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Generated prompts, and the tokenizer that counts their tokens."""

    tokenizer: str | None = None
    """Tokenizer: a GGUF, a folder with tokenizer.json, or a hub id (default: the server's /tokenize)."""
    prompts: Literal["natural", "words"] = "natural"
    """Content of distinct prompts. natural: paragraphs of English prose in random order; words: random
    words."""
    text: Path | None = None
    """Text file from which distinct prompts are cut instead; no part is used twice."""
    seed: int = 0
    """Seed of the generated prompts."""
    recount: bool = True
    """Count answers with the tokenizer, too; the lower count is verified. What random weights write has other
    tokens than those that were generated, so only the server can count them."""
    stop_at_eos: Annotated[bool, Parameter(negative=())] = False
    """Let answers to generated prompts end at the end-of-sequence token (default: ignore_eos)."""

    def settings(self) -> dict[str, str | int | bool]:
        """The settings that a manifest records."""
        made = {"text": str(self.text)} if self.text is not None else {"prompts": self.prompts}
        tokenizer = {"tokenizer": self.tokenizer} if self.tokenizer is not None else {}
        return {
            **made,
            **tokenizer,
            "seed": self.seed,
            "recount": self.recount,
            "stop_at_eos": self.stop_at_eos,
        }
