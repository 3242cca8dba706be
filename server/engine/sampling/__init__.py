"""From rows of logits to tokens: each request's parameters, processors, constraint and draws."""

from .constraint import Constraint
from .draw import RowNotKept, Sampler, UnusableLogits
from .grammar import LONGEST_GRAMMAR, Grammar, GrammarCompiler
from .logprobs import Logprobs, TokenLogprobs
from .parameters import MAX_LOGPROBS, SamplingParams
from .thinking import ThinkingLimits
from .verification import sample

__all__ = [
    "LONGEST_GRAMMAR",
    "MAX_LOGPROBS",
    "Constraint",
    "Grammar",
    "GrammarCompiler",
    "Logprobs",
    "RowNotKept",
    "Sampler",
    "SamplingParams",
    "ThinkingLimits",
    "TokenLogprobs",
    "UnusableLogits",
    "sample",
]
