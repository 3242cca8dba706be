"""One request's state, from submission to its last token."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from enum import Enum
from time import perf_counter
from typing import TYPE_CHECKING, Literal, get_args

from .pictures import NO_PICTURES, Layout

if TYPE_CHECKING:
    from .sampling import Logprobs, Sampler

FinishReason = Literal["stop", "length", "cancelled"]

Adapters = tuple[tuple[int, float], ...]
"""LoRA adapters by their number, ascending, each with its scale, which is not 0; () is the model alone."""

ServiceTier = Literal["priority", "default", "flex"]
TIERS: tuple[ServiceTier, ...] = get_args(ServiceTier)
"""The best one first."""


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """Whose a request is, and what it may ask of the queue; the scheduling policy says what counts."""

    tenant: str = ""
    """Who shares the server with whom: an API key or an address, under whatever name."""
    share: float = 1.0
    """Of what there is, beside other tenants' shares."""
    service_tier: ServiceTier = "default"
    priority: int = 0
    """The lower number first, as in vLLM."""


ANYBODY = SchedulingParams()


class SequenceStatus(Enum):
    """What becomes of a sequence next."""

    WAITING = "waiting"
    """It has no slot."""
    WAITING_FOR_PREFIX = "waiting for prefix"
    """It has a slot, and another sequence computes its beginning."""
    PREFILL = "prefill"
    """Its prompt is read, or what it had before a preemption."""
    DECODE = "decode"
    """It has sampled a token since it began: what is pending is no prompt any more."""


PREFILL, DECODE = SequenceStatus.PREFILL, SequenceStatus.DECODE
"""Asked for many times a step, and an enum's members are slow to look up."""


@dataclass(slots=True)
class Timings:
    """Moments of a request on the clock of `time.perf_counter`, in seconds; 0 until they come."""

    submitted: float = 0.0
    started: float = 0.0
    """Its first token entered a step."""
    first_token: float = 0.0
    finished: float = 0.0
    waited_for: Literal["", "a slot", "its tenant's others", "KV cells", "a prefix"] = ""
    """Why it did not start at once; the last reason. A prefix is one that another request computes."""
    preempted: int = 0
    """How often it lost its slot."""

    @property
    def queue_ms(self) -> float:
        """Time spent waiting for a place."""
        return _milliseconds(self.submitted, self.started or self.finished)

    @property
    def prefill_ms(self) -> float:
        """Time from the first step to the first generated token."""
        return _milliseconds(self.started, self.first_token or self.finished)

    @property
    def decode_ms(self) -> float:
        """Time from the first generated token to the end, or until now."""
        return _milliseconds(self.first_token, self.finished or perf_counter())


def _milliseconds(start: float, end: float) -> float:
    return max(0.0, end - start) * 1000 if start else 0.0


@dataclass(slots=True)
class DraftCounts:
    """What became of drafts: of one request, or of one drafter and all requests."""

    steps: int = 0
    """Steps that verified a draft."""
    drafted: int = 0
    """Tokens in those drafts."""
    accepted: int = 0
    """Those that were right."""

    def add(self, drafted: int, accepted: int) -> None:
        """A draft of so many tokens was verified."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted


@dataclass(slots=True)
class Progress:
    """How much of a prompt has been read, for a listener that wants to be told before the first token."""

    cached: int = 0
    """Tokens that the prefix cache had."""
    processed: int = 0
    """All that have been read, those among them."""


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """Why a part of a prompt had to be computed.

    "new": nothing before began with more of it. "diverged": something before began like it up to `position`
    and went another way there. "evicted": it was read up to `position`, and the states are gone. "off": there
    is no prefix cache.
    """

    reason: Literal["new", "diverged", "evicted", "off"]
    position: int
    """Tokens of the prompt that were known, though there need not be a state at their end."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Token ids that were checked against the vocabulary and the context; `Engine.prompt` makes it.

    Several requests may share one.
    """

    ids: list[int]
    """Never changed. Those of pictures' rows are negative."""
    pictures: Layout = NO_PICTURES

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """Tokens, and how many of them a slot has computed. Touched by the engine's thread only.

    A sequence is always in the middle of the same movement: `pending` tokens are not computed yet, and once
    they are, the logits of the last one give the next. Most of the time one is pending; more while its prompt
    is read, after a preemption, and after a draft that was rejected.
    """

    tokens: list[int]
    """The prompt, which becomes the sequence's own, and what was generated."""
    max_tokens: InitVar[int]
    sampler: Sampler
    timings: Timings = field(default_factory=lambda: Timings(submitted=perf_counter()))
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """What became of draft tokens."""
    logprobs: Logprobs | None = None
    """What it has to tell of its tokens beside them, if anything."""
    stops: frozenset[int] = frozenset()
    """Tokens that end it beside those that end every generation."""
    include_stop: bool = False
    """Such a token is a part of the answer."""
    pictures: Layout = NO_PICTURES
    """In its prompt."""
    salt: str = ""
    """Only sequences with the same one share prefixes."""
    scheduling: SchedulingParams = ANYBODY
    progress: Progress | None = None
    adapters: Adapters = ()
    """Only sequences with the same ones are in a step."""
    arrival: int = field(init=False, default=0)
    """Its number in the queue's order of arrival; 0 before it came and once it is over."""
    charged: tuple[int, int] = field(init=False, default=(0, 0))
    """Prompt tokens and written tokens that its tenant has been charged for."""
    uncounted: float = field(init=False, default=0.0)
    """What it has cost that is not in its service tier's sum yet."""
    aged: bool = field(init=False, default=False)
    """It was admitted for having waited long, and keeps its slot."""
    prompt_length: int = field(init=False)
    limit: int = field(init=False)
    """Most tokens, prompt and answer together."""
    computed: int = field(init=False, default=0)
    """Tokens whose keys, values and state the slot holds."""
    slot: int | None = field(init=False, default=None)
    """llama.cpp's sequence id while it does not wait for one."""
    status: SequenceStatus = field(init=False, default=SequenceStatus.WAITING)
    suspect: bool = field(init=False, default=False)
    """Its logits were no use, or those of one that ran beside it: it runs alone until it has a token."""
    reused: int | None = field(init=False, default=None)
    """Tokens of the prompt that it found in the prefix cache, once it has begun for the first time."""
    missed: CacheMiss | None = field(init=False, default=None)
    """Why the rest was not there."""

    def __post_init__(self, max_tokens: int) -> None:
        self.prompt_length = len(self.tokens)
        self.limit = self.prompt_length + max_tokens

    @property
    def reads_all(self) -> bool:
        """Whether all of its prompt has to be computed: what is in a cache has left no rows."""
        return self.logprobs is not None and self.logprobs.of_prompt

    def unscored(self, start: int, count: int) -> range:
        """Of `count` positions from `start` on those after which a token of the prompt comes whose
        log-probability is wanted, and not known yet."""
        if self.logprobs is None or not self.logprobs.of_prompt:
            return range(0)
        return range(max(start, len(self.logprobs.prompt)), min(start + count, self.prompt_length - 1))

    @property
    def pending(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def pending_alike(self) -> int:
        """Those among them that one batch may hold: tokens of text, or rows of one picture."""
        end = self.pictures.run(self.computed)
        return self.pending if end is None else min(self.pending, end - self.computed)

    @property
    def reads_picture(self) -> bool:
        """Whether the next pending token is a row of a picture."""
        return bool(self.pictures) and self.pictures.at(self.computed) is not None

    @property
    def decoding(self) -> bool:
        return self.status is DECODE

    @property
    def begun(self) -> bool:
        """Whether it takes part in steps."""
        return self.status is DECODE or self.status is PREFILL

    @property
    def ready(self) -> bool:
        """Whether its next step gives a token, and no stretch of a prompt is in between."""
        return self.status is DECODE or (self.status is PREFILL and self.pending == 1)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    def extend(self, new: list[int], ends: frozenset[int]) -> tuple[list[int], FinishReason | None]:
        """Append `new` tokens up to the end of the answer; what was appended, and why it ends if it does.

        `ends` are the tokens that end every generation; they are not appended, and its own `stops` only where
        they are to be a part of the answer.
        """
        ends = ends | self.stops if self.stops else ends
        done: FinishReason | None = None
        room = self.limit - len(self.tokens)
        if len(new) >= room or not ends.isdisjoint(new):
            n = next((n for n, token in enumerate(new[:room]) if token in ends), room)
            done = "stop" if n < room and n < len(new) else "length"
            included = done == "stop" and self.include_stop and new[n] in self.stops
            new = new[: n + included]
        self.tokens += new
        if self.logprobs is not None:
            self.logprobs.keep(self.generated + (done == "stop"))
        return new, done
