"""Turns rows of logits into tokens: each request's parameters, processors, constraint and draws."""

from qwen_serve.llamacpp.row_results import TokenLogprobs

from .constraint import Constraint
from .draw import Sampler
from .dry import DrySamplers
from .grammar import LONGEST_GRAMMAR, Grammar, GrammarCompiler
from .logprobs import Logprobs
from .parameters import LLAMA_CPP_SAMPLERS, MAX_LOGPROBS, SAMPLERS, SamplingParams
from .thinking import ThinkingLimits
