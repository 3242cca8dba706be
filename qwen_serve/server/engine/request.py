"""One request's state, from submission to its last token."""

from dataclasses import InitVar, dataclass, field
from enum import Enum
from time import perf_counter
from typing import Literal, get_args

from .pictures import NO_PICTURES, Layout
from .sampling import Constraint, Logprobs, Sampler, SamplingParams, ThinkingLimits
from .sampling.thinking import ThinkingWatch

FinishReason = Literal["stop", "length", "cancelled"]

LUMP = 16
"""Tokens with log-probabilities that are delivered together if their answer is not streamed."""

GROWTH = 64
"""Cells that admission leaves free for each running sequence; with fewer, preemption soon follows."""

Adapters = tuple[tuple[int, float], ...]
"""LoRA adapters as (number, scale), numbers ascending, no scale 0; () is the model without adapters."""

ServiceTier = Literal["priority", "default", "flex"]
TIERS: tuple[ServiceTier, ...] = get_args(ServiceTier)
"""The best tier first."""


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """A request's tenant and its place in the queue; which fields count depends on the scheduling policy."""

    tenant: str = ""
    """Any name for the tenant, which is an API key or an address."""
    share: float = 1.0
    """The tenant's weight relative to other tenants' shares."""
    service_tier: ServiceTier = "default"
    priority: int = 0
    """The lower number first, as in vLLM."""


ANYBODY = SchedulingParams()


class RequestStatus(Enum):
    """What a request does next."""

    WAITING = "waiting"
    """It has no slot."""
    WAITING_FOR_PREFIX = "waiting for prefix"
    """It has a slot, and another request computes its prefix."""
    PREFILL = "prefill"
    """It reads its prompt, or after a preemption all its tokens."""
    DECODE = "decode"
    """It has sampled a token since it got its slot, so its pending tokens are not prefill."""


PREFILL, DECODE = RequestStatus.PREFILL, RequestStatus.DECODE
"""Module-level names, since looking up an enum's members is slow and happens many times a step."""


PRIVATE = "private "
"""A salt that begins with this is a single request's own."""


def is_private(salt: str) -> bool:
    """Whether a request with this salt shares nothing with others."""
    return salt.startswith(PRIVATE)


@dataclass(slots=True)
class Timings:
    """Times of a request on the clock of `time.perf_counter`, in seconds; 0 until they are reached."""

    submitted: float = 0.0
    started: float = 0.0
    """When its prefill began."""
    first_token: float = 0.0
    finished: float = 0.0
    waited_for: Literal["", "a slot", "its tenant's others", "KV cells", "a prefix"] = ""
    """The last reason why it did not start at once. "a prefix" is one that another request computes."""
    preempted: int = 0
    """How often it lost its slot."""

    @property
    def queue_ms(self) -> float:
        """Time from submission to the first step."""
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
    """Draft counts of one request, or of one drafter over all requests."""

    steps: int = 0
    """Steps that verified a draft."""
    drafted: int = 0
    """Tokens in those drafts."""
    accepted: int = 0
    """Accepted tokens among them."""

    def add(self, drafted: int, accepted: int) -> None:
        """Count a verified draft of `drafted` tokens."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """Why a part of a prompt had to be computed.

    "new": no earlier prompt shares more tokens. "diverged": an earlier prompt has the same tokens up to
    `position` and differs there. "evicted": the tokens up to `position` were computed before, but the state
    was evicted. "off": there is no prefix cache.
    """

    reason: Literal["new", "diverged", "evicted", "off"]
    position: int
    """Tokens of the prompt that were computed before. A state at their end may never have been kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Token ids, checked against the vocabulary and the context by `Engine.prompt`.

    Several requests may share one.
    """

    ids: list[int]
    """Never changed. Picture rows have negative ids."""
    pictures: Layout = NO_PICTURES

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """What `Engine.submit` is asked for."""

    prompt: Prompt
    params: SamplingParams
    max_tokens: int | None = None
    """Clamped to the room that the prompt leaves in the context; None means all of it. With 0 only the prompt
    is read."""
    stream: bool = True
    """Whether tokens are delivered as they come, rather than all at the end (log-probabilities: at times)."""
    constraint: Constraint | None = None
    """New, and of this request only."""
    salt: str = ""
    """Only requests with the same salt and the same LoRA `adapters` share prefixes."""
    thinking: ThinkingLimits | None = None
    """With limits the answer begins in a think block."""
    scheduling: SchedulingParams = ANYBODY
    reports_progress: bool = False
    """Whether its listener is woken each time more of the prompt has been read."""
    adapters: Adapters = ()


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A request: its tokens, how many of them a slot has computed, and why it ended. Only the engine's thread
    changes it; its listener reads it.

    `pending` tokens are not computed yet; once they are, the logits of the last one give the next token.
    Usually one token is pending. More are while the prompt is read, after a preemption, and after a rejected
    draft. A token that is being sampled is pending, too: a placeholder stands for it.
    """

    tokens: list[int]
    """The prompt and the generated tokens; from `begin` on a list of its own, to which it appends."""
    max_tokens: InitVar[int]
    sampler: Sampler = field(default=None)  # type: ignore[assignment]  # `begin` sets it
    timings: Timings = field(default_factory=lambda: Timings(submitted=perf_counter()))
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """Drafted and accepted tokens."""
    logprobs: Logprobs | None = None
    """Collects log-probabilities, if the request wants any."""
    stops: frozenset[int] = frozenset()
    """Further tokens that end this answer, besides those that end every generation."""
    include_stop: bool = False
    """Whether one of `stops` becomes part of the answer."""
    pictures: Layout = NO_PICTURES
    """The pictures in its prompt."""
    salt: str = ""
    """Only requests with the same salt share prefixes."""
    scheduling: SchedulingParams = ANYBODY
    stream: bool = True
    """Whether its listener gets tokens as they come, rather than all at the end."""
    reports_progress: bool = False
    thinking: ThinkingWatch | None = None
    """Follows the answer's think block, if it has one; it has seen at least the tokens that were sent."""
    adapters: Adapters = ()
    """All requests of a step have the same adapters."""
    arrival: int = field(init=False, default=0)
    """Its number in the queue's order of arrival; 0 before it arrives and after it ends."""
    charged: tuple[int, int] = field(init=False, default=(0, 0))
    """Prompt tokens and output tokens that its tenant has been charged for."""
    uncounted: float = field(init=False, default=0.0)
    """The part of its cost that is not yet in its service tier's sum."""
    aged: bool = field(init=False, default=False)
    """It was admitted because it had waited long; requests of a better rank do not preempt it."""
    done: FinishReason | Exception | None = field(init=False, default=None)
    """Why it ended: an exception if it failed."""
    sent: int = field(init=False)
    """Tokens, those of the prompt included, that need not be sent to its listener any more."""
    prompt_length: int = field(init=False)
    limit: int = field(init=False)
    """Maximum tokens, prompt and answer together."""
    computed: int = field(init=False, default=0)
    """Tokens whose keys, values and state the slot holds, or that are being computed. Only the scheduler
    writes it, and `placeholders`."""
    placeholders: int = field(init=False, default=0)
    """Tokens behind `tokens` that are being sampled."""
    slot: int | None = field(init=False, default=None)
    """llama.cpp's sequence id; None while it waits for one."""
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    quarantined: bool = field(init=False, default=False)
    """Its logits, or those of another request of its step, were unusable: it runs alone until it has a
    token."""
    reused: int | None = field(init=False, default=None)
    """Prompt tokens found in the prefix cache at its first start; None before."""
    missed: CacheMiss | None = field(init=False, default=None)
    """Why the rest of the prompt was not found."""

    def __post_init__(self, max_tokens: int) -> None:
        self.prompt_length = self.sent = len(self.tokens)
        self.limit = self.prompt_length + max_tokens

    @property
    def reads_all(self) -> bool:
        """Whether its whole prompt must be computed: cached tokens give no rows of logits."""
        return self.logprobs is not None and self.logprobs.of_prompt

    def unscored(self, start: int, count: int) -> range:
        """The positions, `count` from `start` on, whose next prompt token still lacks its log-probability."""
        if self.logprobs is None or not self.logprobs.of_prompt:
            return range(0)
        return range(max(start, len(self.logprobs.prompt)), min(start + count, self.prompt_length - 1))

    @property
    def pending(self) -> int:
        """Number of tokens to compute before the next one can be sampled."""
        return len(self.tokens) + self.placeholders - self.computed

    @property
    def pending_alike(self) -> int:
        """Pending tokens that one batch may hold: either tokens of text or rows of one picture."""
        end = self.pictures.run(self.computed)
        return self.pending if end is None else min(self.pending, end - self.computed)

    def pending_with(self, rows: int) -> int:
        """Maximum pending tokens that need at most `rows` rows of logits for prompt log-probabilities."""
        scored = self.unscored(self.computed, self.pending)
        return self.pending if len(scored) <= rows else scored.start + rows - self.computed

    @property
    def room(self) -> int:
        """Tokens that may still be sampled, besides those that are being sampled."""
        return self.limit - len(self.tokens) - self.placeholders

    @property
    def growth(self) -> int:
        """Cells that admission leaves free for it while it runs."""
        return min(GROWTH, self.room)

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
        """Whether its next step gives a token without a chunk of a prompt before it."""
        return self.status is DECODE or (self.status is PREFILL and self.pending == 1)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens from the prefix cache."""
        return self.reused or 0

    @property
    def processed(self) -> int:
        """Prompt tokens that are computed or being computed, the cached ones included."""
        return max(self.cached_tokens, min(self.computed, self.prompt_length))

    def begin(self, sampler: Sampler) -> None:
        """Take over its sampler, and copy the prompt, which may be others' too."""
        self.sampler, self.tokens = sampler, self.tokens.copy()

    def close(self) -> None:
        """Free its sampler. Idempotent."""
        if self.sampler is not None:
            self.sampler.close()

    @property
    def delivers(self) -> bool:
        """Whether its listener gets new tokens now: of a streamed answer all, of others those with
        log-probabilities in lumps, so that these are written while the device computes. Slots' lumps end
        in different steps."""
        lump = LUMP if self.sent > self.prompt_length else 1 + (self.slot or 0) % LUMP
        scored = self.logprobs is not None and self.logprobs.of_answer
        return self.stream or (scored and len(self.tokens) - self.sent >= lump)

    def take_unsent(self) -> list[int]:
        """The tokens to send to its listener now."""
        start, self.sent = self.sent, len(self.tokens)
        return self.tokens[start:]

    def extend(self, new: list[int], ends: frozenset[int]) -> list[int]:
        """Append `new` tokens up to the end of the answer; return those appended. Sets `done` at the end.

        `ends` are the tokens that end every generation; they are not appended. Its own `stops` are appended
        only with `include_stop`.
        """
        ends = ends | self.stops if self.stops else ends
        room = self.limit - len(self.tokens)
        if len(new) >= room or not ends.isdisjoint(new):
            n = next((n for n, token in enumerate(new[:room]) if token in ends), room)
            self.done = "stop" if n < room and n < len(new) else "length"
            included = self.done == "stop" and self.include_stop and new[n] in self.stops
            new = new[: n + included]
        self.tokens += new
        if self.logprobs is not None:
            self.logprobs.keep(self.generated + (self.done == "stop"))
        return new
