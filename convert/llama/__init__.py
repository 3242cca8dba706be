"""llama.cpp as the converter needs it: the only package of `convert` that touches ctypes.

A typed, narrow face on llama-cpp-python's bindings of `llama.h` and `llama-ext.h`: it runs models, and it
quantizes files. Failures are `LlamaError`s that carry what llama.cpp itself last complained about.
"""

from .bindings import LLAMA_VERSION, Floats, LlamaError
from .context import Batch, Context, ContextKind
from .model import Model, Runtime
from .probe import Observer, Routing
from .quantize import quantize_file, quantized_types
from .weights import Bytes, Weights, dequantize_rows, quantize_rows, requires_imatrix

__all__ = [
    "LLAMA_VERSION",
    "Batch",
    "Bytes",
    "Context",
    "ContextKind",
    "Floats",
    "LlamaError",
    "Model",
    "Observer",
    "Routing",
    "Runtime",
    "Weights",
    "dequantize_rows",
    "quantize_file",
    "quantize_rows",
    "quantized_types",
    "requires_imatrix",
]
