"""From rows of logits to tokens: each request's parameters, processors, constraint and draws."""

from .constraint import Constraint
from .draw import Sampler
from .grammar import LONGEST_GRAMMAR, Grammar, GrammarCompiler
from .logprobs import Logprobs, TokenLogprobs
from .parameters import MAX_LOGPROBS, SamplingParams
from .thinking import ThinkingLimits
from .verification import SampleResult, sample

__all__ = [
    "LONGEST_GRAMMAR",
    "MAX_LOGPROBS",
    "Constraint",
    "Grammar",
    "GrammarCompiler",
    "Logprobs",
    "SampleResult",
    "Sampler",
    "SamplingParams",
    "ThinkingLimits",
    "TokenLogprobs",
    "sample",
]
