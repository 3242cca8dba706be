"""Tokens in, tokens out: one model on one llama.cpp context, shared by many requests at once.

A request's way: `Engine.submit` makes a `Sequence` and hands it to the engine's thread; there the `Scheduler`
chooses the tokens of each step, the `Runner` decodes them in one batch and samples, and the engine sends what
came out to the `Generation` that its caller iterates. Nothing here knows of HTTP, text templates or JSON.
"""

from .engine import Engine
from .errors import (
    DoesNotFit,
    EngineDead,
    EngineDraining,
    EngineError,
    GenerationError,
    InvalidPrompt,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
)
from .generation import Generation
from .memory import MemoryPlan
from .sampling import SamplingParams
from .sequence import FinishReason, Timings
from .settings import EngineSettings
from .stats import EngineStats
from .vocab import Vocab

__all__ = [
    "DoesNotFit",
    "Engine",
    "EngineDead",
    "EngineDraining",
    "EngineError",
    "EngineSettings",
    "EngineStats",
    "FinishReason",
    "Generation",
    "GenerationError",
    "InvalidPrompt",
    "MemoryPlan",
    "ModelLoadError",
    "PromptTooLong",
    "QueueFull",
    "SamplingParams",
    "Timings",
    "Vocab",
]
