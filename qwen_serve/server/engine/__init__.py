"""Tokens in, tokens out: one model on one llama.cpp context, shared by many concurrent requests.

`Engine.submit` queues a request for the engine's thread and returns a `Generation` to iterate. On that thread
the `Scheduler` chooses the tokens of each step, the `Speculator` adds drafts, the `Runner` decodes, and the
sampled tokens go to the `Generation`. This package does not use HTTP, text templates or JSON.
"""

from qwen_serve.llamacpp.errors import ModelLoadError

from .adapters import MOST as MOST_ADAPTERS
from .engine import Engine
from .errors import (
    DoesNotFit,
    EngineDead,
    EngineError,
    GenerationError,
    InvalidGrammar,
    InvalidPrompt,
    NoTokenLeft,
    PromptTooLong,
    QueueFull,
    RequestFault,
)
from .outputs import Generation
from .planning.hardware import bounded_by
from .planning.plan import MemoryPlan
from .prefix_cache import PrefixFileError
from .request import (
    TIERS,
    Adapters,
    CacheMiss,
    DraftCounts,
    FinishReason,
    GenerateRequest,
    Prompt,
    SchedulingParams,
    ServiceTier,
    Timings,
)
from .sampling import (
    LLAMA_CPP_SAMPLERS,
    LONGEST_GRAMMAR,
    MAX_LOGPROBS,
    SAMPLERS,
    Constraint,
    Grammar,
    Logprobs,
    SamplingParams,
    ThinkingLimits,
    TokenLogprobs,
)
from .settings import EngineSettings
from .slots import SlotState, restore_prefixes, save_prefixes, slot_states
from .stats import EngineStats
from .vocab import TokenBudget, Vocab
