"""LoRA adapters, which add to the products of a model's matrices in a context."""

import os
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API

from .errors import ModelLoadError
from .log import reason, tapped_log
from .model import Model


class LoraAdapter:
    """One adapter's GGUF, loaded on the devices of the model's matrices and freed with the model.

    Its A and B must fit the model, which `read_header` checks: llama.cpp aborts on some that do not. Raises
    ModelLoadError.
    """

    def __init__(self, model: Model, path: Path) -> None:
        with tapped_log() as lines:
            self._handle: Any = C.llama_adapter_lora_init(model._handle, os.fsencode(path))
        if not self._handle:
            raise ModelLoadError(f"llama.cpp could not load the LoRA adapter {path}: {reason(lines)}")
